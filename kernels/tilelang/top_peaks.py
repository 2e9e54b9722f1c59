"""Maxima of groups of columns, from which `top_rows` selects before it looks at columns."""

from typing import Any

OCTET = 8
"""Values that a thread loads together."""
SPAN = 1024
"""Columns that a warp reduces."""


def peaks_of(sizes: tuple[int, ...]) -> Any:
    """Writes maxima of groups of columns: of 8, 8 and 64, 32, or 32 and 1024."""
    import tilelang.language as T

    num_rows, num_octets = T.dynamic("num_rows"), T.dynamic("num_octets")
    widths = [T.dynamic(f"width{level}") for level in range(2)]
    warps, passes = 4, SPAN // 256

    @T.macro
    def put(level, size, row, column, end, lane, peak):
        # Of the lanes that share a group the first one writes.
        if size in sizes and lane % T.min(size // OCTET, 32) == 0 and column < end:
            level[row, column // (size * OCTET), column // size % OCTET] = peak

    @T.prim_func
    def peaks(
        scores: T.Tensor((num_rows, num_octets, OCTET), "float32"),
        visible: T.Tensor((num_rows,), "int32"),
        level_1: T.Tensor((num_rows, widths[0], OCTET), "float32"),
        level_2: T.Tensor((num_rows, widths[1], OCTET), "float32"),
    ):
        with T.Kernel(
            T.ceildiv(num_octets, SPAN // OCTET * warps), num_rows, threads=32 * warps
        ) as (bx, row):
            values = T.alloc_local((passes * OCTET,), "float32")
            peak = T.alloc_local((2,), "float32")
            thread = T.get_thread_binding()
            lane = thread % 32
            end = visible[row]
            begin = (bx * warps + thread // 32) * SPAN + lane * OCTET

            for p in T.unroll(passes):
                if begin + p * 256 < end:
                    for part in T.unroll(2):
                        for v in T.vectorized(4):
                            values[p * OCTET + part * 4 + v] = scores[
                                row, begin // OCTET + p * 32, part * 4 + v
                            ]
            peak[1] = -T.infinity("float32")
            for p in T.unroll(passes):
                column = begin + p * 256
                peak[0] = -T.infinity("float32")
                for i in T.unroll(OCTET):
                    if column + i < end:
                        peak[0] = T.max(peak[0], values[p * OCTET + i])
                put(level_1, 8, row, column, end, lane, peak[0])
                for i in T.unroll(2):
                    peak[0] = T.max(peak[0], T.shfl_xor(peak[0], 1 << i))
                put(level_1, 32, row, column, end, lane, peak[0])
                if len(sizes) > 1:
                    peak[0] = T.max(peak[0], T.shfl_xor(peak[0], 4))
                    put(level_2, 64, row, column, end, lane, peak[0])
                    peak[1] = T.max(peak[1], peak[0])
            if 1024 in sizes:
                for i in T.unroll(2):
                    peak[1] = T.max(peak[1], T.shfl_xor(peak[1], 8 << i))
                put(level_2, 1024, row, begin, end, lane, peak[1])

    return peaks


peaks_of.pass_configs = {"tl.disable_safe_memory_legalize": True}  # every access is in bounds
