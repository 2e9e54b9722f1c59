"""Pieces that row kernels share: a thread holds eight neighbouring columns, so a block of 32 is four lanes of a warp.

Pairs of a rotation and blocks of a format never cross what a thread, or four neighbouring ones, hold. Sums run over a
thread's columns, then over lanes by doubling distance, then over warps in order, which depends on the width alone.
"""

import functools
from types import SimpleNamespace

LANE_COLUMNS = 8
"""Columns of a thread: one 16-byte load."""


@functools.cache
def parts() -> SimpleNamespace:
    """Returns the macros; made on first use, since TileLang may be missing where this module is imported."""
    import tilelang.language as T

    @T.macro
    def load(x, row, column, values):
        """values[0..7] fp32 = x[row, column..column+7] bf16, in one load."""
        raw = T.alloc_local((8,), "bfloat16")
        for i in T.vectorized(8):
            raw[i] = x[row, column + i]
        for i in T.vectorized(8):
            values[i] = T.Cast("float32", raw[i])

    @T.macro
    def store(values, y, row, column):
        """y[row, column..column+7] bf16 = values[0..7] fp32, in one store."""
        raw = T.alloc_local((8,), "bfloat16")
        for i in T.vectorized(8):
            raw[i] = T.Cast("bfloat16", values[i])
        for i in T.vectorized(8):
            y[row, column + i] = raw[i]

    @T.macro
    def store_stream(values, y, row, stream, column):
        """As `store`, into y[row, stream]."""
        raw = T.alloc_local((8,), "bfloat16")
        for i in T.vectorized(8):
            raw[i] = T.Cast("bfloat16", values[i])
        for i in T.vectorized(8):
            y[row, stream, column + i] = raw[i]

    @T.macro
    def to_bf16(values):
        raw = T.alloc_local((8,), "bfloat16")
        for i in T.vectorized(8):
            raw[i] = T.Cast("bfloat16", values[i])
        for i in T.vectorized(8):
            values[i] = T.Cast("float32", raw[i])

    @T.macro
    def add_squares(values, total):
        for i in T.unroll(8):
            total[0] += values[i] * values[i]

    @T.macro
    def lanes_sum(total, steps):
        """total[0] summed over 2^steps neighbouring lanes; every lane gets the same bits."""
        for k in T.unroll(steps):
            total[0] += T.shfl_xor(total[0], 1 << k)

    @T.macro
    def keep_warp_sum(total, shared, thread):
        """shared[warp] = total[0] summed over a warp; all threads may read it afterwards."""
        lanes_sum(total, 5)
        if thread % 32 == 0:
            shared[thread // 32] = total[0]
        T.sync_threads()

    @T.macro
    def warps_sum(total, shared, first, warps):
        """total[0] = shared[first] + ... + shared[first + warps - 1], in order."""
        total[0] = shared[first]
        for k in T.unroll(warps - 1):
            total[0] += shared[first + 1 + k]

    @T.macro
    def normed(values, factor, weight, column):
        """values = bf16(values * factor * weight)."""
        w = T.alloc_local((8,), "float32")
        for i in T.vectorized(4):
            w[i] = weight[column + i]
        for i in T.vectorized(4):
            w[4 + i] = weight[column + 4 + i]
        for i in T.unroll(8):
            values[i] = T.ieee_mul(T.ieee_mul(values[i], factor), w[i])
        to_bf16(values)

    @T.macro
    def rotate(values, cos, sin, row, pair):
        """values = bf16(rotated), as pairs pair..pair+3 of the rotation; no product is fused, like the twin."""
        c = T.alloc_local((4,), "float32")
        s = T.alloc_local((4,), "float32")
        a = T.alloc_local((1,), "float32")
        for i in T.vectorized(4):
            c[i] = cos[row, pair + i]
        for i in T.vectorized(4):
            s[i] = sin[row, pair + i]
        for i in T.unroll(4):
            a[0] = values[2 * i]
            values[2 * i] = T.ieee_sub(T.ieee_mul(a[0], c[i]), T.ieee_mul(values[2 * i + 1], s[i]))
            values[2 * i + 1] = T.ieee_add(
                T.ieee_mul(a[0], s[i]), T.ieee_mul(values[2 * i + 1], c[i])
            )
        to_bf16(values)

    @T.macro
    def block_scale(values, scale, floor, inverse_peak):
        """scale[0] = the power of two at or above max(|block of 32|, floor) * inverse_peak; scale[1] = its inverse."""
        scale[0] = T.float32(floor)
        for i in T.unroll(8):
            scale[0] = T.max(scale[0], T.abs(values[i]))
        for k in T.unroll(2):
            scale[0] = T.max(scale[0], T.shfl_xor(scale[0], 1 << k))
        # Up on the bits: a logarithm would misplace some. The inverse is exact, so products are quotients.
        scale[0] = T.reinterpret(
            (T.reinterpret(scale[0] * T.float32(inverse_peak), "int32") + 0x7FFFFF) & 0x7F800000,
            "float32",
        )
        scale[1] = 1.0 / scale[0]

    @T.macro
    def fp8_codes(values, scale, codes):
        """codes[0..7] = e4m3 codes under the block's scale, which goes to scale[0]; the conversion saturates."""
        block_scale(values, scale, 1e-4, 1 / 448)
        for i in T.unroll(8):
            values[i] *= scale[1]
        for i in T.vectorized(8):
            codes[i] = T.Cast("float8_e4m3fn", values[i])

    @T.macro
    def fp8_round(values, scale):
        """values = their FP8-32 values."""
        codes = T.alloc_local((8,), "float8_e4m3fn")
        fp8_codes(values, scale, codes)
        for i in T.vectorized(8):
            values[i] = T.Cast("float32", codes[i])
        for i in T.unroll(8):
            values[i] *= scale[0]

    @T.macro
    def e2m1_magnitude(value, rounded):
        """rounded[0] = |value| to the nearest e2m1 magnitude, ties to the even code.

        Adding and taking away 1.5 * 2^22 times the value's power of two (one at least) leaves two significant bits, or
        a multiple of a half below one; both round half to even.
        """
        rounded[0] = T.abs(value)
        rounded[1] = (
            T.reinterpret(T.reinterpret(T.max(rounded[0], 1.0), "int32") & 0x7F800000, "float32")
            * 6291456.0
        )
        rounded[0] = T.min(T.ieee_sub(T.ieee_add(rounded[0], rounded[1]), rounded[1]), 6.0)

    @T.macro
    def e2m1_code(value, word, nibble):
        """Puts the e2m1 code of `value` into a nibble of word[0]."""
        rounded = T.alloc_local((2,), "float32")
        e2m1_magnitude(value, rounded)
        # Times 2^-126, a half is the subnormal 1 << 22, and codes are the bits from there up.
        word[0] |= (
            (T.reinterpret(rounded[0] * T.float32(2.0**-126), "uint32") >> 22)
            | ((T.reinterpret(value, "uint32") >> 28) & T.uint32(8))
        ) << T.uint32(4 * nibble)

    return SimpleNamespace(
        load=load,
        store=store,
        store_stream=store_stream,
        add_squares=add_squares,
        lanes_sum=lanes_sum,
        keep_warp_sum=keep_warp_sum,
        warps_sum=warps_sum,
        normed=normed,
        rotate=rotate,
        block_scale=block_scale,
        fp8_codes=fp8_codes,
        fp8_round=fp8_round,
        e2m1_magnitude=e2m1_magnitude,
        e2m1_code=e2m1_code,
    )
