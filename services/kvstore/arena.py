"""The memory of this node's blocks, readable by other processes of the host.

One memory file without a name (`memfd_create`), as large as the memory tier and filled as it is used. It is sealed so
that its size is fixed and nobody but this process can write to it. A block lives in one range of it for as long as
something refers to the buffer that `keep` returned. `flashmesh/shared_memory.py` is the reader's side.
"""

from __future__ import annotations

import bisect
import fcntl
import logging
import mmap
import os
import secrets
import weakref
from collections import deque

from flashmesh.shared_memory import FILE_NAME, TOKEN_BYTES, Offer

log = logging.getLogger(__name__)

ALIGN_BYTES = 64
SLACK_BYTES = 64 * 1024 * 1024
"""Beyond the tier's bound, because a block is copied before the one that it displaces goes."""

MAX_TRIES = 64
"""Free ranges that are tried for a block: blocks of one model have one size, so the first one fits."""

_SEAL_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE of Linux 5.1, which `fcntl` does not name


class FreeRanges:
    """Free ranges of [begin, end): first fit, neighbours merged (Knuth, TAOCP 1, section 2.5)."""

    def __init__(self, begin: int, end: int) -> None:
        self._begins = [begin]
        self._ends = [end]

    def take(self, size: int) -> int | None:
        """Returns where `size` bytes are from now on taken; None if no range tried is as large."""
        for place in range(min(len(self._begins), MAX_TRIES)):
            begin = self._begins[place]
            if self._ends[place] - begin >= size:
                self._begins[place] += size
                if self._begins[place] == self._ends[place]:
                    del self._begins[place], self._ends[place]
                return begin
        return None

    def give(self, begin: int, size: int) -> None:
        """Frees what `take` gave out."""
        end = begin + size
        place = bisect.bisect_left(self._begins, begin)
        if place < len(self._begins) and self._begins[place] == end:
            end = self._ends[place]
            del self._begins[place], self._ends[place]
        if place and self._ends[place - 1] == begin:
            self._ends[place - 1] = end
        else:
            self._begins.insert(place, begin)
            self._ends.insert(place, end)


class _Slot(weakref.ref[memoryview]):
    """One range in use; dies with the buffer that was handed out for it."""

    __slots__ = ("begin", "key", "size")

    begin: int
    size: int
    key: int


class Arena:
    """Where a node keeps its blocks.

    Args:
        capacity_bytes: bound of the memory tier.

    Raises:
        OSError: this system has no sealed memory files.
    """

    def __init__(self, capacity_bytes: int) -> None:
        num_bytes = capacity_bytes + SLACK_BYTES
        fd = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, num_bytes)
        self._memory = memoryview(mmap.mmap(fd, num_bytes))
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        self.offer = Offer(os.getpid(), fd, num_bytes, secrets.token_bytes(TOKEN_BYTES))
        self._memory[:TOKEN_BYTES] = self.offer.token
        self._free = FreeRanges(ALIGN_BYTES, num_bytes // ALIGN_BYTES * ALIGN_BYTES)
        self._slots: dict[int, _Slot] = {}
        # Buffers may die on any thread, and a deque is what takes an append from all of them.
        self._dead: deque[_Slot] = deque()

    def keep(self, data: bytes | memoryview) -> bytes | memoryview:
        """Returns a read-only copy: in the arena, or in private memory where no range is free.

        The range is free again when the returned object goes; slices of it do not hold it.
        """
        self._collect()
        size = -(-len(data) // ALIGN_BYTES) * ALIGN_BYTES
        begin = self._free.take(size)
        if begin is None:
            return bytes(data)
        view = self._memory[begin : begin + len(data)]
        view[:] = data
        kept = view.toreadonly()
        slot = _Slot(kept, self._dead.append)
        slot.begin, slot.size, slot.key = begin, size, id(kept)
        self._slots[slot.key] = slot
        return kept

    def offset(self, data: bytes | memoryview) -> int | None:
        """Returns where in the file a buffer from `keep` is; None if it is not in there."""
        slot = self._slots.get(id(data))
        return slot.begin if slot is not None and slot() is data else None

    def _collect(self) -> None:
        while self._dead:
            slot = self._dead.popleft()
            self._free.give(slot.begin, slot.size)
            if self._slots.get(slot.key) is slot:
                del self._slots[slot.key]


def open_arena(capacity_bytes: int) -> Arena | None:
    """Opens an arena; None where the system has none, and every block then travels over gRPC."""
    try:
        return Arena(capacity_bytes)
    except (AttributeError, OSError) as error:  # no memfd_create, or no such seal
        log.warning("no shared memory", extra={"error": str(error)})
        return None
