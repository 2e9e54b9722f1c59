"""Compressed rows: rotated, rounded to NVFP4-16 and stored; see `kernels.ops.rows`."""

from typing import Any

import torch
from torch import Tensor

from flashmesh.kernels.tilelang.build import Variant, build
from flashmesh.kernels.tilelang.row_parts import parts

THREADS = 128


def _store_compressed(width: int, half: int) -> Any:
    """A thread takes one block of 16 columns: no thread needs another's."""
    import tilelang.language as T

    num_rows, num_places = T.dynamic("num_rows, num_places")
    blocks = width // 16
    rows = THREADS // blocks
    stay = width - 2 * half
    p = parts()

    @T.prim_func
    def store_compressed(
        latent: T.Tensor((num_rows, width), "bfloat16"),
        cos: T.Tensor((num_rows, half), "float32"),
        sin: T.Tensor((num_rows, half), "float32"),
        kv: T.Tensor((num_places, width // 2 + blocks), "uint8"),
        place: T.Tensor((num_rows,), "int32"),
    ):
        with T.Kernel(T.ceildiv(num_rows, rows), threads=THREADS) as group:
            thread = T.get_thread_binding()
            low = T.alloc_local((8,), "float32")
            high = T.alloc_local((8,), "float32")
            scale = T.alloc_local((1,), "float32")
            words = T.alloc_local((2,), "uint32")
            word = T.alloc_local((1,), "uint32")
            codes = T.alloc_local((8,), "uint8")
            row = group * rows + thread // blocks
            block = thread % blocks
            if row < num_rows:  # noqa: SIM102 (joined, every access would check again)
                if place[row] >= 0:
                    p.load(latent, row, block * 16, low)
                    p.load(latent, row, block * 16 + 8, high)
                    if block * 16 >= stay:
                        p.rotate(low, cos, sin, row, (block * 16 - stay) // 2)
                        p.rotate(high, cos, sin, row, (block * 16 - stay) // 2 + 4)
                    scale[0] = T.float32(6 * 2.0**-9)
                    for i in T.unroll(8):
                        scale[0] = T.max(scale[0], T.max(T.abs(low[i]), T.abs(high[i])))
                    # No power of two: these quotients are true divisions.
                    scale[0] = T.Cast(
                        "float32", T.Cast("float8_e4m3fn", T.min(scale[0] / 6.0, 448.0))
                    )
                    word[0] = T.uint32(0)
                    for i in T.unroll(8):
                        p.e2m1_code(low[i] / scale[0], word, i)
                    words[0] = word[0]
                    word[0] = T.uint32(0)
                    for i in T.unroll(8):
                        p.e2m1_code(high[i] / scale[0], word, i)
                    words[1] = word[0]
                    for i in T.unroll(8):
                        codes[i] = T.Cast(
                            "uint8", (words[i // 4] >> T.uint32(i % 4 * 8)) & T.uint32(255)
                        )
                    for i in T.vectorized(8):
                        kv[place[row], block * 8 + i] = codes[i]
                    kv[place[row], width // 2 + block] = T.reinterpret(
                        T.Cast("float8_e4m3fn", scale[0]), "uint8"
                    )

    return store_compressed


def store_compressed(latent: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, row: Tensor) -> None:
    """Stores compressed rows; contract of `kernels.ops.rows.store_compressed`.

    Raises:
        ValueError: the width is none of 256, 512, 1024 and 2048, or shapes or dtypes do not fit together.
    """
    width, half = latent.shape[1], cos.shape[1]
    if width not in (256, 512, 1024, 2048) or half % 8 or 2 * half > width:
        raise ValueError(
            f"rows of {width} columns, {half} pairs rotated: 256, 512, 1024 or 2048 columns and a "
            "multiple of 8 pairs are supported"
        )
    if latent.dtype != torch.bfloat16 or not latent.is_contiguous():
        raise ValueError("latent is contiguous bf16 [T, E]")
    if cos.shape != (len(latent), half) or sin.shape != cos.shape or row.shape != (len(latent),):
        raise ValueError("cos, sin and row need an entry for every row")
    if kv.shape[1:] != (width // 2 + width // 16,) or kv.dtype != torch.uint8:
        raise ValueError(f"kv rows have {width // 2 + width // 16} bytes; got {tuple(kv.shape)}")
    if row.dtype != torch.int32 or cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise ValueError("row is int32, cos and sin are fp32")
    if len(latent):
        build(_store_compressed, width, half)(latent, cos, sin, kv, row)


def variants() -> list[Variant]:
    """The kernel of V4.1-Flash."""
    return [Variant("store_compressed", _store_compressed, (512, 32))]
