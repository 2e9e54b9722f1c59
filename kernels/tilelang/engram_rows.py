"""Look-up of Engram rows; see `kernels.ops.engram`."""

from typing import Any

import torch
from torch import Tensor

from flashmesh.kernels.tilelang.build import Variant, build

VECTOR = 8
THREADS = 256


def _engram_rows(width: int, columns: int) -> Any:
    import tilelang.language as T

    num_rows, num_tokens = T.dynamic("num_rows"), T.dynamic("num_tokens")
    lanes = width // VECTOR
    at_once = THREADS // lanes
    turns = -(-columns // at_once)
    blocks = width // 32

    @T.prim_func
    def engram_rows(
        codes: T.Tensor((num_rows, width), "float8_e4m3fn"),
        scales: T.Tensor((num_rows, blocks), "uint8"),
        rows: T.Tensor((num_tokens, columns), "int64"),
        out: T.Tensor((num_tokens, columns * width), "bfloat16"),
    ):
        with T.Kernel(num_tokens, threads=THREADS) as token:
            column = T.get_thread_binding() // lanes
            first = T.get_thread_binding() % lanes * VECTOR
            row = T.alloc_local((turns,), "int64")
            code = T.alloc_local((turns, VECTOR), "float8_e4m3fn")
            exponent = T.alloc_local((turns,), "uint8")
            value = T.alloc_local((VECTOR,), "bfloat16")
            bits = T.alloc_var("int32")
            scale = T.alloc_var("float32")
            # Rows lie anywhere in a large table: all of a thread's loads are in flight together.
            for turn in T.unroll(turns):
                row[turn] = 0
                if turn * at_once + column < columns:
                    row[turn] = rows[token, turn * at_once + column]
            for turn in T.unroll(turns):
                for i in T.vectorized(VECTOR):
                    code[turn, i] = codes[row[turn], first + i]
                exponent[turn] = scales[row[turn], first // 32]
            for turn in T.unroll(turns):
                bits = T.Cast("int32", exponent[turn])
                # Byte 0 is 2^-127, a subnormal whose bits are not byte << 23; byte 255 is NaN.
                bits = T.if_then_else(bits == 0, 1 << 22, bits << 23)
                bits = T.if_then_else(bits == 255 << 23, 0x7FC00000, bits)
                scale = T.reinterpret(bits, "float32")
                for i in T.unroll(VECTOR):
                    value[i] = T.Cast("bfloat16", T.Cast("float32", code[turn, i]) * scale)
                if turn * at_once + column < columns:
                    for i in T.vectorized(VECTOR):
                        out[token, (turn * at_once + column) * width + first + i] = value[i]

    return engram_rows


def engram_rows(codes: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
    """Looks up table rows; contract and bits of `kernels.ops.engram.engram_rows`.

    Raises:
        ValueError: the width is no power of two from 32 to 2048, or shapes or types differ.
    """
    width, columns = codes.shape[1], rows.shape[1]
    if width not in (32, 64, 128, 256, 512, 1024, 2048):
        raise ValueError(f"rows of {width} values: a power of two from 32 to 2048 is needed")
    if scales.shape != (len(codes), width // 32):
        raise ValueError(f"scales are {tuple(scales.shape)}, not one for every 32 codes of a row")
    if codes.dtype != torch.float8_e4m3fn or scales.dtype != torch.uint8:
        raise ValueError(f"codes are {codes.dtype} and scales {scales.dtype}, not e4m3 and uint8")
    out = torch.empty(len(rows), columns * width, dtype=torch.bfloat16, device=codes.device)
    if len(rows):
        build(_engram_rows, width, columns)(codes, scales, rows, out)
    return out


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash."""
    return [Variant("engram_rows", _engram_rows, (256, 24))]
