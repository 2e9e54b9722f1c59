"""Noise of tokens: a random word each, from a generator without state that the draw's host twin has too."""

from typing import Any

from flashmesh.kernels.tilelang.sampler_device import SOURCE, THREADS

TOKEN_NOISE = 0x746F6B6E


def philox_macro() -> Any:
    """Returns the macro of the generator."""
    import tilelang.language as T

    @T.macro
    def philox(words, at, block, position, choice, low, high):
        """Philox4x32-10 of the counter (block, position, choice, TOKEN_NOISE)."""
        key = T.alloc_local((2,), "uint32")
        key[0] = low
        key[1] = high
        words[at + 0] = block
        words[at + 1] = position
        words[at + 2] = choice
        words[at + 3] = T.uint32(TOKEN_NOISE)
        for _ in T.unroll(10):
            first = T.call_extern("uint64", "product", words[at + 0], T.uint32(0xD2511F53))
            second = T.call_extern("uint64", "product", words[at + 2], T.uint32(0xCD9E8D57))
            words[at + 0] = T.Cast("uint32", second >> T.uint64(32)) ^ words[at + 1] ^ key[0]
            words[at + 2] = T.Cast("uint32", first >> T.uint64(32)) ^ words[at + 3] ^ key[1]
            words[at + 1] = T.Cast("uint32", second)
            words[at + 3] = T.Cast("uint32", first)
            key[0] = key[0] + T.uint32(0x9E3779B9)
            key[1] = key[1] + T.uint32(0xBB67AE85)

    return philox


def token_noise() -> Any:
    """Words and log2(-ln u) of single tokens, for tests."""
    import tilelang.language as T

    num = T.dynamic("num")
    philox = philox_macro()

    @T.prim_func
    def noise(
        blocks: T.Tensor((num,), "int32"),
        seed: T.Tensor((1,), "int64"),
        choice: T.Tensor((1,), "int32"),
        position: T.Tensor((1,), "int32"),
        out: T.Tensor((num, 4), "int32"),
        scores: T.Tensor((num, 4), "float32"),
    ):
        with T.Kernel(T.ceildiv(num, THREADS), threads=THREADS) as group:
            T.import_source(SOURCE)
            i = group * THREADS + T.get_thread_binding()
            words = T.alloc_local((4,), "uint32")
            if i < num:
                bits = T.Cast("uint64", seed[0])
                philox(
                    words,
                    0,
                    T.Cast("uint32", blocks[i]),
                    T.Cast("uint32", position[0]),
                    T.Cast("uint32", choice[0]),
                    T.Cast("uint32", bits),
                    T.Cast("uint32", bits >> T.uint64(32)),
                )
                for j in T.unroll(4):
                    out[i, j] = T.Cast("int32", words[j])
                    scores[i, j] = T.call_extern("float32", "log2_exponential", words[j])

    return noise
