"""Index scores of cached keys; see `kernels.ops.indexer.index_scores`.

Keys stand on the M side of `wgmma` and the 32 heads of a row, or of two rows, on the N side, so that decode wastes
little. The four threads that share a row of the A operand take one 16-byte quarter of a key each, which is one scale
block: codes go from device memory straight into registers, and the order of the 128 dimensions that this implies is
given to the queries when they are put into shared memory. A tile of keys is unpacked once and serves all rows of its
sequence.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmesh.kernels.tilelang.build import Variant, build

HEADS, WIDTH = 32, 128
TILE = 64
"""Keys of one `wgmma`."""
KEY_WORDS = WIDTH // 8
"""32-bit words of codes of one key; one more word holds its four scales."""

SCALE_PAIR = """
// e2m1 codes stand in bf16 subnormals: this product makes them normal, which no shift can.
__device__ __forceinline__ unsigned scale_pair(unsigned codes, unsigned scale) {
  unsigned product;
  asm("mul.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(codes), "r"(scale));
  return product;
}
"""


def macros(pair: int, batch: int) -> Any:
    """The parts that both scoring kernels share, so that their bits agree; `pair` rows go into one product."""
    import tilelang.language as T

    @T.macro
    def put_query(iq, row, queries, slot, thread, threads):
        # Two panels of 64 dimensions, 128-byte swizzle. Of eight dimensions n, n + 4 share a word, as they do where
        # codes are unpacked; block b and word w of the block say which column of which step they are.
        for step in T.serial(HEADS * KEY_WORDS // threads):
            head = (step * threads + thread) // KEY_WORDS
            b = (step * threads + thread) % KEY_WORDS // 4
            w = (step * threads + thread) % 4
            words = T.alloc_local((4,), "uint32")
            for v in T.vectorized(4):
                words[v] = iq[row, head, b * 16 + w * 4 + v]
            panel = (slot // pair * 2 + w // 2) * pair * HEADS * 32 + (
                slot % pair * HEADS + head
            ) * 32
            for half in T.unroll(2):
                low, high = words[half], words[2 + half]
                even = (low & T.uint32(0xFFFF)) | (high << T.uint32(16))
                odd = (low >> T.uint32(16)) | (high & T.uint32(0xFFFF0000))
                chunk = (w % 2 * 2 + half) * 2
                queries[panel + (chunk ^ (head % 8)) * 4 + b] = even
                queries[panel + ((chunk + 1) ^ (head % 8)) * 4 + b] = odd

    def product(a, desc, slot, acc, k):
        return T.ptx_wgmma_rs(
            "float32",
            f"m64n{32 * pair}k16",
            True,
            "bf16",
            "bf16",
            "fp32",
            a.data,
            k * 4,
            desc.data,
            (slot // pair * 512 + k // 4 * 256) * pair + k % 4 * 2,
            acc.data,
            0,
            T.if_then_else(k == 0, 0, 1),
            1,
            1,
        )

    @T.macro
    def unpack_multiply(codes, scales, at, quarter, desc, slot, scale, a, acc):
        for half in T.unroll(2):
            # 2^-32 of the scale stays out (it is in the weights), so that 2^126, which the subnormals lack, fits.
            exponent = (scales[at * 2 + half] >> (quarter * 8)) & 255
            scale[half] = T.min(exponent + 94, 254) * T.uint32(0x00800080)
        T.warpgroup_fence_operand(acc, num_regs=16 * pair)
        for w in T.unroll(4):
            for half in T.unroll(2):
                for p in T.unroll(2):
                    word = codes[at * 8 + half * 4 + w] >> (p * 8)
                    even = (word & T.uint32(0x000F000F)) * T.uint32(0x1040)
                    odd = (word & T.uint32(0x00F000F0)) * T.uint32(0x104)
                    a[(w * 2 + p) * 4 + half] = T.call_extern(
                        "uint32", "scale_pair", even & T.uint32(0x81C081C0), scale[half]
                    )
                    a[(w * 2 + p) * 4 + 2 + half] = T.call_extern(
                        "uint32", "scale_pair", odd & T.uint32(0x81C081C0), scale[half]
                    )
            if w % batch == batch - 1:
                T.warpgroup_fence_operand(a, num_regs=32)
                T.warpgroup_arrive()
                for p in T.unroll(2 * batch):
                    product(a, desc, slot, acc, (w - batch + 1) * 2 + p)
                T.warpgroup_commit_batch()

    @T.macro
    def multiply(a, desc, slot, acc):
        T.warpgroup_fence_operand(acc, num_regs=16 * pair)
        T.warpgroup_arrive()
        for k in T.unroll(8):
            product(a, desc, slot, acc, k)
        T.warpgroup_commit_batch()

    @T.macro
    def head_sum(a, acc, weights, slot, quarter, total):
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(acc, num_regs=16 * pair)
        T.warpgroup_fence_operand(a, num_regs=32)
        # x + |x| is twice the ReLU, on the pipe that has time for it; the weights carry the half.
        for r in T.unroll(pair):
            for half in T.unroll(2):
                total[r * 2 + half] = 0.0
            for n in T.unroll(4):
                for e in T.unroll(2):
                    weight = weights[(slot + r) * HEADS + n * 8 + quarter * 2 + e]
                    for half in T.unroll(2):
                        x = acc[r * 16 + n * 4 + half * 2 + e]
                        total[r * 2 + half] = total[r * 2 + half] + (x + T.abs(x)) * weight
        # Four threads hold a quarter each: (0 + 1) + (2 + 3). Odd ones keep the further key, the last two the second
        # row.
        odd = quarter % 2 == 1
        for r in T.unroll(pair):
            given = T.if_then_else(odd, total[r * 2], total[r * 2 + 1])
            kept = T.if_then_else(odd, total[r * 2 + 1], total[r * 2])
            total[r] = kept + T.shfl_xor(given, 1)
        if pair == 1:
            total[0] = total[0] + T.shfl_xor(total[0], 2)
        else:
            given = T.if_then_else(quarter < 2, total[1], total[0])
            kept = T.if_then_else(quarter < 2, total[0], total[1])
            total[0] = kept + T.shfl_xor(given, 2)

    return put_query, unpack_multiply, multiply, head_sum


class Tiling(NamedTuple):
    """How rows are put together; no row's bits depend on it.

    Attributes:
        rows: of a block of threads at most.
        groups: warpgroups of a block of threads, which take tiles of keys in turn.
        batch: words of a key that are unpacked before the tensor cores get them.
        depth: tiles fetched ahead.
        blocks: blocks of threads of a multiprocessor, for which registers are rationed.
        columns: of a block of threads.
    """

    rows: int
    groups: int
    batch: int
    depth: int
    blocks: int
    columns: int


SINGLE = Tiling(rows=1, groups=1, batch=4, depth=1, blocks=6, columns=1024)
DRAFTS = Tiling(rows=6, groups=1, batch=1, depth=2, blocks=4, columns=4096)
PREFILL = Tiling(rows=16, groups=4, batch=1, depth=2, blocks=1, columns=8192)


def _index_scores(page_rows: int, tiling: Tiling) -> Any:
    import tilelang.language as T

    max_rows, groups, batch, depth, blocks, _ = tiling
    pair = min(2, max_rows)
    put_query, unpack_multiply, multiply, head_sum = macros(pair, batch)
    num_rows, num_quads = T.dynamic("num_rows"), T.dynamic("num_quads")
    num_pages, num_sequences, max_pages = (
        T.dynamic("num_pages"),
        T.dynamic("num_sequences"),
        T.dynamic("max_pages"),
    )
    threads = 128 * groups

    @T.macro
    def fetch(ik, page_table, seq, column, key, quarter, codes, scales, u):
        page = page_table[seq, column // page_rows]
        base = column % page_rows + key
        for half in T.unroll(2):
            for v in T.vectorized(4):
                codes[u * 8 + half * 4 + v] = ik[
                    page, (base + half * 8) * KEY_WORDS + quarter * 4 + v
                ]
            scales[u * 2 + half] = ik[page, page_rows * KEY_WORDS + base + half * 8]

    @T.macro
    def put(scores, ends, total, row0, slot, first, last, key, quarter):
        mine = slot + quarter // 2
        if mine >= first and mine < last and quarter < 2 * pair:
            column = key + quarter % 2 * 8
            scores[row0 + mine, column // 4, column % 4] = T.if_then_else(
                column < ends[mine], total[0], -T.infinity("float32")
            )

    @T.macro
    def fill(scores, row0, rows, begin, tiles, thread):
        for slot in T.serial(rows):
            for step in T.serial(T.ceildiv(tiles * (TILE // 4), threads)):
                at = step * threads + thread
                if at < tiles * (TILE // 4):
                    for v in T.vectorized(4):
                        scores[row0 + slot, begin // 4 + at, v] = -T.infinity("float32")

    @T.macro
    def run(
        ik,
        page_table,
        scores,
        row0,
        begin,
        tiles,
        group,
        key,
        quarter,
        weights,
        ends,
        codes,
        scales,
        scale,
        a,
        acc,
        total,
        desc,
        seq,
        first,
        last,
        most,
    ):
        for u in T.unroll(depth):
            column = begin + (u * groups + group) * TILE
            if u * groups + group < tiles and column < most:
                fetch(ik, page_table, seq, column, key, quarter, codes, scales, u)
        slot0 = first // pair * pair
        for outer in T.serial(T.ceildiv(tiles, groups * depth)):
            for u in T.unroll(depth):
                at = (outer * depth + u) * groups + group
                here = begin + at * TILE
                if at < tiles:
                    if here < most:
                        unpack_multiply(codes, scales, u, quarter, desc, slot0, scale, a, acc)
                        ahead = here + depth * groups * TILE
                        if at + depth * groups < tiles and ahead < most:
                            fetch(ik, page_table, seq, ahead, key, quarter, codes, scales, u)
                        head_sum(a, acc, weights, slot0, quarter, total)
                    put(scores, ends, total, row0, slot0, first, last, here + key, quarter)
                    if max_rows > pair:
                        for step in T.serial((last - 1 - slot0) // pair):
                            slot = slot0 + (step + 1) * pair
                            end = T.max(ends[slot], ends[slot + pair - 1])
                            if here < end:
                                multiply(a, desc, slot, acc)
                                head_sum(a, acc, weights, slot, quarter, total)
                            put(scores, ends, total, row0, slot, first, last, here + key, quarter)

    @T.prim_func
    def index_scores(
        iq: T.Tensor((num_rows, HEADS, WIDTH // 2), "uint32"),
        iw: T.Tensor((num_rows, HEADS), "float32"),
        ik: T.Tensor((num_pages, page_rows * (KEY_WORDS + 1)), "uint32"),
        page_table: T.Tensor((num_sequences, max_pages), "int32"),
        sequence: T.Tensor((num_rows,), "int32"),
        visible: T.Tensor((num_rows,), "int32"),
        scores: T.Tensor((num_rows, num_quads, 4), "float32"),
        tile_rows: T.int32,
        chunk: T.int32,
    ):
        with T.Kernel(
            T.ceildiv(num_quads * 4, chunk), T.ceildiv(num_rows, tile_rows), threads=threads
        ) as (bx, by):
            T.import_source(SCALE_PAIR)
            T.annotate_min_blocks_per_sm(blocks)
            queries = T.alloc_shared((max_rows * HEADS * WIDTH // 2,), "uint32")
            weights = T.alloc_shared((max_rows * HEADS,), "float32")
            ends = T.alloc_shared((max_rows,), "int32")
            codes = T.alloc_local((depth * 8,), "uint32")
            scales = T.alloc_local((depth * 2,), "uint32")
            scale = T.alloc_local((2,), "uint32")
            a = T.alloc_local((32,), "uint32")
            acc = T.alloc_local((16 * pair,), "float32")
            total = T.alloc_local((2 * pair,), "float32")
            desc = T.alloc_wgmma_desc()
            thread = T.get_thread_binding()
            group = thread // 128
            quarter = thread % 4
            # In a tile; this thread's other key is 8 further.
            key = thread % 128 // 32 * 16 + thread % 32 // 4
            first = T.alloc_var("int32")
            last = T.alloc_var("int32")
            most = T.alloc_var("int32")
            furthest = T.alloc_var("int32")

            row0 = by * tile_rows
            rows = T.min(tile_rows, num_rows - row0)
            begin = bx * chunk
            tiles = T.min(chunk, num_quads * 4 - begin) // TILE
            parts = (
                ik,
                page_table,
                scores,
                row0,
                begin,
                tiles,
                group,
                key,
                quarter,
                weights,
                ends,
                codes,
                scales,
                scale,
                a,
                acc,
                total,
                desc,
            )
            if thread < max_rows:
                ends[thread] = 0
                if thread < rows:
                    ends[thread] = visible[row0 + thread]
            T.sync_threads()
            furthest = 0
            for slot in T.serial(rows):
                furthest = T.max(furthest, ends[slot])
            if (
                begin >= furthest
            ):  # most columns of a short sequence where there is room for a long one
                fill(scores, row0, rows, begin, tiles, thread)
            else:
                for slot in T.serial(rows):
                    put_query(iq, row0 + slot, queries, slot, thread, threads)
                    if thread < HEADS:
                        weights[slot * HEADS + thread] = iw[row0 + slot, thread] * T.float32(
                            2.0**31
                        )
                T.fence_proxy_async()
                T.sync_threads()
                T.initialize_wgmma_descriptor(desc, T.access_ptr(queries[0], "r"), 1, 1, 64)
                if max_rows == 1:
                    run(*parts, sequence[row0], 0, 1, furthest)
                else:
                    first = 0
                    while first < rows:
                        # Rows of one sequence.
                        seq = sequence[row0 + first]
                        last = first
                        most = 0
                        while last < rows and sequence[row0 + T.min(last, rows - 1)] == seq:
                            most = T.max(most, ends[last])
                            last = last + 1
                        run(*parts, seq, first, last, most)
                        first = last

    return index_scores


_index_scores.pass_configs = {
    "tl.disable_safe_memory_legalize": True,  # every access is in bounds
    "tl.disable_thread_storage_sync": True,  # barriers stand where they are needed
}


def check_inputs(iq: Tensor, iw: Tensor, ik: Tensor, sequence: Tensor, visible: Tensor) -> int:
    """Returns the keys of a page.

    Raises:
        ValueError: the kernels do not take these tensors.
    """
    if iq.shape[1:] != (HEADS, WIDTH):
        raise ValueError(f"queries {tuple(iq.shape)}: needs {HEADS} heads of {WIDTH} dimensions")
    key_bytes = WIDTH // 2 + WIDTH // 32
    if ik.shape[1] not in (64 * key_bytes, 128 * key_bytes):
        raise ValueError(f"pages of {ik.shape[1]} bytes: needs 64 or 128 keys of {key_bytes} bytes")
    lengths = [len(x) for x in (iq, iw, sequence, visible)]
    if len(set(lengths)) > 1:
        raise ValueError(f"rows of iq, iw, sequence and visible differ: {lengths}")
    return int(ik.shape[1]) // key_bytes


def index_scores(
    iq: Tensor,
    iw: Tensor,
    ik: Tensor,
    page_table: Tensor,
    sequence: Tensor,
    visible: Tensor,
    num_columns: int,
) -> Tensor:
    """Scores keys; contract of `kernels.ops.indexer.index_scores`.

    Block scales of keys must lie between 2^-92 and 2^33.

    Raises:
        ValueError: other than 32 heads of 128 dimensions or pages of 64 or 128 keys, numbers of rows that differ, or
            a number of columns that is no multiple of 128.
    """
    page_rows = check_inputs(iq, iw, ik, sequence, visible)
    if num_columns % 128:
        raise ValueError(f"{num_columns} columns: needs a multiple of 128")
    num_rows = len(iq)
    scores = torch.empty(num_rows, num_columns, dtype=torch.float32, device=iq.device)
    if num_rows and num_columns:
        share = -(-num_rows // len(page_table))
        tiling = SINGLE if share == 1 else DRAFTS if share <= DRAFTS.rows else PREFILL
        tile_rows = min(share, tiling.rows)
        # Smaller pieces where there would be too few for all multiprocessors.
        columns, tiles = tiling.columns, -(-num_rows // tile_rows)
        while columns > 512 * tiling.groups and num_columns // columns * tiles < 1024:
            columns //= 2
        words = iq.view(torch.uint32), iw, ik.view(torch.uint32)
        kernel = build(_index_scores, page_rows, tiling)
        kernel(
            *words, page_table, sequence, visible, scores.view(num_rows, -1, 4), tile_rows, columns
        )
    return scores


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash: keys of two tokens or of one; decode, decode with drafts, prefill."""
    return [
        Variant(f"index_scores.{rows}.{tiling.rows}", _index_scores, (rows, tiling))
        for rows in (64, 128)
        for tiling in (SINGLE, DRAFTS, PREFILL)
    ]
