"""The system calls of a local tier's reads and writes, with faults: an error, a short read or write, a flipped bit.

Stands for the ``os`` of tierfs.tiers.objects and tierfs.tiers.reading; everything else of it is the real one. Threads
call it, hence the lock.
"""

import errno
import os
import sqlite3
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest

from tierfs.tiers import objects, reading
from tierfs.tiers.residency import Residency

# What can go wrong with which call.
FAULTS: list[tuple[str, int | str]] = [
    ("preadv", errno.EIO), ("preadv", errno.EAGAIN), ("preadv", "short"), ("preadv", "flip"),
    ("pread", errno.EIO), ("pread", "short"),
    ("pwrite", errno.EIO), ("pwrite", errno.ENOSPC), ("pwrite", "short"),
    ("fdatasync", errno.EIO), ("fdatasync", errno.ENOSPC),
    ("open", errno.EIO), ("open", errno.EMFILE),
    ("commit", errno.EIO),  # of a batch's rows, in SQLite
]  # fmt: skip


class Faults:
    """Which calls fail next. ``placed`` puts them into the real modules for as long as it is in use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed: list[tuple[str, int | str]] = []
        self._patch = pytest.MonkeyPatch()
        self.met = 0

    def arm(self, call: str, what: int | str, times: int) -> None:
        """The next calls of that name fail like that."""
        with self._lock:
            self._armed += [(call, what)] * times

    def disarm(self) -> None:
        """What was not met never comes."""
        with self._lock:
            self._armed.clear()

    def take(self, call: str) -> int | str | None:
        """What is wrong with this call, if anything. Raises the OSError where it is one."""
        with self._lock:
            found = next((armed for armed in self._armed if armed[0] == call), None)
            if found is None:
                return None
            self._armed.remove(found)
            self.met += 1
        what = found[1]
        if isinstance(what, int):
            raise OSError(what, os.strerror(what))
        return what

    def place(self) -> None:
        """From now on the tiers meet them."""
        faulty: Any = _FaultyOs(self)
        commit = Residency.commit

        def failing_commit(residency: Residency, *arguments: Any) -> Any:
            try:
                self.take("commit")
            except OSError as error:
                raise sqlite3.OperationalError("disk I/O error") from error
            return commit(residency, *arguments)

        self._patch.setattr(objects, "os", faulty)
        self._patch.setattr(reading, "os", faulty)
        self._patch.setattr(Residency, "commit", failing_commit)

    def remove(self) -> None:
        """The real modules are as they were."""
        self._patch.undo()


class _FaultyOs(ModuleType):
    def __init__(self, faults: Faults) -> None:
        super().__init__("os")
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if isinstance(path, str) and len(path) == 32:  # an object, not what the tier keeps house with
            self._faults.take("open")
        return os.open(path, flags, mode, dir_fd=dir_fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        (buffer,) = buffers
        what = self._faults.take("preadv") if not flags else None
        if what == "short" and len(buffer) > 1:
            return os.preadv(fd, [buffer[: len(buffer) // 2]], offset)
        count = os.preadv(fd, buffers, offset, flags)
        if what == "flip" and count:
            buffer[count // 2] ^= 1
        return count

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        what = self._faults.take("pread")
        return os.pread(fd, length // 2 if what == "short" else length, offset)

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        if self._faults.take("pwrite") == "short" and len(data) > 1:
            return os.pwrite(fd, data[: len(data) // 2], offset)
        return os.pwrite(fd, data, offset)

    def fdatasync(self, fd: int) -> None:
        self._faults.take("fdatasync")
        os.fdatasync(fd)
