"""The files of the disk tier: segments that are only ever appended to.

A segment is stored objects end to end, as they travel (`flashmesh/objects.py`): each says how long
it is and carries a checksum, so there is no second format and no index on disk. Nothing is synced: a
process that dies loses nothing that was written, a machine that loses power loses blocks, and what is
left of them fails its checksum. No method may run beside another one, except `read`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from flashmesh.errors import ConfigError, CorruptBlock
from flashmesh.objects import HEADER_BYTES, KIND_BLOCK, object_bytes, parse_objects, verify

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from flashmesh.hashing import BlockHash
    from flashmesh.objects import StoredObject

SUFFIX = ".blocks"
FOLDER_MODE = 0o700
FILE_MODE = 0o600


@dataclass(slots=True, eq=False)
class Segment:
    """A file, and which of its records are live.

    Attributes:
        number: files are numbered in the order of their making.
        num_bytes: of the file.
        live_bytes: of the records that the table knows here.
        offsets: where these begin.
    """

    number: int
    num_bytes: int = 0
    live_bytes: int = 0
    offsets: dict[BlockHash, int] = field(default_factory=dict)

    @property
    def dead_bytes(self) -> int:
        """Bytes that nobody will read."""
        return self.num_bytes - self.live_bytes

    def add(self, hash: BlockHash, offset: int, num_bytes: int) -> None:
        """Notes a live record."""
        self.offsets[hash] = offset
        self.live_bytes += num_bytes

    def remove(self, hash: BlockHash, num_bytes: int) -> None:
        """Notes that a record is dead."""
        del self.offsets[hash]
        self.live_bytes -= num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A verified record that a scan found; the fields are those of its header."""

    hash: BlockHash
    run: BlockHash
    parent: bytes
    position: int
    offset: int
    num_bytes: int


class Files:
    """The file operations that may fail; tests replace some of them to inject faults."""

    def open(self, path: Path, flags: int) -> int:
        """Opens a file."""
        return os.open(path, flags, FILE_MODE)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        """Appends some of `data`; returns how many bytes."""
        return os.write(fd, data)

    def read(self, fd: int, num_bytes: int, offset: int) -> bytes:
        """Reads; fewer bytes at the end of the file."""
        return os.pread(fd, num_bytes, offset)

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Cuts a file."""
        os.ftruncate(fd, num_bytes)

    def remove(self, path: Path) -> None:
        """Deletes a file; one that is gone already is no error."""
        path.unlink(missing_ok=True)


class SegmentLog:
    """All segments of one folder, which belongs to one process at a time.

    Args:
        folder: made with mode 0700 if it is not there.
        segment_bytes: length of a segment and of a record at most.
        files: how the file system is used.

    Attributes:
        segments: oldest first; those of earlier processes are never appended to.
        num_bytes: of all their files.

    Raises:
        ConfigError: the folder cannot be used, or another process uses it.
    """

    def __init__(self, folder: Path, segment_bytes: int, files: Files) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._files = files
        self._current: Segment | None = None
        self._fd = -1
        self._lock = _lock(folder)
        self.segments = sorted(self._found(), key=lambda segment: segment.number)
        self.num_bytes = sum(segment.num_bytes for segment in self.segments)
        self._last_number = self.segments[-1].number if self.segments else 0

    def append(self, data: bytes | memoryview) -> tuple[Segment, int]:
        """Writes a record at the end; returns where it begins.

        Raises:
            OSError: it could not be written whole; nothing of it is left, or a tail that no scan takes
                for a record.
        """
        segment = self._current
        if segment is None or not self._takes(segment, len(data)):
            segment = self._begin()
        offset = segment.num_bytes
        view = memoryview(data)
        try:
            while view:
                num_written = self._files.write(self._fd, view)
                self._resize(segment, segment.num_bytes + num_written)
                view = view[num_written:]
        except OSError:
            self._cut(segment, offset)
            raise
        return segment, offset

    def read(self, segment: Segment, hash: BlockHash, offset: int, num_bytes: int) -> StoredObject:
        """Reads and verifies a record; any thread may.

        Raises:
            OSError: the file cannot be read.
            CorruptBlock: the bytes are not the block.
        """
        with self._opened(segment) as fd:
            data = self._files.read(fd, num_bytes, offset)
        item = _verified(data)
        if item.hash != hash or len(item.data) != len(data):
            raise CorruptBlock(f"block {hash.hex()}: another object lies in its place")
        return item

    def scan(self, segment: Segment) -> Iterator[Record | CorruptBlock]:
        """Yields the records of a segment in order, and an error for each that is not intact.

        The scan goes on behind a bad record as long as a header follows where it ends.

        Raises:
            OSError: the file cannot be read.
        """
        with self._opened(segment) as fd:
            offset = 0
            while offset < segment.num_bytes:
                try:
                    num_bytes = object_bytes(self._files.read(fd, HEADER_BYTES, offset))
                    if num_bytes > segment.num_bytes - offset:
                        raise CorruptBlock(f"{num_bytes} bytes do not fit at {offset}")
                except CorruptBlock as error:
                    yield error
                    return
                try:
                    item = _verified(self._files.read(fd, num_bytes, offset))
                except CorruptBlock as error:
                    yield error
                else:
                    yield Record(
                        hash=item.hash,
                        run=item.run,
                        parent=item.parent,
                        position=item.position,
                        offset=offset,
                        num_bytes=num_bytes,
                    )
                offset += num_bytes

    def seal(self, segment: Segment | None) -> None:
        """Appends no more to a segment; earlier ones are sealed already."""
        if segment is not None and segment is self._current:
            os.close(self._fd)
            self._current = None

    def remove(self, segment: Segment) -> None:
        """Deletes a segment.

        Raises:
            OSError: it is still there.
        """
        self.seal(segment)
        self._files.remove(self._path(segment))
        self._resize(segment, 0)
        self.segments.remove(segment)

    def close(self) -> None:
        """Lets another process have the folder."""
        self.seal(self._current)
        os.close(self._lock)

    def _takes(self, segment: Segment, num_bytes: int) -> bool:
        is_deleted = os.fstat(self._fd).st_nlink == 0  # by somebody else
        return segment.num_bytes + num_bytes <= self._segment_bytes and not is_deleted

    def _begin(self) -> Segment:
        self.seal(self._current)
        segment = Segment(self._last_number + 1)
        self._fd = self._files.open(
            self._path(segment), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        )
        self._last_number += 1
        self.segments.append(segment)
        self._current = segment
        return segment

    def _cut(self, segment: Segment, num_bytes: int) -> None:
        """Takes half a record off the end; where that fails too, nothing may follow it."""
        try:
            self._files.truncate(self._fd, num_bytes)
            self._resize(segment, num_bytes)
        except OSError:
            self.seal(segment)

    def _resize(self, segment: Segment, num_bytes: int) -> None:
        self.num_bytes += num_bytes - segment.num_bytes
        segment.num_bytes = num_bytes

    def _found(self) -> Iterator[Segment]:
        for path in self._folder.glob(f"*{SUFFIX}"):
            status = path.stat()
            if path.stem.isdecimal() and stat.S_ISREG(status.st_mode):
                yield Segment(int(path.stem), num_bytes=status.st_size)

    def _path(self, segment: Segment) -> Path:
        return self._folder / f"{segment.number:012d}{SUFFIX}"

    @contextlib.contextmanager
    def _opened(self, segment: Segment) -> Iterator[int]:
        # Opened for each read (some microseconds): a segment may be deleted at any time, and a
        # descriptor that is kept would outlive it.
        fd = self._files.open(self._path(segment), os.O_RDONLY)
        try:
            yield fd
        finally:
            os.close(fd)


def _lock(folder: Path) -> int:
    """Makes and locks a folder; returns the descriptor that holds the lock."""
    descriptor = -1
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        folder.chmod(FOLDER_MODE)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        reason = error.strerror
        if isinstance(error, BlockingIOError):
            reason = "another node uses it; each needs its own"
        raise ConfigError(f"kvstore.disk_path = {folder}: {reason}") from error
    return descriptor


def _verified(data: bytes) -> StoredObject:
    """Parses the one block that `data` begins with, and owns its bytes."""
    object_bytes(data)  # `parse_objects` would take no bytes for no objects
    item = next(parse_objects(data))
    if item.kind != KIND_BLOCK:
        raise CorruptBlock(f"objects of kind {item.kind} are not stored")
    verify(item)
    return replace(item, data=data)
