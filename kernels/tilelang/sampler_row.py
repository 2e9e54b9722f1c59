"""A CTA's part of a row: how it comes to shared memory, and the passes that take its largest value.

It comes in pieces, so that the first pass may begin before the last copy is done. In all passes a thread has the same
elements: four neighbours in each step. `x` is its registers for one step of a pass.

A macro's `T.Ref` arguments are variables of the kernel: it may assign them, and reads them without a copy.
"""

import functools
from types import SimpleNamespace
from typing import Any

from flashmesh.kernels.tilelang.sampler_device import LARGEST, LOG2_E, THREADS

STRIDE = THREADS * 4
PIECES = 4


@functools.cache
def row_part(size: int) -> Any:
    """Returns the steps of a pass over `size` values, what they are padded to, the pieces, and the macros."""
    import tilelang.language as T

    loops = -(-size // STRIDE)
    padded = loops * STRIDE
    pair = 2 if loops % 2 == 0 else 1
    # Of whole steps, but for the last.
    of_piece = -(-loops // PIECES) * STRIDE
    pieces = [(begin, min(begin + of_piece, size)) for begin in range(0, size, of_piece)]

    def place_of(start, j):
        """Place of the `j`-th value of a thread's step from `start`."""
        return start + j // 4 * STRIDE + j % 4

    def finite(x):
        return T.max(x, T.float32(-LARGEST))

    def exp(x):
        return T.call_extern("float32", "ex2", x * T.float32(LOG2_E))

    @T.macro
    def load(part, x, at, count):
        for u in T.unroll(count):
            for j in T.vectorized(4):
                x[u * 4 + j] = part[at + u * STRIDE + j]

    @T.macro
    def largest_of(x, count):
        most = T.alloc_var("float32")
        most = x[0]
        for j in T.unroll(1, count):
            most = T.max(most, x[j])
        return most

    @T.macro
    def fetch(logits, row, first, part, arrived, tx):
        """Starts the copies, each with a barrier of its own, and fills the padding."""
        for piece, (begin, end) in enumerate(pieces):
            T.tma_copy(
                logits[row, first + begin : first + end], part[begin:end], barrier=arrived[piece]
            )
            if tx == 0:
                T.barrier_arrive(arrived[piece])
        for i in T.serial(T.ceildiv(padded - size, THREADS)):
            if size + i * THREADS + tx < padded:
                part[size + i * THREADS + tx] = -T.infinity("float32")

    @T.macro
    def take_in(part, x, arrived, tx, largest: T.Ref, total: T.Ref):
        """The thread's largest value, and its sum of exponentials below that, piece by piece."""
        for piece, (begin, end) in enumerate(pieces):
            T.mbarrier_wait_parity(arrived[piece], 0)
            before = T.alloc_var("float32")
            before = largest
            for i in T.unroll(-(-(end - begin) // STRIDE)):
                load(part, x, begin + i * STRIDE + tx * 4, 1)
                for j in T.unroll(4):
                    largest = T.max(largest, x[j])
            # The sum follows while the next piece is on its way.
            shift_of = finite(largest)
            total = total * exp(before - shift_of)
            for i in T.unroll(-(-(end - begin) // STRIDE)):
                load(part, x, begin + i * STRIDE + tx * 4, 1)
                for j in T.unroll(4):
                    total += exp(x[j] - shift_of)

    @T.macro
    def raise_to_largest(part, x, tx, largest: T.Ref):
        """Raises `largest` to the thread's largest value."""
        for i in T.serial(loops):
            load(part, x, i * STRIDE + tx * 4, 1)
            for j in T.unroll(4):
                largest = T.max(largest, x[j])

    return SimpleNamespace(
        loops=loops,
        padded=padded,
        pieces=pieces,
        pair=pair,
        place_of=place_of,
        finite=finite,
        exp=exp,
        load=load,
        largest_of=largest_of,
        fetch=fetch,
        take_in=take_in,
        raise_to_largest=raise_to_largest,
    )
