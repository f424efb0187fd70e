"""Makes the page cache cold, and proves it: mincore says what share of a file's pages is in memory.

Called by main.py before each run.  Dropping the caches does not drop dirty or mapped pages, so what counts is not
that it was asked for but what mincore says afterwards, for the file on the mount and for the files behind it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy

# More than this share of resident pages and the run is thrown out: the first pages of a file may be read by an open.
RESIDENT_SHARE_MAX = 0.01

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def drop_caches(files: Iterable[Path]) -> None:
    """Write dirty pages, drop clean ones: those of `files`, as root all others too, with names and attributes."""
    os.sync()
    with contextlib.suppress(PermissionError):
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    # Both: drop_caches leaves pages that wait in another CPU's list, posix_fadvise collects those first.
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_through(files: Iterable[Path]) -> None:
    """Read files to their ends, before the caches are dropped: so every run starts from the same machine.

    The disk of a virtual machine is a file, or farther away: what was read a moment ago comes from its host's memory,
    at five times the speed. And memory that was free for a second or two has gone back to the host, so that reading
    into it costs a fault of the host for each page, five times the CPU time; what was dropped just now has not.
    """
    with mmap.mmap(-1, 4 << 20) as buffer:
        for path in files:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                while os.readv(descriptor, [buffer]):
                    pass
            finally:
                os.close(descriptor)


def resident_pages(path: Path) -> tuple[int, int]:
    """(pages in memory, pages) of a file. Maps it without touching it, so that asking brings nothing in."""
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes == 0:
            return 0, 0
        with mmap.mmap(file.fileno(), size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as mapping:
            view = numpy.frombuffer(mapping, dtype=numpy.uint8)
            pages = -(-size_bytes // mmap.PAGESIZE)
            states = numpy.zeros(pages, dtype=numpy.uint8)
            failed = _libc.mincore(view.ctypes.data, size_bytes, states.ctypes.data)
            del view  # the mapping cannot be closed while an array looks at it
            if failed:
                raise OSError(ctypes.get_errno(), "mincore", str(path))
    return int((states & 1).sum()), pages


def resident_share(files: Iterable[Path]) -> float:
    """The share of all pages of these files that are in memory; 0.0 without files."""
    counts = [resident_pages(path) for path in files]
    return sum(resident for resident, _ in counts) / max(1, sum(pages for _, pages in counts))
