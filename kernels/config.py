"""The model's configuration: `config.json` as a frozen, checked dataclass.

Field names are those of the released file's `text_config`; token ids come from its top level.
Nothing is computed here beyond the layer map (which layer reads whose cache), and an unusable file
is refused with every problem named.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from flashmesh.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_OTHER_SPELLINGS = {
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "engram_pad_id": "engram_pad_token_id",
    "dspark_n_activated_experts": "dspark_num_experts_per_tok",
}
"""Keys as the reference inference folder spells them -> keys of the released file."""

_FIXED = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "hc_shifted": True,
    "use_fp4_sparse_kv": True,
}
"""Keys that select variants of which only one exists here; absent means the value shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """YaRN parameters of the compressed layers: frequencies are interpolated, sizes kept."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and layer map of one model; fields are named as in the released `config.json`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling
    compress_rope_theta: float
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_vocab_size: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int

    def __post_init__(self) -> None:
        problems = _size_problems(self) or _map_problems(self)
        if problems:
            raise CheckpointError("config.json: " + "; ".join(problems))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads `config.json` of a checkpoint folder.

        Raises:
            CheckpointError: the file is missing, is not JSON, or describes no usable model.
        """
        try:
            raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Builds the configuration from the nested (or flattened) contents of `config.json`.

        Unknown keys are ignored: released files carry many that do not concern the text model.

        Raises:
            CheckpointError: with every missing, mistyped or inconsistent key.
        """
        text = {**raw, **raw.get("text_config", {})}
        for other, key in _OTHER_SPELLINGS.items():
            if other in text:
                text.setdefault(key, text[other])
        problems = [
            f"{key} is {text[key]!r}, only {value!r} is supported"
            for key, value in _FIXED.items()
            if text.get(key, value) != value
        ]
        index_k = text.get("index_k_source_layer_ids")
        if index_k is not None and index_k != text.get("kv_source_layer_ids"):
            problems.append("index_k_source_layer_ids differs from kv_source_layer_ids")
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            try:
                values[field.name] = _convert(field.name, str(field.type), text[field.name])
            except KeyError:
                problems.append(f"{field.name} is missing")
            except (TypeError, ValueError) as error:
                problems.append(f"{field.name}: {error}")
        if problems:
            raise CheckpointError("config.json: " + "; ".join(problems))
        return cls(**values)

    @property
    def num_encoder_layers(self) -> int:
        """Layers of the encoder half = id of the first decoder layer (the first of ratio 1)."""
        return self.compress_ratios.index(1)

    @property
    def engram_hash_columns(self) -> int:
        """Table rows that one token looks up in one Engram layer: orders 2.. times heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def ratio(self, layer: int) -> int:
        """Tokens of one compressed row in `layer`; 0 means that the layer has its window only."""
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed KV `layer` attends to; None for a window-only layer."""
        return _source(self.kv_source_layer_ids, layer) if self.ratio(layer) else None

    def index_source(self, layer: int) -> int | None:
        """The layer whose top-k selection `layer` uses; None for a window-only layer."""
        return _source(self.index_source_layer_ids, layer) if self.ratio(layer) else None


def _convert(name: str, kind: str, value: Any) -> Any:
    if name == "rope_scaling":
        return _rope_scaling(value)
    if kind == "tuple[int, ...]":
        return tuple(_integer(item) for item in value)
    return float(value) if kind == "float" else _integer(value)


def _integer(value: Any) -> int:
    if isinstance(value, bool) or int(value) != value:
        raise ValueError(f"{value!r} is not a whole number")
    return int(value)


def _rope_scaling(value: Mapping[str, Any]) -> RopeScaling:
    kind = value.get("rope_type", value.get("type"))
    if kind != "yarn":
        raise ValueError(f"rope_type is {kind!r}, only 'yarn' is supported")
    names = [field.name for field in dataclasses.fields(RopeScaling)]
    missing = [name for name in names if name not in value]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}")
    return RopeScaling(**{name: value[name] for name in names})


def _source(sources: tuple[int, ...], layer: int) -> int:
    """Largest source that is <= layer (the lists are sorted)."""
    return sources[bisect.bisect_right(sources, layer) - 1]


def _size_problems(c: ModelConfig) -> list[str]:
    """Problems of single fields; the layer map is checked only when there are none."""
    may_be_zero = {
        "candidate_source_layer_id", "engram_pad_token_id", "num_nextn_predict_layers",
        "dspark_noise_token_id", "bos_token_id", "eos_token_id", "pad_token_id", "image_token_id",
    }  # fmt: skip
    problems = [
        f"{field.name} must be {'>= 0' if field.name in may_be_zero else '> 0'}"
        for field in dataclasses.fields(c)
        if isinstance(value := getattr(c, field.name), int | float)
        and (value < 0 or (value == 0 and field.name not in may_be_zero))
    ]
    rules = (
        (c.head_dim % 32 == 0, "head_dim must be a multiple of 32"),
        (c.index_head_dim % 32 == 0, "index_head_dim must be a multiple of 32"),
        (c.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim must be even"),
        (
            c.qk_rope_head_dim <= min(c.head_dim, c.index_head_dim),
            "qk_rope_head_dim exceeds a head",
        ),
        (
            c.o_groups == 0 or c.num_attention_heads % c.o_groups == 0,
            "o_groups must divide num_attention_heads",
        ),
        (
            c.num_experts_per_tok <= c.n_routed_experts,
            "num_experts_per_tok exceeds n_routed_experts",
        ),
        (c.n_shared_experts == 1, "n_shared_experts must be 1"),
        (c.hc_mult == 4, "hc_mult must be 4"),
        (c.eos_token_id < c.vocab_size, "eos_token_id is not below vocab_size"),
        (c.engram_max_ngram_size == 4, "engram_max_ngram_size must be 4"),
    )
    return problems + [text for ok, text in rules if not ok]


def _map_problems(c: ModelConfig) -> list[str]:
    """Problems of the layer map."""
    n, ratios = c.num_hidden_layers, c.compress_ratios
    if len(ratios) not in (n, n + c.num_nextn_predict_layers):
        return [f"compress_ratios has {len(ratios)} entries for {n} layers"]
    if any(ratio not in (0, 1, 2) for ratio in ratios) or any(ratios[n:]):
        return ["compress_ratios must hold 0, 1 and 2, and 0 for draft blocks"]
    if 1 not in ratios[:n] or any(ratio != 1 for ratio in ratios[ratios.index(1) : n]):
        return ["compress_ratios must end in one run of 1, the decoder half"]
    problems = []
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        ids = getattr(c, name)
        if list(ids) != sorted(set(ids)) or any(not 0 <= layer < n for layer in ids):
            problems.append(f"{name} must be rising layer ids below {n}")
    if problems:
        return problems
    return problems + [text for ok, text in _source_rules(c) if not ok]


def _source_rules(c: ModelConfig) -> list[tuple[bool, str]]:
    kv, index, first = (
        set(c.kv_source_layer_ids),
        set(c.index_source_layer_ids),
        c.num_encoder_layers,
    )
    rules = [
        (kv <= index, "every KV source must also be an index source"),
        (all(c.ratio(s) for s in index), "a source must not be a window-only layer"),
        (c.candidate_source_layer_id in kv, "candidate_source_layer_id must be a KV source"),
        (
            all(layer < first for layer in c.engram_layer_ids),
            # A prefill ends before the decoder half, whose first layer's rows it stores.
            "engram_layer_ids must lie in the encoder half",
        ),
        (
            [s for s in sorted(kv) if s >= first] == [first],
            # A later one would need decoder states, so a prefill could not store its rows.
            "the first decoder layer must be the only KV source of the decoder half",
        ),
        (
            len(c.engram_num_embeddings) == len(c.engram_layer_ids),
            "engram_num_embeddings and engram_layer_ids differ in length",
        ),
    ]
    for layer in range(c.num_hidden_layers):
        if not c.ratio(layer):
            continue
        for name, sources in (("KV", c.kv_source_layer_ids), ("index", c.index_source_layer_ids)):
            ok = (
                bool(sources)
                and sources[0] <= layer
                and c.ratio(_source(sources, layer)) == c.ratio(layer)
            )
            rules.append((ok, f"layer {layer} has no {name} source of its own ratio"))
    return rules
