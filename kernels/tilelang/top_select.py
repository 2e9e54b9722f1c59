"""The kernel that selects the best columns of a row; `top_rows` says from which maxima, and launches it.

In a list the last value selected is found by histograms of ever narrower ranges of order-preserving integers. Lists
keep the order of columns, so equal values are taken from the left, and the result needs no sorting.
"""

from typing import Any

from flashmesh.kernels.tilelang.top_peaks import OCTET


def select_rows(count: int, group: int, base: int, levels: int) -> Any:
    """Selects groups of `base` columns, from `levels` levels of `group` above them downwards."""
    import tilelang.language as T

    threads, per_thread = shape_of(count, group)
    warps, chunks, share = threads // 32, per_thread // OCTET, group // OCTET
    capacity = threads * per_thread
    bits = threads.bit_length() - 1
    num_rows = T.dynamic("num_rows")
    widths = [T.dynamic(f"width{level}") for level in range(3)]
    full, sign, minus_infinity = T.uint32(2**32 - 1), T.uint32(2**31), T.uint32(0x007FFFFF)
    # Shared words: a histogram, five totals of every warp, counts of chunks, what was found, two lists of groups that
    # take turns, and the list of values.
    totals = threads
    counts = totals + 160
    found = counts + 128
    groups = found + 4
    values = groups + min(levels, 2) * count

    def reduce(op, value):
        return T.call_extern("uint32", f"__reduce_{op}_sync", full, value)

    def ballot(condition):
        return T.call_extern("uint32", "__ballot_sync", full, condition)

    def popcount(word):
        return T.call_extern("int32", "__popc", word)

    @T.macro
    def scan(value, result, lane):
        # Inclusive, in a warp.
        result[0] = value
        for i in T.unroll(5):
            other = T.shfl_up(result[0], 1 << i)
            result[0] = result[0] + T.Select(lane >= 1 << i, other, T.uint32(0))

    @T.macro
    def order(value, bits_of, key):
        # Integers that compare like the values; -0 equals +0.
        bits_of[0] = T.reinterpret(T.if_then_else(value == 0.0, 0.0, value), "int32")
        key[0] = T.reinterpret(bits_of[0] ^ ((bits_of[0] >> 31) | T.int32(-(2**31))), "uint32")

    @T.macro
    def load(level, row, last, chunk, raw, c):
        # Whatever must not be selected becomes -inf, and the block that must be becomes +inf.
        for i in T.unroll(OCTET):
            raw[c * OCTET + i] = -T.infinity("float32")
        if chunk * OCTET <= last:
            for part in T.unroll(2):
                for v in T.vectorized(4):
                    raw[c * OCTET + part * 4 + v] = level[row, chunk, part * 4 + v]
            if chunk * OCTET + OCTET > last:
                for i in T.unroll(OCTET):
                    if chunk * OCTET + i > last:
                        raw[c * OCTET + i] = -T.infinity("float32")
                    if base > 1 and chunk * OCTET + i == last:
                        raw[c * OCTET + i] = T.infinity("float32")

    @T.macro
    def list_all(level, row, last, shared, raw, keys, state, bits_of, key, thread):
        for c in T.unroll(chunks):
            slot = c * threads + thread
            load(level, row, last, slot, raw, c)
        state[0] = full
        state[1] = 0
        state[3] = 0
        for c in T.unroll(chunks):
            slot = c * threads + thread
            if slot * OCTET <= last:
                for i in T.unroll(OCTET):
                    order(raw[c * OCTET + i], bits_of, key)
                    absent = key[0] <= minus_infinity
                    keys[i] = T.Select(absent, T.uint32(0), key[0])
                    state[0] = T.min(state[0], T.Select(absent, full, key[0]))
                    state[1] = T.max(state[1], keys[i])
                    state[3] = state[3] + T.Select(absent, T.uint32(0), T.uint32(1))
                for part in T.unroll(2):
                    for v in T.vectorized(4):
                        shared[values + slot * OCTET + part * 4 + v] = keys[part * 4 + v]

    @T.macro
    def list_kept(
        level,
        row,
        last,
        num_chunks,
        listed,
        shared,
        places,
        raw,
        keys,
        state,
        bits_of,
        key,
        thread,
        result,
    ):
        # Of the groups that `listed` says, what is not below state[0]: nothing else can be selected.
        lane, warp = thread % 32, thread // 32
        for c in T.unroll(chunks):
            slot = c * threads + thread
            chunk = T.if_then_else(
                slot < num_chunks,
                T.Cast("int32", shared[listed + T.min(slot // share, count - 1)]) * share
                + slot % share,
                last + 1,
            )
            load(level, row, last, chunk, raw, c)
        key[0] = T.Select(state[0] >= sign, state[0] ^ sign, state[0] ^ full)
        floor = T.reinterpret(key[0], "float32")
        mask = T.alloc_local((1,), "uint32")
        before = T.alloc_local((4,), "int32")
        mask[0] = 0
        for i in T.unroll(per_thread):
            kept = raw[i] >= floor and raw[i] > -T.infinity("float32")
            mask[0] = mask[0] | T.Select(kept, T.uint32(1) << T.Cast("uint32", i), T.uint32(0))
        # Counts of two chunks travel in one word.
        for c in T.unroll((chunks + 1) // 2):
            low = popcount((mask[0] >> T.Cast("uint32", c * 16)) & T.uint32(0xFF))
            high = popcount((mask[0] >> T.Cast("uint32", c * 16)) & T.uint32(0xFF00))
            scan(T.Cast("uint32", low + high * 65536), result, lane)
            before[c * 2] = T.Cast("int32", result[0] & T.uint32(0xFFFF)) - low
            before[c * 2 + 1] = T.Cast("int32", result[0] >> T.uint32(16)) - high
            if lane == 31:
                shared[counts + c * 2 * warps + warp] = result[0] & T.uint32(0xFFFF)
                if c * 2 + 1 < chunks:
                    shared[counts + (c * 2 + 1) * warps + warp] = result[0] >> T.uint32(16)
        T.sync_threads()
        for i in T.unroll(4):
            keys[i] = T.if_then_else(
                i * 32 + lane < chunks * warps, shared[counts + i * 32 + lane], T.uint32(0)
            )
        state[0] = full
        state[1] = 0
        state[3] = reduce("add", keys[0] + keys[1] + keys[2] + keys[3])
        for c in T.unroll(chunks):
            result[0] = 0
            for i in T.unroll(4):
                result[0] = result[0] + T.Select(
                    i * 32 + lane < c * warps + warp, keys[i], T.uint32(0)
                )
            before[c] = before[c] + T.Cast("int32", reduce("add", result[0]))
            for i in T.unroll(OCTET):
                kept = (mask[0] >> T.Cast("uint32", c * OCTET + i)) & T.uint32(1)
                order(raw[c * OCTET + i], bits_of, key)
                if kept != 0:
                    shared[values + before[c]] = key[0]
                    places[before[c]] = T.Cast("uint16", (c * threads + thread) * OCTET + i)
                state[0] = T.min(state[0], T.Select(kept != 0, key[0], full))
                state[1] = T.max(state[1], T.Select(kept != 0, key[0], T.uint32(0)))
                before[c] = before[c] + T.Cast("int32", kept)

    @T.macro
    def gather(shared, state, add, thread):
        # Range and number of all threads' values.
        lane = thread % 32
        state[0] = reduce("min", state[0])
        state[1] = reduce("max", state[1])
        if add:
            state[3] = reduce("add", state[3])
        if lane == 0:
            shared[totals + thread // 32] = state[3]
            shared[totals + 32 + thread // 32] = state[0]
            shared[totals + 64 + thread // 32] = state[1]
        shared[thread] = 0
        T.sync_threads()
        if add:
            state[3] = reduce(
                "add", T.if_then_else(lane < warps, shared[totals + lane], T.uint32(0))
            )
        state[0] = reduce("min", T.if_then_else(lane < warps, shared[totals + 32 + lane], full))
        state[1] = reduce(
            "max", T.if_then_else(lane < warps, shared[totals + 64 + lane], T.uint32(0))
        )
        state[2] = T.min(state[3], T.uint32(count))

    @T.macro
    def narrow(shared, num_values, state, result, thread):
        # state: [0] lower and [1] upper end of the range in which the last one selected lies, how many of the range
        # are [2] wanted and [3] present. Scores crowd below the largest one: the first histogram leaves everything
        # eight octaves below it to the lowest bin.
        lane = thread % 32
        reach = T.alloc_var("uint32")
        reach = T.uint32((1 << 26) - 1)
        while state[2] < state[3] and state[0] < state[1]:
            top = state[1]
            low = top - T.min(top - state[0], reach)
            reach = full
            shift = T.Cast(
                "uint32", T.max(32 - bits - T.call_extern("int32", "__clz", top - low), 0)
            )
            for step in T.serial(T.ceildiv(num_values, threads)):
                if step * threads + thread < num_values:
                    key = shared[values + step * threads + thread]
                    # The lowest bin is what the others leave: often it holds almost everything.
                    bin = T.Select(key > low and key <= top, (key - low) >> shift, T.uint32(0))
                    if bin > 0:
                        T.atomic_add(shared[bin], T.uint32(1))
            T.sync_threads()
            # From the highest bin down.
            held = shared[threads - 1 - thread]
            shared[threads - 1 - thread] = 0
            scan(held, result, lane)
            if lane == 31:
                shared[totals + 96 + thread // 32] = result[0]
            T.sync_threads()
            others = T.if_then_else(lane < thread // 32, shared[totals + 96 + lane], T.uint32(0))
            above = result[0] - held + reduce("add", others)
            present = T.Select(thread == threads - 1, state[3] - above, held)
            here = above < state[2] and above + present >= state[2]
            if here:
                shared[found] = T.Cast("uint32", threads - 1 - thread)
                shared[found + 1] = state[2] - above
                shared[found + 2] = present
            T.sync_threads()
            bin = shared[found]
            bottom = low + (bin << shift)
            state[1] = bottom + T.min(top - bottom, (T.uint32(1) << shift) - T.uint32(1))
            state[0] = T.Select(bin > 0, bottom, state[0])
            state[2] = shared[found + 1]
            state[3] = shared[found + 2]

    @T.macro
    def column_of(shared, places, listed, i):
        # Of the level's columns, the one that is i-th in the list of those kept.
        place = T.Cast("int32", places[i])
        return T.Cast("int32", shared[listed + place // group]) * group + place % group

    @T.macro
    def take(shared, places, num_values, listed, target, selected, row, state, held, thread):
        # All above the range, and of the range all or the first ones: then it is a single value.
        above = T.Select(state[2] == state[3], state[0], state[1] + T.uint32(1))
        same = state[0]
        want = T.Cast("int32", state[2])
        steps = T.ceildiv(num_values, threads)
        lane, warp = thread % 32, thread // 32
        before = (T.uint32(1) << T.Cast("uint32", lane)) - T.uint32(1)
        first = warp * steps * 32 + lane
        held[1] = 0
        held[2] = 0
        for step in T.serial(steps):
            i = first + step * 32
            key = T.if_then_else(i < num_values, shared[values + i], T.uint32(0))
            held[1] = held[1] + popcount(ballot(key >= above))
            held[2] = held[2] + popcount(ballot(key < above and key == same))
        if lane == 0:
            shared[totals + 96 + warp] = T.Cast("uint32", held[1])
            shared[totals + 128 + warp] = T.Cast("uint32", held[2])
        T.sync_threads()
        greater = T.if_then_else(lane < warps, shared[totals + 96 + lane], T.uint32(0))
        equal = T.if_then_else(lane < warps, shared[totals + 128 + lane], T.uint32(0))
        held[0] = T.Cast("int32", reduce("add", greater)) + T.min(
            T.Cast("int32", reduce("add", equal)), want
        )
        held[1] = T.Cast("int32", reduce("add", T.Select(lane < warp, greater, T.uint32(0))))
        held[2] = T.Cast("int32", reduce("add", T.Select(lane < warp, equal, T.uint32(0))))
        for step in T.serial(steps):
            i = first + step * 32
            key = T.if_then_else(i < num_values, shared[values + i], T.uint32(0))
            is_greater = key >= above
            is_equal = key < above and key == same
            greater_here = ballot(is_greater)
            equal_here = ballot(is_equal)
            tied = held[2] + popcount(equal_here & before)
            at = held[1] + popcount(greater_here & before) + T.min(tied, want)
            if is_greater or (is_equal and tied < want):
                column = i if listed < 0 else column_of(shared, places, listed, i)
                if target < 0:
                    selected[row, at] = column
                else:
                    shared[target + at] = T.Cast("uint32", column)
            held[1] = held[1] + popcount(greater_here)
            held[2] = held[2] + popcount(equal_here)

    @T.macro
    def descend(
        array,
        level,
        row,
        end,
        shared,
        places,
        raw,
        keys,
        state,
        result,
        held,
        bits_of,
        key,
        selected,
        thread,
    ):
        size = base * group**level
        last = (end + (size - 1)) // size - 1
        listed = -1 if level == levels else groups + (level + 1) % 2 * (values - groups - count)
        target = -1 if level == 0 else groups + level % 2 * (values - groups - count)
        if level == levels:
            list_all(array, row, last, shared, raw, keys, state, bits_of, key, thread)
            gather(shared, state, True, thread)
            held[3] = T.ceildiv(last + 1, OCTET) * OCTET
        else:
            list_kept(
                array,
                row,
                last,
                held[0] * share,
                listed,
                shared,
                places,
                raw,
                keys,
                state,
                bits_of,
                key,
                thread,
                result,
            )
            gather(shared, state, False, thread)
            held[3] = T.Cast("int32", state[3])
        narrow(shared, held[3], state, result, thread)
        take(shared, places, held[3], listed, target, selected, row, state, held, thread)
        # The groups hold at least as many columns from here up; but fewer groups than wanted are all taken whole.
        if held[0] < count:
            state[0] = minus_infinity
        T.sync_threads()

    @T.prim_func
    def select(
        level_0: T.Tensor((num_rows, widths[0], OCTET), "float32"),
        level_1: T.Tensor((num_rows, widths[1], OCTET), "float32"),
        level_2: T.Tensor((num_rows, widths[2], OCTET), "float32"),
        visible: T.Tensor((num_rows,), "int32"),
        selected: T.Tensor((num_rows, count), "int32"),
    ):
        with T.Kernel(num_rows, threads=threads) as row:
            shared = T.alloc_shared((values + capacity,), "uint32")
            places = T.alloc_shared((capacity if levels else 1,), "uint16")
            raw = T.alloc_local((per_thread,), "float32")
            keys = T.alloc_local((OCTET,), "uint32")
            state = T.alloc_local((4,), "uint32")
            result = T.alloc_local((1,), "uint32")
            held = T.alloc_local((4,), "int32")
            bits_of = T.alloc_local((1,), "int32")
            key = T.alloc_local((1,), "uint32")
            thread = T.get_thread_binding()
            end = visible[row]
            parts = (
                row,
                end,
                shared,
                places,
                raw,
                keys,
                state,
                result,
                held,
                bits_of,
                key,
                selected,
            )
            if levels >= 2:
                descend(level_2, 2, *parts, thread)
            if levels >= 1:
                descend(level_1, 1, *parts, thread)
            descend(level_0, 0, *parts, thread)
            for step in T.serial(T.ceildiv(count, threads)):
                if step * threads + thread >= held[0] and step * threads + thread < count:
                    selected[row, step * threads + thread] = -1

    return select


select_rows.pass_configs = {
    "tl.disable_safe_memory_legalize": True,  # every access is in bounds
    "tl.disable_thread_storage_sync": True,  # barriers stand where threads meet
    "tl.disable_shared_memory_reuse": True,  # `places` lives as long as `shared`
}


def shape_of(count: int, group: int) -> tuple[int, int]:
    """Threads of a row, and values of a thread, so that `count` groups fit."""
    threads = min(1024, max(128, 1 << (count * group // 32 - 1).bit_length()))
    return threads, OCTET * -(-count * group // (OCTET * threads))
