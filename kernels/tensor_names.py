"""Every tensor of a checkpoint: its released name, its logical shape, how it is stored.

One table for the loader, which checks files against it, and for the maker of demo checkpoints. It
covers the backbone and the draft blocks, and apart from them the vision tower, which text does
without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from flashmesh.errors import Incompatible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashmesh.kernels.config import ModelConfig
    from flashmesh.kernels.formats import Kind
    from flashmesh.kernels.vision_config import VisionConfig

Role = Literal["prefill", "decode", "all"]

_VISION_PREFIXES = ("vision.", "aligner.")
_VISION_NAMES = frozenset({"image_start", "image_end", "image_newline"})


class ExpertShard(NamedTuple):
    """Which routed experts an expert-parallel rank holds: neighbours, in equal shares.

    Attributes:
        rank: in [0, num_ranks).
        num_ranks: ranks that share the experts of every block, draft blocks included.
    """

    rank: int
    num_ranks: int

    def of(self, num_experts: int) -> range:
        """Returns the experts of this rank; where they do not divide evenly, early ranks hold one more.

        Raises:
            Incompatible: there is no such rank, or a rank would hold no expert.
        """
        rank, num_ranks = self
        if not 0 <= rank < num_ranks <= num_experts:
            raise Incompatible(f"rank {rank} of {num_ranks} cannot share {num_experts} experts")
        share, more = divmod(num_experts, num_ranks)
        first = rank * share + min(rank, more)
        return range(first, first + share + (rank < more))


EVERY_EXPERT = ExpertShard(0, 1)


class TensorSpec(NamedTuple):
    """One tensor of the model.

    Attributes:
        name: as released, without a `model.` prefix.
        shape: of the values, whatever the packing.
        kind: the stored format.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Yields every tensor of the backbone and of the draft blocks, vision excepted."""
    c = config
    yield TensorSpec("embed.weight", (c.vocab_size, c.hidden_size), "BF16")
    for layer in range(c.num_hidden_layers):
        prefix = f"layers.{layer}."
        yield from _block(c, prefix, c.n_routed_experts)
        if layer in c.kv_source_layer_ids:
            yield from _compressor(c, prefix + "attn.", gated=c.ratio(layer) == 2)
        if layer in c.index_source_layer_ids:
            yield from _index_queries(c, prefix + "attn.indexer.")
        if layer in c.engram_layer_ids:
            num_rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
            yield from _engram(c, prefix + "engram.", num_rows)
    yield TensorSpec("norm.weight", (c.hidden_size,), "BF16")
    yield TensorSpec("head.weight", (c.vocab_size, c.hidden_size), "BF16")
    yield from _draft(c)


def needed_by(
    config: ModelConfig, role: Role, experts: ExpertShard = EVERY_EXPERT
) -> Iterator[TensorSpec]:
    """Yields the tensors that a role loads.

    A prefill ends in the compressed rows of the first decoder layer, so of that layer it needs only
    what makes them. All but the routed experts is the same on every rank.

    Raises:
        Incompatible: `experts` does not divide this model's.
    """
    first = config.num_encoder_layers
    kept = tuple(f"layers.{layer}." for layer in range(first))
    attn = f"layers.{first}.attn."
    if role == "prefill":
        kept += ("embed.", f"layers.{first}.attn_norm.", attn + "compressor.")
        kept += (attn + "indexer.wk.", attn + "indexer.k_norm.")
    else:
        kept = ("embed.", "layers.", "norm.", "head.", "mtp.")
    held = {
        "layers": experts.of(config.n_routed_experts),
        "mtp": experts.of(config.dspark_n_routed_experts)
        if config.num_nextn_predict_layers
        else (),
    }
    for spec in tensors(config):
        block, _, rest = spec.name.partition(".")
        _, _, expert = rest.partition(".ffn.experts.")
        if spec.name.startswith(kept) and (not expert or int(expert.split(".")[0]) in held[block]):
            yield spec


def vision_tensors(vision: VisionConfig, hidden_size: int) -> Iterator[TensorSpec]:
    """Yields every tensor of the vision tower, of the aligner and of an image's marks.

    Args:
        vision: sizes of the tower.
        hidden_size: of the text model, whose embedding rows the aligner makes.
    """
    v, width = vision, vision.hidden_size
    yield from _affine("vision.patch_embed.proj", width, v.patch_values)
    for block in range(v.num_hidden_layers):
        prefix = f"vision.blocks.{block}."
        yield TensorSpec(prefix + "norm1.weight", (width,), "BF16")
        yield from _affine(prefix + "attn.wqkv", 3 * width, width)
        yield from _affine(prefix + "attn.wo", width, width)
        yield TensorSpec(prefix + "norm2.weight", (width,), "BF16")
        # Gate rows first, then up.
        yield TensorSpec(prefix + "mlp.w1.weight", (2 * v.intermediate_size, width), "BF16")
        yield TensorSpec(prefix + "mlp.w2.weight", (width, v.intermediate_size), "BF16")
    yield TensorSpec("vision.norm.weight", (width,), "BF16")
    yield from _affine("aligner.w1", hidden_size, width * v.downsample_ratio**2)
    yield from _affine("aligner.w2", hidden_size, hidden_size)
    for name in ("image_start", "image_end", "image_newline"):
        yield TensorSpec(name, (hidden_size,), "BF16")


def _affine(name: str, outputs: int, inputs: int) -> Iterator[TensorSpec]:
    yield TensorSpec(name + ".weight", (outputs, inputs), "BF16")
    yield TensorSpec(name + ".bias", (outputs,), "BF16")


def is_vision(name: str) -> bool:
    """Whether a name belongs to the vision tower, which no text role loads."""
    return name in _VISION_NAMES or name.startswith(_VISION_PREFIXES)


def scale_name(weight_name: str) -> str:
    """Names the scales that belong to a `.weight`."""
    return weight_name.removesuffix("weight") + "scale"


def engram_table_name(layer: int) -> str:
    """Names the lookup table of an Engram layer: the one tensor that is never expanded whole."""
    return f"layers.{layer}.engram.embed.weight"


def _block(c: ModelConfig, prefix: str, num_experts: int) -> Iterator[TensorSpec]:
    """What backbone layers and draft blocks share."""
    hidden, streams = c.hidden_size, c.hc_mult
    for site in ("attn", "ffn"):
        num_coefficients = (2 + streams) * streams
        yield TensorSpec(f"{prefix}{site}_norm.weight", (hidden,), "BF16")
        yield TensorSpec(f"{prefix}hc_{site}_fn", (num_coefficients, streams * hidden), "F32")
        yield TensorSpec(f"{prefix}hc_{site}_base", (num_coefficients,), "F32")
        yield TensorSpec(f"{prefix}hc_{site}_scale", (3,), "F32")
    yield from _attention(c, prefix + "attn.")
    yield from _experts(c, prefix + "ffn.", num_experts)


def _attention(c: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    heads_dim = c.num_attention_heads * c.head_dim
    outputs = c.o_groups * c.o_lora_rank
    yield TensorSpec(prefix + "wq_a.weight", (c.q_lora_rank, c.hidden_size), "F8")
    yield TensorSpec(prefix + "q_norm.weight", (c.q_lora_rank,), "BF16")
    yield TensorSpec(prefix + "wq_b.weight", (heads_dim, c.q_lora_rank), "F8")
    yield TensorSpec(prefix + "wkv.weight", (c.head_dim, c.hidden_size), "F8")
    yield TensorSpec(prefix + "kv_norm.weight", (c.head_dim,), "BF16")
    yield TensorSpec(prefix + "wo_a.weight", (outputs, heads_dim // c.o_groups), "F8")
    yield TensorSpec(prefix + "wo_b.weight", (c.hidden_size, outputs), "F8")
    yield TensorSpec(prefix + "attn_sink", (c.num_attention_heads,), "F32")


def _experts(c: ModelConfig, prefix: str, num_experts: int) -> Iterator[TensorSpec]:
    yield TensorSpec(prefix + "gate.weight", (num_experts, c.hidden_size), "BF16")
    yield TensorSpec(prefix + "gate.bias", (num_experts,), "F32")
    yield TensorSpec(prefix + "gate.bias_vl", (num_experts,), "F32")
    yield from _swiglu(c, prefix + "shared_experts.", "F8")
    for expert in range(num_experts):
        yield from _swiglu(c, f"{prefix}experts.{expert}.", "F4")


def _swiglu(c: ModelConfig, prefix: str, kind: Kind) -> Iterator[TensorSpec]:
    inner = c.moe_intermediate_size
    yield TensorSpec(prefix + "w1.weight", (inner, c.hidden_size), kind)
    yield TensorSpec(prefix + "w2.weight", (c.hidden_size, inner), kind)
    yield TensorSpec(prefix + "w3.weight", (inner, c.hidden_size), kind)


def _compressor(c: ModelConfig, prefix: str, *, gated: bool) -> Iterator[TensorSpec]:
    yield TensorSpec(prefix + "compressor.wkv.weight", (c.head_dim, c.hidden_size), "BF16")
    if gated:
        yield TensorSpec(prefix + "compressor.wgate.weight", (c.head_dim, c.hidden_size), "BF16")
    yield TensorSpec(prefix + "compressor.norm.weight", (c.head_dim,), "BF16")
    yield TensorSpec(prefix + "indexer.wk.weight", (c.index_head_dim, c.head_dim), "BF16")
    yield TensorSpec(prefix + "indexer.k_norm.weight", (c.index_head_dim,), "BF16")


def _index_queries(c: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    yield TensorSpec(
        prefix + "wq_b.weight", (c.index_n_heads * c.index_head_dim, c.q_lora_rank), "F8"
    )
    yield TensorSpec(prefix + "weights_proj.weight", (c.index_n_heads, c.hidden_size), "BF16")


def _engram(c: ModelConfig, prefix: str, num_rows: int) -> Iterator[TensorSpec]:
    looked_up = c.engram_hash_columns * c.engram_head_dim
    yield TensorSpec(prefix + "embed.weight", (num_rows, c.engram_head_dim), "F8row")
    yield TensorSpec(prefix + "wkv.weight", ((c.hc_mult + 1) * c.hidden_size, looked_up), "F8")
    yield TensorSpec(prefix + "q_weight", (c.hc_mult, c.hidden_size), "BF16")
    yield TensorSpec(prefix + "k_weight", (c.hc_mult, c.hidden_size), "BF16")


def _draft(c: ModelConfig) -> Iterator[TensorSpec]:
    """Draft blocks: the first takes in the target's features, the last carries the heads."""
    count, hidden, rank = c.num_nextn_predict_layers, c.hidden_size, c.dspark_markov_rank
    for block in range(count):
        yield from _block(c, f"mtp.{block}.", c.dspark_n_routed_experts)
    if not count:
        return
    features = len(c.dspark_target_layer_ids) * hidden
    yield TensorSpec("mtp.0.main_proj.weight", (hidden, features), "F8")
    yield TensorSpec("mtp.0.main_norm.weight", (hidden,), "BF16")
    last = f"mtp.{count - 1}."
    yield TensorSpec(last + "norm.weight", (hidden,), "BF16")
    yield TensorSpec(last + "markov_head.embed.weight", (c.vocab_size, rank), "BF16")
    yield TensorSpec(last + "markov_head.head.weight", (c.vocab_size, rank), "BF16")
    yield TensorSpec(last + "confidence_head.proj.weight", (1, hidden + rank), "BF16")
