"""Places of a file that somebody else tried to read and could not, told from the page cache. Called by watching.py in
a thread, with a descriptor only.

When the kernel reads a file on its own (passthrough, maps), a read of the medium that fails ends with the reader: EIO,
or SIGBUS. What stays behind, until memory is short, is a page without contents. ``cachestat(2)`` counts it,
``mincore(2)`` does not, nor a page whose read is under way. Reading such a page again tells the two apart. What must
hold: nothing is asked of the medium that nobody has asked it for, but for the rest of a few small pieces; a file whose
cache was dropped is not read at all; no byte of the mapping is touched.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

PAGE_BYTES = mmap.PAGESIZE
PART_BYTES = 1 << 30  # looked at as one: some 7 ms where all of it is cached in small pages
_PIECE_BYTES = 64 << 10  # what a search stops at, and one read
_READ_BYTES = 16 << 20  # in one look
_CACHESTAT = 451  # the same number on every architecture that Linux 6.5 runs on but alpha
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently"))


@dataclass(frozen=True)
class Found:
    """What a look has found: ``error`` at ``offset_bytes`` (None: nothing), and what the next look may leave out."""

    known: list[int]
    offset_bytes: int = 0
    error: OSError | None = None


def look(fd: int, size_bytes: int, known: list[int], *, budget_s: float) -> Found:
    """Look at the pages of a file that are in memory, and read those again that hold nothing.

    ``known``: of an earlier look at the same file. A part with as many pages as when it was found good is left out.
    After ``budget_s`` seconds the rest is left to another look. An error of the medium is in what is returned; raises
    OSError where the kernel does not tell (ENOSYS, EPERM), or for a lack of our own.
    """
    known = known or [-1] * -(-size_bytes // PART_BYTES)
    known = list(known)
    until_s = time.monotonic() + budget_s
    reading = -1
    left_bytes = _READ_BYTES
    try:
        for part, before in enumerate(known):
            start_bytes = part * PART_BYTES
            length_bytes = min(PART_BYTES, size_bytes - start_bytes)
            pages = _pages(fd, start_bytes, length_bytes)
            if pages == before:
                continue
            if pages == 0:
                known[part] = 0
                continue
            if time.monotonic() > until_s:
                break
            filled = _filled(fd, start_bytes, length_bytes)
            if filled.count(1) >= pages:
                known[part] = pages
                continue
            for offset_bytes, piece_bytes in _empty(fd, start_bytes, length_bytes, filled):
                if left_bytes <= 0 or time.monotonic() > until_s:
                    return Found(known)
                if reading < 0:
                    reading = _reopen(fd)
                try:
                    _read(reading, offset_bytes, piece_bytes)
                except OSError as error:
                    return Found(known, offset_bytes, error)
                left_bytes -= piece_bytes
        return Found(known)
    finally:
        if reading >= 0:
            os.close(reading)


def _reopen(fd: int) -> int:
    """A descriptor with a read-ahead state of its own, and no read-ahead."""
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.posix_fadvise(own, 0, 0, os.POSIX_FADV_RANDOM)
    return own


def _read(fd: int, offset_bytes: int, length_bytes: int) -> None:
    done = 0
    while done < length_bytes:
        data = os.pread(fd, length_bytes - done, offset_bytes + done)
        if not data:
            return
        done += len(data)


def _pages(fd: int, offset_bytes: int, length_bytes: int) -> int:
    """How many pages of that range are in the page cache, with contents or without."""
    wanted, found = _Range(offset_bytes, length_bytes), _Cachestat()
    if _libc.syscall(_CACHESTAT, fd, ctypes.byref(wanted), ctypes.byref(found), 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found.cached)


def _filled(fd: int, offset_bytes: int, length_bytes: int) -> bytearray:
    """For each page of that range, 1 where it is in the page cache with its contents, else 0."""
    filled = bytearray(-(-length_bytes // PAGE_BYTES))
    address = _libc.mmap(None, length_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset_bytes)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    try:
        if _libc.mincore(address, length_bytes, (ctypes.c_ubyte * len(filled)).from_buffer(filled)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        _libc.munmap(address, length_bytes)
    return filled


def _empty(fd: int, start_bytes: int, length_bytes: int, filled: bytearray) -> Iterator[tuple[int, int]]:
    """Pieces of that range in which some page is in the page cache without contents."""
    end = len(filled)
    first = filled.find(0)
    while first >= 0:
        after = filled.find(1, first)
        after = end if after < 0 else after
        stack = [(first, after)]
        while stack:
            low, high = stack.pop()
            offset_bytes = start_bytes + low * PAGE_BYTES
            piece_bytes = min((high - low) * PAGE_BYTES, start_bytes + length_bytes - offset_bytes)
            if _pages(fd, offset_bytes, piece_bytes) == 0:
                continue
            if piece_bytes <= _PIECE_BYTES:
                yield offset_bytes, piece_bytes
            else:
                middle = (low + high) // 2
                stack += [(middle, high), (low, middle)]
        first = filled.find(0, after)
