"""Ops on single rows: norms, rotations, quantisation and stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashmesh.bench.gpu.case import Case

if TYPE_CHECKING:
    from collections.abc import Iterator

HIDDEN, RANK, WIDTH, INDEX = 5120, 1280, 512, 128
EPS = 1e-20
SETS = 4


def cases() -> Iterator[Case]:
    """Yields decode and prefill sizes."""
    for rows in (64, 16384):
        yield from _norms(rows)
        yield from _stores(rows)
        yield from _index(rows)
        yield _pairs(rows)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


def _norms(rows: int) -> Iterator[Case]:
    from flashmesh.kernels.tilelang.norm import rms_norm

    x, weight = _normal(SETS, rows, HIDDEN).bfloat16(), _normal(HIDDEN)
    for rounded in (False, True):
        yield Case(
            f"rms_norm{'.rounded' if rounded else ''}.{rows}",
            lambda call, rounded=rounded: rms_norm(x[call % SETS], weight, EPS, rounded),
            num_bytes=(3 if rounded else 2) * x[0].nbytes,
            peer=None
            if rounded
            else lambda call: torch.nn.functional.rms_norm(x[call % SETS], (HIDDEN,), eps=EPS),
            peer_name="torch.nn.functional.rms_norm",
        )


def _stores(rows: int) -> Iterator[Case]:
    from flashmesh.kernels.tilelang import compressed_store, window_store

    qkv, norm = _normal(SETS, rows, RANK + WIDTH).bfloat16(), _normal(RANK)
    cos, sin = _normal(rows, 32), _normal(rows, 32)
    row = torch.arange(rows, device="cuda").int()
    window = torch.zeros(rows, 528, dtype=torch.uint8, device="cuda")
    angles = 2 * cos.nbytes
    yield Case(
        f"query_latent_and_window.{rows}",
        lambda call: window_store.query_latent_and_window(
            qkv[call % SETS], norm, norm[:WIDTH], cos, sin, window, row, EPS
        ),
        num_bytes=qkv[0].nbytes + 4 * rows * RANK + window.nbytes + angles,
    )
    latent = _normal(SETS, rows, WIDTH).bfloat16()
    yield Case(
        f"store_window.{rows}",
        lambda call: window_store.store_window(
            latent[call % SETS], norm[:WIDTH], cos, sin, window, row, EPS
        ),
        num_bytes=latent[0].nbytes + window.nbytes + angles,
    )
    kv = torch.zeros(rows, 288, dtype=torch.uint8, device="cuda")
    yield Case(
        f"store_compressed.{rows}",
        lambda call: compressed_store.store_compressed(latent[call % SETS], cos, sin, kv, row),
        num_bytes=latent[0].nbytes + kv.nbytes + angles,
    )


def _index(rows: int) -> Iterator[Case]:
    from flashmesh.kernels.tilelang import index_keys

    cos, sin, norm = _normal(rows, 32), _normal(rows, 32), _normal(INDEX)
    key = _normal(SETS, rows, INDEX).bfloat16()
    row = torch.arange(rows, device="cuda").int()
    ik = torch.zeros(rows // 64, 64 * 68, dtype=torch.uint8, device="cuda")
    yield Case(
        f"store_index_key.{rows}",
        lambda call: index_keys.store_index_key(key[call % SETS], norm, cos, sin, ik, row, EPS),
        num_bytes=key[0].nbytes + ik.nbytes + 2 * cos.nbytes,
    )
    iq = _normal(SETS, rows, 32 * INDEX).bfloat16()
    yield Case(
        f"index_queries.{rows}",
        lambda call: index_keys.index_queries(iq[call % SETS], cos, sin),
        num_bytes=2 * iq[0].nbytes + 2 * cos.nbytes,
    )


def _pairs(rows: int) -> Case:
    """Decode rows are sequences of their own; prefill rows belong to four."""
    from flashmesh.kernels.tilelang.pair import join_pairs

    value, gate = _normal(SETS, rows, WIDTH), _normal(SETS, rows, WIDTH)
    length = 1 if rows <= 64 else rows // 4
    row = torch.arange(rows, device="cuda")
    slot, pos = (row // length).int(), (row % length + 5).int()
    open_pair = _normal(rows // length, 9, 2, WIDTH)
    begin = row % length == 0
    kept = min(length, 9) + 1  # rows of a sequence read from or written to `open_pair`
    return Case(
        f"join_pairs.{rows}",
        lambda call: join_pairs(value[call % SETS], gate[call % SETS], open_pair, slot, pos, begin),
        num_bytes=2 * value[0].nbytes + 2 * rows * WIDTH + kept * open_pair[:, 0].nbytes,
    )
