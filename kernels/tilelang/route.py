"""Choice of experts; see `kernels.ops.moe`.

Scores are sums over K in parts of fixed size, added in order. Few tokens: blocks for each part, so that the gate's 4 MB
stream through the whole device; many: one block keeps adding parts up in registers. The bits are the same.
"""

from typing import Any

import torch
from torch import Tensor

from flashmesh.kernels.tilelang.build import Variant, build

PARTS = (512, 256)
"""Columns of a partial sum: the first that divides D."""

STEP = 64
"""Columns of a pipeline stage, with many tokens."""

TOKENS = (8, 16, 32, 64)
"""Token tiles of the kernel for few tokens."""

FEW = 256
"""At most so many are few."""

WIDE = 128
"""Token tile beyond."""

SPLIT = 2048
"""At most so many tokens have a block for each part."""


def _part(width: int) -> int:
    return next(part for part in PARTS if width % part == 0)


def _partial_scores(num_experts: int, width: int, tokens: int) -> Any:
    import tilelang.language as T

    num_rows = T.dynamic("num_rows")
    columns = _part(width)
    parts = width // columns

    @T.prim_func
    def partial_scores(
        x: T.Tensor((num_rows, width), "bfloat16"),
        gate: T.Tensor((num_experts, width), "bfloat16"),
        scores: T.Tensor((parts, num_rows, num_experts), "float32"),
    ):
        with T.Kernel(-(-num_experts // 64), parts, T.ceildiv(num_rows, tokens), threads=128) as (
            block,
            part,
            tile,
        ):
            weights = T.alloc_shared((64, columns), "bfloat16")
            rows = T.alloc_shared((tokens, columns), "bfloat16")
            sums = T.alloc_fragment((64, tokens), "float32")
            T.pdl_trigger()
            T.copy(gate[block * 64, part * columns], weights)
            T.copy(x[tile * tokens, part * columns], rows)
            T.gemm(weights, rows, sums, transpose_B=True, clear_accum=True)
            for e, t in T.Parallel(64, tokens):
                if tile * tokens + t < num_rows and block * 64 + e < num_experts:
                    scores[part, tile * tokens + t, block * 64 + e] = sums[e, t]

    return partial_scores


def _wide_scores(num_experts: int, width: int, split: bool) -> Any:
    import tilelang.language as T

    num_rows = T.dynamic("num_rows")
    experts = 192 if num_experts > 128 else 128
    steps = _part(width) // STEP  # of a part
    parts = width // _part(width) if split else 1
    turns = steps if split else width // STEP

    @T.prim_func
    def wide_scores(
        x: T.Tensor((num_rows, width), "bfloat16"),
        gate: T.Tensor((num_experts, width), "bfloat16"),
        scores: T.Tensor((parts, num_rows, num_experts), "float32"),
    ):
        with T.Kernel(
            -(-num_experts // experts), T.ceildiv(num_rows, WIDE), parts, threads=2 * experts
        ) as (block, tile, part):
            weights = T.alloc_shared((experts, STEP), "bfloat16")
            rows = T.alloc_shared((WIDE, STEP), "bfloat16")
            sums = T.alloc_fragment((experts, WIDE), "float32")
            total = T.alloc_fragment((experts, WIDE), "float32")
            T.clear(total)
            T.clear(sums)
            for k in T.Pipelined(turns, num_stages=4):
                T.copy(gate[block * experts, (part * turns + k) * STEP], weights)
                T.copy(x[tile * WIDE, (part * turns + k) * STEP], rows)
                T.gemm(weights, rows, sums, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                if k % steps == steps - 1:
                    for e, t in T.Parallel(experts, WIDE):
                        total[e, t] += sums[e, t]
                        sums[e, t] = 0
            for e, t in T.Parallel(experts, WIDE):
                if tile * WIDE + t < num_rows and block * experts + e < num_experts:
                    scores[part, tile * WIDE + t, block * experts + e] = total[e, t]

    return wide_scores


def _pick(num_experts: int, parts: int, count: int, scaling: float) -> Any:
    import tilelang.language as T

    num_rows = T.dynamic("num_rows")
    # A block sums and activates the scores of its tokens, then a warp chooses for each. Partial sums are many loads:
    # a token has all threads to itself.
    tokens, threads = (1, 128) if parts > 1 else (8, 256)
    padded = -(-num_experts // 32) * 32
    held = padded // 32  # experts of a lane: lane, lane + 32, ...
    turns = -(-tokens * padded // threads)
    everyone = 0xFFFFFFFF

    @T.prim_func
    def pick(
        scores: T.Tensor((parts, num_rows, num_experts), "float32"),
        bias: T.Tensor((num_experts,), "float32"),
        bias_vl: T.Tensor((num_experts,), "float32"),
        text: T.Tensor((num_rows,), "bool"),
        ids: T.Tensor((num_rows, count), "int32"),
        weights: T.Tensor((num_rows, count), "float32"),
    ):
        with T.Kernel(T.ceildiv(num_rows, tokens), threads=threads) as block:
            thread = T.get_thread_binding()
            lane = thread % 32
            score = T.alloc_shared((tokens, padded), "float32")
            keys = T.alloc_shared((tokens, padded), "uint32")
            sums = T.alloc_local((turns,), "float32")
            shift = T.alloc_local((turns,), "float32")
            key = T.alloc_local((held,), "uint32")
            chosen = T.alloc_local((count,), "int32")
            bits = T.alloc_var("uint32")
            best = T.alloc_var("uint32")
            expert = T.alloc_var("uint32")
            mine = T.alloc_var("float32")
            total = T.alloc_var("float32")
            T.pdl_sync()  # waits for the scores; the launch overlaps their kernel
            for i in T.unroll(turns):
                token = (i * threads + thread) // padded
                e = (i * threads + thread) % padded
                sums[i] = 0
                shift[i] = 0
                if block * tokens + token < num_rows and e < num_experts and token < tokens:
                    shift[i] = T.if_then_else(text[block * tokens + token], bias[e], bias_vl[e])
                    sums[i] = scores[0, block * tokens + token, e]
                    for part in T.unroll(1, parts):
                        sums[i] += scores[part, block * tokens + token, e]
            for i in T.unroll(turns):
                token = (i * threads + thread) // padded
                e = (i * threads + thread) % padded
                if block * tokens + token < num_rows and token < tokens:
                    # As torch: the identity where exp would leave nothing of the 1.
                    if sums[i] <= 20:
                        sums[i] = T.log1p(T.exp(sums[i]))
                    sums[i] = T.sqrt(sums[i])
                    bits = 0
                    if e < num_experts:
                        # Unsigned whole numbers in the order of the floats; 0 is below all of them, and a
                        # score is no -0, so neither is its sum with anything.
                        bits = T.reinterpret(sums[i] + shift[i], "uint32")
                        if bits >= T.uint32(0x80000000):
                            bits = bits ^ T.uint32(0xFFFFFFFF)
                        else:
                            bits = bits ^ T.uint32(0x80000000)
                    score[token, e] = sums[i]
                    keys[token, e] = bits
            T.sync_threads()
            warp = thread // 32
            row = block * tokens + warp
            if warp < tokens and row < num_rows:
                for h in T.unroll(held):
                    key[h] = keys[warp, 32 * h + lane]
                for slot in T.unroll(count):
                    best = key[0]
                    for h in T.unroll(1, held):
                        best = T.max(best, key[h])
                    best = T.call_extern("uint32", "__reduce_max_sync", T.uint32(everyone), best)
                    expert = T.uint32(num_experts)
                    for h in T.unroll(held):
                        if key[held - 1 - h] == best:
                            expert = T.Cast("uint32", 32 * (held - 1 - h) + lane)
                    expert = T.call_extern(
                        "uint32", "__reduce_min_sync", T.uint32(everyone), expert
                    )
                    chosen[slot] = T.Cast("int32", expert)
                    for h in T.unroll(held):
                        if chosen[slot] == 32 * h + lane:
                            key[h] = 0
                total = score[warp, chosen[0]]
                for slot in T.unroll(1, count):
                    total += score[warp, chosen[slot]]
                for slot in T.unroll(count):
                    if lane == slot:
                        mine = score[warp, chosen[slot]]
                        ids[row, slot] = chosen[slot]
                        weights[row, slot] = T.float32(scaling) * mine / (total + 1e-20)

    return pick


def route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    bias_vl: Tensor,
    text: Tensor,
    count: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Chooses experts and weighs them; contract of `kernels.ops.moe.route`.

    Raises:
        ValueError: D is no multiple of 256, M none of 16 up to 512, count above M or 32, or shapes or types differ.
    """
    (num_rows, width), num_experts = x.shape, len(gate)
    if width % PARTS[-1] or num_experts % 16 or num_experts > 512:
        raise ValueError(
            f"{num_experts} experts of {width} columns: experts must be a multiple of 16 up to "
            f"512, columns of {PARTS[-1]}"
        )
    if not 0 < count <= min(num_experts, 32):
        raise ValueError(f"{count} of {num_experts} experts chosen, at most 32 can be")
    if gate.shape[1] != width or bias.shape != bias_vl.shape or bias.shape != (num_experts,):
        raise ValueError("route: x is [T, D], gate [M, D], biases [M]")
    if text.shape != (num_rows,):
        raise ValueError(f"text is {tuple(text.shape)}, not one for each of {num_rows} rows")
    if x.dtype != torch.bfloat16 or gate.dtype != torch.bfloat16:
        raise ValueError(f"x is {x.dtype} and gate {gate.dtype}, not bf16")
    ids = torch.empty(num_rows, count, dtype=torch.int32, device=x.device)
    weights = torch.empty(num_rows, count, dtype=torch.float32, device=x.device)
    if not num_rows:
        return ids, weights
    parts = width // _part(width) if num_rows <= SPLIT else 1
    scores = torch.empty(parts, num_rows, num_experts, dtype=torch.float32, device=x.device)
    if num_rows <= FEW:
        tokens = next((t for t in TOKENS if num_rows <= t), TOKENS[-1])
        build(_partial_scores, num_experts, width, tokens)(x, gate, scores)
    else:
        build(_wide_scores, num_experts, width, parts > 1)(x, gate, scores)
    pick = build(_pick, num_experts, parts, count, float(scaling))
    pick(scores, bias, bias_vl, text, ids, weights)
    return ids, weights


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash: 384 experts top-6 in the backbone, 128 top-3 in the draft blocks."""
    kernels = []
    for num_experts, count in ((384, 6), (128, 3)):
        name = f"route.{num_experts}"
        for tokens in TOKENS:
            args: tuple[Any, ...] = (num_experts, 5120, tokens)
            kernels.append(Variant(f"{name}.partial{tokens}", _partial_scores, args))
        for split in (True, False):
            args = (num_experts, 5120, split)
            kernels.append(
                Variant(f"{name}.wide.{'parts' if split else 'whole'}", _wide_scores, args)
            )
        for parts in (1, 5120 // _part(5120)):
            args = (num_experts, parts, count, 1.5)
            kernels.append(Variant(f"{name}.pick{parts}", _pick, args))
    return kernels
