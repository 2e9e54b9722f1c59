"""Engram: which table rows an n-gram of tokens looks up, and how they enter the residual streams.

The hash is exact integer arithmetic over a compressed vocabulary, so any implementation finds the same rows. Tables are
`weights.engram_rows`'; this module never holds one.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from tokenizers import Tokenizer, normalizers
from torch import Tensor

from flashmesh.errors import CheckpointError
from flashmesh.kernels.reference.basics import linear

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from flashmesh.kernels.config import ModelConfig
    from flashmesh.kernels.reference.basics import Gemm

LOOK_BACK = 3
"""Tokens before a position that its longest n-gram reads."""

BLOCKED = -1
"""Marks a look-back token that is not there: before the start, or in an image, and all further back."""

_LONE_SPACE = "\ue000"


def grams_of(before: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Returns int64 `[len(tokens), 4]`, see `EngramHash.rows`, of tokens that follow others; at least one."""
    known = torch.tensor([*[BLOCKED] * LOOK_BACK, *before[-LOOK_BACK:], *tokens])
    return known.unfold(0, LOOK_BACK + 1, 1).flip(1)[-len(tokens) :]


def token_map(tokenizer: Tokenizer, vocab_size: int) -> Tensor:
    """Builds the compression table: tokens that read alike share an id.

    Args:
        tokenizer: of the checkpoint.
        vocab_size: number of ids.

    Returns:
        int64 `[vocab_size]`; ids count up in order of first appearance.
    """
    normalise = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
        ]
    )
    ids: dict[str, int] = {}
    table = torch.empty(vocab_size, dtype=torch.int64)
    for token in range(vocab_size):
        table[token] = ids.setdefault(_key(tokenizer, normalise, token), len(ids))
    return table


def _key(tokenizer: Tokenizer, normalise: normalizers.Normalizer, token: int) -> str:
    text = tokenizer.decode([token], skip_special_tokens=False)
    if "\ufffd" in text:
        return tokenizer.id_to_token(token) or text
    plain = normalise.normalize_str(text)
    plain = _squeeze(plain)
    plain = (_LONE_SPACE if plain == " " else plain).strip().replace(_LONE_SPACE, " ")
    return plain or text


def _squeeze(text: str) -> str:
    """Turns every run of space, tab, CR and LF into one space."""
    out: list[str] = []
    for char in text:
        if char in " \t\r\n":
            if not out or out[-1] != " ":
                out.append(" ")
        else:
            out.append(char)
    return "".join(out)


def load_token_map(folder: Path, config: ModelConfig) -> Tensor:
    """Builds the table from a checkpoint's tokenizer.json and checks its size.

    Raises:
        CheckpointError: no tokenizer, or another one than the model was trained with.
    """
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise CheckpointError(f"{path}: {error}") from error
    table = token_map(tokenizer, config.vocab_size)
    distinct = int(table.max()) + 1
    if distinct != config.engram_compressed_vocab_size:
        raise CheckpointError(
            f"{path}: compresses to {distinct} tokens, config.json says "
            f"{config.engram_compressed_vocab_size}"
        )
    return table


def bucket_primes(
    *, num_layers: int, num_orders: int, num_heads: int, start: int
) -> list[list[list[int]]]:
    """Returns the table sizes `[layer][order][head]`: primes from `start` on, each used once."""
    used: set[int] = set()
    primes: list[list[list[int]]] = []
    for _ in range(num_layers):
        primes.append([])
        for _ in range(num_orders):
            candidate = start - 1
            row: list[int] = []
            while len(row) < num_heads:
                candidate += 1
                if candidate not in used and _is_prime(candidate):
                    used.add(candidate)
                    row.append(candidate)
            primes[-1].append(row)
    return primes


def _is_prime(number: int) -> bool:
    if number < 2 or (number % 2 == 0 and number != 2):
        return False
    return all(number % factor for factor in range(3, int(number**0.5) + 1, 2))


def multipliers(layer: int, compressed_vocab: int) -> Tensor:
    """Returns the odd multipliers int64 `[4]` of a layer's hash."""
    bound = max(1, (2**63 - 1) // compressed_vocab // 2)
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=4, dtype=np.int64)
    return torch.from_numpy(drawn * 2 + 1)


class EngramHash:
    """The hash of every Engram layer of a model.

    Args:
        config: of the model.
        table: from `token_map`.
    """

    def __init__(self, config: ModelConfig, table: Tensor) -> None:
        self._table = table
        self._pad = config.engram_pad_token_id
        all_primes = bucket_primes(
            num_layers=len(config.engram_layer_ids),
            num_orders=config.engram_max_ngram_size - 1,
            num_heads=config.engram_n_heads,
            start=config.engram_vocab_size,
        )
        self._layers: dict[int, tuple[Tensor, ...]] = {}
        for layer, primes, size in zip(
            config.engram_layer_ids, all_primes, config.engram_num_embeddings, strict=True
        ):
            flat = torch.tensor(primes).flatten()
            if int(flat.sum()) != size:
                raise CheckpointError(
                    f"config.json: engram_num_embeddings of layer {layer} is {size}, the hash "
                    f"reaches {int(flat.sum())} rows"
                )
            offsets = torch.cumsum(flat, 0) - flat
            factors = multipliers(layer, config.engram_compressed_vocab_size)
            self._layers[layer] = (torch.tensor(primes), offsets, factors)

    def to(self, device: torch.device) -> Self:
        """Returns the same hash for n-grams on a device."""
        moved = copy.copy(self)
        moved._table = self._table.to(device)
        moved._layers = {
            layer: tuple(part.to(device) for part in parts) for layer, parts in self._layers.items()
        }
        return moved

    def rows(self, layer: int, grams: Tensor) -> Tensor:
        """Hashes n-grams.

        Args:
            layer: an Engram layer.
            grams: int64 `[R, 4]`: the token itself, then 1, 2 and 3 tokens back; `BLOCKED` where there is none.

        Returns:
            Table rows int64 `[R, orders * heads]`.
        """
        primes, offsets, factors = self._layers[layer]
        blocked = (grams == BLOCKED).cummax(1).values
        codes = torch.where(blocked, self._pad, self._table[grams.clamp(min=0)])
        products = codes * factors
        mixed = products[:, 0]
        columns = []
        for order in range(primes.shape[0]):
            mixed = mixed ^ products[:, order + 1]
            columns.append(mixed.unsqueeze(1) % primes[order])
        return torch.cat(columns, 1) + offsets


def inject(
    streams: Tensor,
    rows: Tensor,
    wkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    text: Tensor,
    gemm: Gemm = linear,
) -> Tensor:
    """Adds a gated value to every stream.

    Args:
        streams: fp32 `[R, 4, D]`.
        rows: looked-up rows fp32 `[R, columns * width]`.
        wkv: `[5 D, columns * width]`: four keys, then one value.
        q_weight, k_weight: `[4, D]`.
        text: bool `[R]`; False (an image) closes the gate.
        gemm: how rows and wkv multiply.

    Returns:
        fp32 `[R, 4, D]`.
    """
    return add_gated(streams, gemm(rows, wkv), q_weight, k_weight, text)


def add_gated(
    streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, text: Tensor
) -> Tensor:
    """As `inject`, with the product of rows and `wkv` given, fp32 `[R, 5 D]`."""
    num_rows, num_streams, width = streams.shape
    keys, value = kv.split([num_streams * width, width], 1)
    keys = keys.view(num_rows, num_streams, width)
    dots = (streams * q_weight * k_weight * keys).sum(-1)
    dots *= torch.rsqrt(streams.square().mean(-1) + 1e-20)
    dots *= torch.rsqrt(keys.square().mean(-1) + 1e-20)
    dots *= width**-0.5
    gate = torch.sigmoid(torch.sign(dots) * dots.abs().clamp(min=1e-6).sqrt())
    gate = gate * text.unsqueeze(1)
    return streams + gate.unsqueeze(2) * value.unsqueeze(1)
