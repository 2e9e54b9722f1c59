"""A file system for the disk tier that fails on demand."""

from __future__ import annotations

import errno
import os

from flashmesh.services.kvstore.segments import Files


class FaultyFiles(Files):
    """Real files, until told otherwise.

    Attributes:
        free_bytes: what can still be written; None without a limit.
        broken: names of operations that fail with EIO.
    """

    def __init__(self):
        self.free_bytes = None
        self.broken = set()

    def open(self, path, flags):
        self._check("open")
        return super().open(path, flags)

    def write(self, fd, data):
        self._check("write")
        if self.free_bytes is None:
            return super().write(fd, data)
        if not self.free_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(fd, data[: self.free_bytes])
        self.free_bytes -= written
        return written

    def read(self, fd, num_bytes, offset):
        self._check("read")
        return super().read(fd, num_bytes, offset)

    def truncate(self, fd, num_bytes):
        self._check("truncate")
        super().truncate(fd, num_bytes)

    def remove(self, path):
        self._check("remove")
        super().remove(path)

    def _check(self, operation):
        if operation in self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
