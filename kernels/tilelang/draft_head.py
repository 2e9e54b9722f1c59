"""Heads of the draft module; see `kernels.ops.draft`."""

from typing import Any

import torch
from torch import Tensor

from flashmesh.kernels.tilelang.build import Variant, build

STAGES = {8: 5, 16: 5, 64: 3}
"""Pipeline stages that fit, by token tile. Vocabulary is the product's first operand in all of them: same bits."""

VOCAB = 64
"""Tokens of the vocabulary in a stage."""

MULTIPROCESSORS = 132
"""Blocks: each goes through its share of the vocabulary, always loading ahead."""

VECTOR = 8
THREADS = 128


def _markov_logits(vocab: int, rank: int, tokens: int) -> Any:
    import tilelang.language as T

    num_rows = T.dynamic("num_rows")
    blocks = -(-vocab // VOCAB)

    @T.prim_func
    def markov_logits(
        base: T.Tensor((num_rows, vocab), "float32"),
        embedded: T.Tensor((num_rows, rank), "bfloat16"),
        head: T.Tensor((vocab, rank), "bfloat16"),
        out: T.Tensor((num_rows, vocab), "float32"),
    ):
        with T.Kernel(MULTIPROCESSORS, T.ceildiv(num_rows, tokens), threads=128) as (block, tile):
            weights = T.alloc_shared((VOCAB, rank), "bfloat16")
            rows = T.alloc_shared((tokens, rank), "bfloat16")
            before = T.alloc_shared((tokens, VOCAB), "float32")
            sums = T.alloc_fragment((VOCAB, tokens), "float32")
            T.copy(embedded[tile * tokens, 0], rows)
            for i in T.Pipelined(-(-blocks // MULTIPROCESSORS), num_stages=STAGES[tokens]):
                first = (i * MULTIPROCESSORS + block) * VOCAB
                T.copy(head[first, 0], weights)
                T.copy(base[tile * tokens, first], before)
                T.gemm(weights, rows, sums, transpose_B=True, clear_accum=True)
                for v, t in T.Parallel(VOCAB, tokens):
                    if tile * tokens + t < num_rows and first + v < vocab:
                        out[tile * tokens + t, first + v] = before[t, v] + sums[v, t]

    return markov_logits


def _confidence(width: int, rank: int) -> Any:
    import tilelang.language as T

    num_rows = T.dynamic("num_rows")
    length = width + rank
    steps = -(-length // (THREADS * VECTOR))

    @T.prim_func
    def confidence(
        state: T.Tensor((num_rows, width), "bfloat16"),
        embedded: T.Tensor((num_rows, rank), "bfloat16"),
        weight: T.Tensor((length,), "bfloat16"),
        out: T.Tensor((num_rows,), "float32"),
    ):
        with T.Kernel(num_rows, threads=THREADS) as row:
            thread = T.get_thread_binding()
            value = T.alloc_local((VECTOR,), "bfloat16")
            factor = T.alloc_local((VECTOR,), "bfloat16")
            total = T.alloc_var("float32", 0.0)
            warps = T.alloc_shared((THREADS // 32,), "float32")
            for step in T.unroll(steps):
                first = (step * THREADS + thread) * VECTOR
                if first < length:
                    if first < width:
                        for i in T.vectorized(VECTOR):
                            value[i] = state[row, first + i]
                    else:
                        for i in T.vectorized(VECTOR):
                            value[i] = embedded[row, first - width + i]
                    for i in T.vectorized(VECTOR):
                        factor[i] = weight[first + i]
                    for i in T.unroll(VECTOR):
                        total += T.Cast("float32", value[i]) * T.Cast("float32", factor[i])
            for step in T.unroll(5):
                total += T.shfl_xor(total, 16 >> step)
            if thread % 32 == 0:
                warps[thread // 32] = total
            T.sync_threads()
            if thread == 0:
                total = warps[0]
                for w in T.unroll(1, THREADS // 32):
                    total += warps[w]
                out[row] = total

    return confidence


def markov_logits(base: Tensor, embedded: Tensor, head: Tensor) -> Tensor:
    """Corrects logits; contract of `kernels.ops.draft.markov_logits`.

    Raises:
        ValueError: V is no multiple of 64, the rank none of 64 up to 256, or shapes or types differ.
    """
    (num_rows, vocab), rank = base.shape, embedded.shape[1]
    if vocab % VOCAB or rank % 64 or rank > 256:
        raise ValueError(
            f"{vocab} tokens of rank {rank}: tokens must be a multiple of {VOCAB}, the rank of 64 "
            "and at most 256"
        )
    if len(embedded) != num_rows or head.shape != (vocab, rank):
        raise ValueError("markov_logits: base is [n, V], embedded [n, rank], head [V, rank]")
    if base.dtype != torch.float32 or {embedded.dtype, head.dtype} != {torch.bfloat16}:
        raise ValueError("markov_logits: base is fp32, embedded and head are bf16")
    out = torch.empty_like(base)
    if num_rows:
        tokens = next((t for t in STAGES if num_rows <= t), max(STAGES))
        build(_markov_logits, vocab, rank, tokens)(base, embedded, head, out)
    return out


def confidence(state: Tensor, embedded: Tensor, weight: Tensor) -> Tensor:
    """Rates drafts; contract of `kernels.ops.draft.confidence`.

    Raises:
        ValueError: a width is no multiple of 8, or shapes differ.
    """
    (num_rows, width), rank = state.shape, embedded.shape[1]
    if width % VECTOR or rank % VECTOR:
        raise ValueError(f"{width} + {rank} columns: multiples of {VECTOR} are needed")
    if len(embedded) != num_rows or weight.shape != (width + rank,):
        raise ValueError("confidence: state is [n, D], embedded [n, rank], weight [D + rank]")
    out = torch.empty(num_rows, dtype=torch.float32, device=state.device)
    if num_rows:
        build(_confidence, width, rank)(state, embedded, weight, out)
    return out


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash."""
    return [
        *(Variant(f"markov_logits.{n}", _markov_logits, (129280, 256, n)) for n in STAGES),
        Variant("confidence", _confidence, (5120, 256)),
    ]
