"""Routed experts with all that is around them, and the draft module's heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashmesh.bench.gpu.case import Case

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from flashmesh.kernels.tilelang.expert_layout import ExpertWeights

D, N, VOCAB, RANK = 5120, 2304, 129280, 256
LIMIT, SCALING = 10.0, 1.5
PACKED = 1 / 2 + 1 / 32
"""Bytes of a weight: half a byte of code, and a scale byte for 32."""

SETS = 4
DISTINCT = 24


def cases() -> Iterator[Case]:
    """Yields routing, experts, products beside torch's, SwiGLU, and the Markov head."""
    yield from _route()
    yield from _swiglu()
    yield from _markov()
    yield from _experts()
    torch.cuda.empty_cache()
    yield from _products()


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def _route() -> Iterator[Case]:
    from flashmesh.kernels.tilelang.route import route

    for num_experts, count in ((384, 6), (128, 3)):
        # A layer's gate is read once a step, so it never is in the L2 cache.
        gates = [_normal(num_experts, D) / D**0.5 for _ in range(20)]
        bias = torch.randn(num_experts, device="cuda")
        for rows in (1, 8, 64, 1024, 16384) if num_experts == 384 else (64,):
            x = [_normal(rows, D) for _ in range(2)]
            text = torch.ones(rows, dtype=torch.bool, device="cuda")
            yield Case(
                f"route.{num_experts}.{rows}",
                lambda call, x=x, text=text, gates=gates, bias=bias, count=count: route(
                    x[call % 2], gates[call % 20], bias, bias, text, count, SCALING
                ),
                num_bytes=x[0].nbytes + gates[0].nbytes + rows * count * 8,
                num_flops=2 * rows * num_experts * D,
            )


def _swiglu() -> Iterator[Case]:
    from flashmesh.kernels.tilelang.swiglu import swiglu

    for rows in (64, 16384):
        gu = [_normal(rows, 2 * N) for _ in range(SETS)]
        yield Case(
            f"swiglu.{rows}",
            lambda call, gu=gu: swiglu(gu[call % SETS], LIMIT, True),
            num_bytes=gu[0].nbytes * 3 // 2,
        )


def _markov() -> Iterator[Case]:
    from flashmesh.kernels.tilelang.draft_head import confidence, markov_logits

    heads = [_normal(VOCAB, RANK) for _ in range(2)]
    for rows in (1, 8, 64):
        base = [torch.randn(rows, VOCAB, device="cuda") for _ in range(2)]
        embedded = _normal(rows, RANK)
        yield Case(
            f"markov_logits.{rows}",
            lambda call, base=base, embedded=embedded: markov_logits(
                base[call % 2], embedded, heads[call % 2]
            ),
            num_bytes=heads[0].nbytes + 2 * base[0].nbytes,
            num_flops=2 * rows * VOCAB * RANK,
        )
    state, embedded, weight = _normal(64, D), _normal(64, RANK), _normal(D + RANK)
    yield Case(
        "confidence.64",
        lambda _: confidence(state, embedded, weight),
        num_bytes=state.nbytes + embedded.nbytes + weight.nbytes,
    )


def _weights(num_experts: int) -> ExpertWeights:
    """Random experts, 24 of them over and over: each still lies in its own memory."""
    from flashmesh.kernels.tilelang.expert_layout import prepare_experts

    parts = []
    for rows, columns in ((N, D), (N, D), (D, N)):
        shape = (DISTINCT, rows, columns // 2)
        parts.append(torch.empty(shape, dtype=torch.uint8, device="cuda").random_(0, 256))
        shape = (DISTINCT, rows, columns // 32)
        parts.append(torch.empty(shape, dtype=torch.uint8, device="cuda").random_(118, 123))
    w = prepare_experts(*parts)
    copies = num_experts // DISTINCT
    return w._replace(
        w13=w.w13.repeat(copies, 1, 1, 1),
        s13=w.s13.repeat(copies, 1, 1, 1),
        w2=w.w2.repeat(copies, 1, 1, 1),
        s2=w.s2.repeat(copies, 1, 1, 1),
        num_experts=num_experts,
    )


def _experts() -> Iterator[Case]:
    from flashmesh.kernels.tilelang.experts import experts

    num_experts, count = 384, 6
    w = _weights(num_experts)
    for rows in (1, 8, 64, 1024, 16384):
        x, shared = _normal(rows, D), _normal(rows, D)
        # Experts change from call to call, so that few tokens find none in the L2 cache.
        ids = [
            torch.rand(rows, num_experts, device="cuda").topk(count, 1).indices.int()
            for _ in range(SETS)
        ]
        weights = torch.rand(rows, count, device="cuda")
        hit = sum(len(chosen.unique()) for chosen in ids) / SETS
        yield Case(
            f"experts.{rows}",
            lambda call, x=x, shared=shared, ids=ids, weights=weights: experts(
                x, ids[call % SETS], weights, w, LIMIT, True, shared
            ),
            num_bytes=int(hit * 3 * N * D * PACKED) + 3 * x.nbytes,
            num_flops=2 * rows * count * 3 * N * D,
        )


def _products() -> Iterator[Case]:
    """The first product of 96 experts beside torch's grouped products of the same sizes, on FP8 and bf16 weights."""
    from flashmesh.kernels.tilelang.expert_gemm import gate_up
    from flashmesh.kernels.tilelang.expert_tiles import expert_tiles
    from flashmesh.kernels.tilelang.experts import token_tile

    num_experts = 96
    w = _weights(num_experts)
    wide = torch.randn(num_experts, 2 * N, D, device="cuda", dtype=torch.bfloat16)
    narrow = wide.to(torch.float8_e4m3fn)
    row_scales = torch.ones(num_experts, 2 * N, device="cuda")
    for share in (1, 4, 16, 128, 512):
        rows = num_experts * share
        x = _normal(rows, D)
        x8, scales = x.to(torch.float8_e4m3fn), torch.ones(rows, device="cuda")
        ids = torch.arange(num_experts, device="cuda").repeat_interleave(share).int().unsqueeze(1)
        ends = torch.arange(share, rows + 1, share, dtype=torch.int32, device="cuda")
        tile = token_tile(rows, 1, num_experts)
        tiles, _ = expert_tiles(ids, torch.ones(rows, 1, device="cuda"), num_experts, tile)
        peers: dict[str, Any] = {
            "fp8": lambda _, x8=x8, scales=scales, ends=ends: torch._scaled_grouped_mm(
                x8,
                narrow.transpose(1, 2),
                scales,
                row_scales,
                offs=ends,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            ),
            "bf16": lambda _, x=x, ends=ends: torch._grouped_mm(
                x, wide.transpose(1, 2), offs=ends, out_dtype=torch.bfloat16
            ),
        }
        for name, peer in peers.items():
            yield Case(
                f"gate_up.96x{share}.beside_{name}",  # the same product, once for each peer
                lambda _, x=x, tiles=tiles, tile=tile: gate_up(x, tiles, w, LIMIT, True, tile),
                num_bytes=int(num_experts * 2 * N * D * PACKED) + x.nbytes + 2 * rows * N,
                num_flops=2 * rows * 2 * N * D,
                peer=peer,
                peer_name=f"torch {name}",
            )
