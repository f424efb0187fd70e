"""Reading files of an exported directory: open descriptors, kept for a while, and reads that notice a changed file.

Called by the directory source and its digesting. The plain functions block and run in threads, with descriptors and
buffers only; OpenFiles and Buffers live on the trio thread.

A read is believed only if the file's stat is that of the version before and after it. One exception: where only the
ctime moved (the file was renamed, unlinked, linked, or its mode changed) the bytes are proved by their remembered
digest, so that an open file goes on being served after its name is gone.
"""

import errno
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import trio

from tierfs.blocks.errors import NoBuffer, SourceUnavailable, StaleVersion
from tierfs.blocks.ids import BlockDigest, VersionId, digest_block
from tierfs.catalog.beneath import open_file_beneath, open_root
from tierfs.catalog.scan import TICK_NS, FileFacts

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO, errno.ESTALE)


class FileState(Enum):
    """An open file compared with a version."""

    SAME = "same"
    TOUCHED = "touched"  # only the ctime moved
    CHANGED = "changed"


def file_state(fd: int, facts: FileFacts) -> FileState:
    """Compare the open file with the version. Raises OSError."""
    found = os.fstat(fd)
    if (found.st_ino, found.st_size, found.st_mtime_ns) != (facts.inode, facts.size_bytes, facts.mtime_ns):
        return FileState.CHANGED
    return FileState.SAME if found.st_ctime_ns == facts.ctime_ns else FileState.TOUCHED


def is_lasting(facts: FileFacts) -> bool:
    """Whether a write from now on must show in the ctime. Until then a digest must not be remembered."""
    return abs(time.time_ns() - facts.ctime_ns) >= TICK_NS


def open_version(root: Path, device: int, facts: FileFacts) -> int:
    """A descriptor of the version's file, whose bytes are still to be checked. The caller closes it.

    ``device`` is that of the root when it was scanned: another one means that a file system was mounted or unmounted
    there. Raises StaleVersion when another file, or none, is at the path; SourceUnavailable for everything else.
    """
    try:
        root_fd = open_root(root)
    except OSError as error:
        raise SourceUnavailable(f"the exported directory {root} cannot be opened: {error}") from error
    try:
        if os.fstat(root_fd).st_dev != device:
            raise SourceUnavailable(f"the exported directory {root} is on another device than when it was scanned")
        fd = open_file_beneath(root_fd, facts.path)
    except OSError as error:
        raise _read_error(facts, error) from error
    finally:
        os.close(root_fd)
    try:
        if file_state(fd, facts) is FileState.CHANGED:
            raise _stale(facts)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_unchanged(fd: int, facts: FileFacts) -> bool:
    """True: just as scanned; False: only the ctime moved. Raises StaleVersion, SourceUnavailable."""
    try:
        state = file_state(fd, facts)
    except OSError as error:
        raise _read_error(facts, error) from error
    if state is FileState.CHANGED:
        raise _stale(facts)
    return state is FileState.SAME


def read_piece(fd: int, facts: FileFacts, offset_bytes: int, view: memoryview) -> bool:
    """Fill ``view``; False where the bytes are still to be proved by a digest.

    Raises StaleVersion, SourceUnavailable.
    """
    same = check_unchanged(fd, facts)
    done = 0
    try:
        while done < len(view):
            count = os.preadv(fd, [view[done:]], offset_bytes + done)
            if count == 0:
                raise _stale(facts)
            done += count
    except OSError as error:
        raise _read_error(facts, error) from error
    return check_unchanged(fd, facts) and same


def read_block(
    fd: int, facts: FileFacts, offset_bytes: int, view: memoryview, known: BlockDigest | None
) -> tuple[BlockDigest, bool]:
    """Fill ``view`` with one whole block: its digest (``known`` if given), and whether that may be remembered.

    Raises StaleVersion, SourceUnavailable.
    """
    lasting = is_lasting(facts)  # asked before the read: a write after this must be seen
    same = read_piece(fd, facts, offset_bytes, view)
    if same and known is not None:
        return known, False
    digest = digest_block(view)
    if not same and digest != known:
        raise _stale(facts)
    return digest, same and lasting


def _stale(facts: FileFacts) -> StaleVersion:
    return StaleVersion(f"{facts.path!r} is another file by now; open it again")


def _read_error(facts: FileFacts, error: OSError) -> StaleVersion | SourceUnavailable:
    if error.errno in _GONE:
        return _stale(facts)
    return SourceUnavailable(f"{facts.path!r} cannot be read: {error.strerror}")


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


@dataclass(slots=True)
class _OpenFile:
    fd: int
    users: int = 0
    used_at_s: float = 0.0


class OpenFiles:
    """Descriptors of versions, kept open between reads: at most ``capacity`` unused ones, for ``idle_s`` at most.

    They must not stay forever: a descriptor holds the space of a deleted file. Closing the last one of such a file
    can take long, so it is done in threads.
    """

    def __init__(self, root: Path, limiter: trio.CapacityLimiter, *, capacity: int = 256, idle_s: float = 30.0) -> None:
        self._root = root
        self._limiter = limiter
        self._capacity = capacity
        self._idle_s = idle_s
        self._files: OrderedDict[VersionId, _OpenFile] = OrderedDict()  # least recently used first
        self._closing: list[int] = []
        self._closed = False

    def __len__(self) -> int:
        return len(self._files)

    @asynccontextmanager
    async def use(self, version: VersionId, facts: FileFacts, device: int) -> AsyncIterator[int]:
        """A descriptor that stays open until the context ends. Raises StaleVersion, SourceUnavailable."""
        file = self._files.get(version)
        if file is None:
            closing, self._closing = self._closing, []
            fd = await trio.to_thread.run_sync(self._open, closing, device, facts, limiter=self._limiter)
            file = self._files.get(version)
            if file is None:
                file = self._files[version] = _OpenFile(fd)
            else:
                self._closing.append(fd)  # another reader was faster
        file.users += 1
        try:
            yield file.fd
        finally:
            file.users -= 1
            file.used_at_s = trio.current_time()
            self._files.move_to_end(version)
            self._shrink()

    async def close_idle(self) -> None:
        """Close what has not been used for a while. Call it every few seconds."""
        before_s = trio.current_time() - self._idle_s
        for version, file in list(self._files.items()):
            if file.users == 0 and file.used_at_s <= before_s:
                self._closing.append(self._files.pop(version).fd)
        closing, self._closing = self._closing, []
        if closing:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(_close_all, closing, limiter=self._limiter)

    async def aclose(self) -> None:
        """Close everything not in use; the rest closes with its last user."""
        self._closed = True
        self._idle_s = 0.0
        await self.close_idle()

    def _open(self, closing: list[int], device: int, facts: FileFacts) -> int:
        _close_all(closing)
        return open_version(self._root, device, facts)

    def _shrink(self) -> None:
        excess = len(self._files) - (0 if self._closed else self._capacity)
        if excess <= 0:
            return
        unused = [version for version, file in self._files.items() if file.users == 0]
        for version in unused[:excess]:
            fd = self._files.pop(version).fd
            if self._closed:
                os.close(fd)  # nobody comes after us who could do it in a thread
            else:
                self._closing.append(fd)


class Buffers:
    """A few buffers of one block each, made when first needed."""

    def __init__(self, *, count: int, block_bytes: int, timeout_s: float) -> None:
        self._block_bytes = block_bytes
        self._timeout_s = timeout_s
        self._free = trio.Semaphore(count)
        self._idle: list[bytearray] = []

    @asynccontextmanager
    async def use(self, length_bytes: int) -> AsyncIterator[memoryview]:
        """A view of this length until the context ends. Raises NoBuffer when none becomes free in time."""
        with trio.move_on_after(self._timeout_s) as waiting:
            await self._free.acquire()
        if waiting.cancelled_caught:
            raise NoBuffer(f"no buffer for reading a block became free within {self._timeout_s:g} s")
        try:
            buffer = self._idle.pop() if self._idle else bytearray(self._block_bytes)
            try:
                yield memoryview(buffer)[:length_bytes]
            finally:
                self._idle.append(buffer)
        finally:
            self._free.release()
