"""Sparse attention; see `kernels.ops.attention`.

A query row's 64 heads are the 64 rows of a tensor-core product, so one block of threads gathers and converts each of
its keys once. Its three warpgroups share the work on 64 keys at a time, which lie in shared memory as bf16, twice over:
the third converts the next 64 keys, the first scores keys and weighs the left halves of the values, the second weighs
the right halves. (One warpgroup cannot hold sums of 64 x 512, and scoring twice would cost half as much again.)

With selected keys the sums are made in two halves and then added, whatever the number of rows: few rows use two blocks
of threads each (`attention_step`), many use one (`attention_prompt`), and a row's bits are the same.
"""

import math

import torch
from torch import Tensor

from flashmesh.kernels.tilelang import attention_prompt, attention_step
from flashmesh.kernels.tilelang.attention_parts import BLOCK, HEADS, PAIRS, WIDTH
from flashmesh.kernels.tilelang.build import Variant, build

MULTIPROCESSORS = 132
"""Of an H100 or H200; on fewer of them the blocks of threads take turns."""


def sparse_attention(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    window: Tensor,
    window_index: Tensor,
    kv: Tensor,
    kv_index: Tensor,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """Attends to a window and to selected keys; contract of `kernels.ops.attention.sparse_attention`.

    Weights are rounded to bf16 before they meet the values, and summed for the denominator as they were. Exponent
    bytes of `window` are at least 1 (that of a row of zeros is 105).

    Args:
        q: bf16 `[T, 64, 512]`.
        cos: fp32 `[T, 32]`.
        sin: fp32 `[T, 32]`.
        window: uint8 `[Nw, 528]`.
        window_index: int32 `[T, W]`, W a multiple of 64 from 128 on; entries from -1 on, below Nw, unchecked.
        kv: uint8 `[Nk, 288]`.
        kv_index: int32 `[T, K]`, K a multiple of 64, or 0, with W + K at most 704; like `window_index`.
        sink: fp32 `[64]`.
        scale: of the logits, above 0.

    Returns:
        bf16 `[T, 64, 512]`.

    Raises:
        ValueError: other shapes or dtypes, or a tensor that is not contiguous.
    """
    rows, num_window, num_selected = len(q), window_index.shape[-1], kv_index.shape[-1]
    wanted = (
        ("q", q, torch.bfloat16, (rows, HEADS, WIDTH)),
        ("cos", cos, torch.float32, (rows, PAIRS)),
        ("sin", sin, torch.float32, (rows, PAIRS)),
        ("window", window, torch.uint8, (len(window), WIDTH + WIDTH // 32)),
        ("window_index", window_index, torch.int32, (rows, num_window)),
        ("kv", kv, torch.uint8, (len(kv), WIDTH // 2 + WIDTH // 16)),
        ("kv_index", kv_index, torch.int32, (rows, num_selected)),
        ("sink", sink, torch.float32, (HEADS,)),
    )
    for name, tensor, dtype, shape in wanted:
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}: "
                f"contiguous {dtype} {list(shape)} is supported"
            )
    if (
        num_window % BLOCK
        or num_selected % BLOCK
        or num_window < 128
        or num_window + num_selected > 704
    ):
        raise ValueError(
            f"{num_window} window and {num_selected} selected keys a row: multiples of {BLOCK}, "
            "from 128 window keys and up to 704 in all, are supported"
        )
    if scale <= 0:
        raise ValueError(f"a scale of {scale}: positive ones are supported")
    out = torch.empty_like(q)
    if not rows:
        return out
    inputs = (
        q,
        cos,
        sin,
        _words(window),
        window_index,
        _words(kv),
        kv_index,
        sink,
    )
    numbers = _numbers(num_window, num_selected, scale)
    if rows * numbers[2] <= MULTIPROCESSORS:
        build(attention_step.attend_rows, *numbers)(*inputs, out)
    else:
        kept = torch.empty(
            MULTIPROCESSORS, 2, attention_prompt.KEPT // 2, dtype=torch.float32, device=q.device
        )
        build(attention_prompt.attend_rows, *numbers, MULTIPROCESSORS)(*inputs, kept, out)
    return out


def _words(stored: Tensor) -> Tensor:
    """Returns rows as 32-bit words, and at least one: the one that keys which are absent are read from."""
    return (stored if len(stored) else stored.new_zeros(1, stored.shape[1])).view(torch.uint32)


def _numbers(num_window: int, num_selected: int, scale: float) -> tuple[int, int, int, float]:
    """Returns a builder's arguments: keys, halves, and the factor of logits (keys stand as 2^-7 of their values)."""
    return num_window, num_selected, 2 if num_selected else 1, scale * math.log2(math.e) * 128


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash: compressed layers, window-only layers, draft blocks."""
    found = []
    for window, selected in ((128, 512), (128, 0), (192, 0)):
        numbers = _numbers(window, selected, WIDTH**-0.5)
        name = f"sparse_attention.{window}+{selected}"
        found.append(Variant(f"{name}.step", attention_step.attend_rows, numbers))
        found.append(
            Variant(f"{name}.prompt", attention_prompt.attend_rows, (*numbers, MULTIPROCESSORS))
        )
    return found
