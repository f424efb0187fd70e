"""Files on persistent memory, mapped: MAP_SYNC, libpmem's is_pmem, copies with non-temporal stores, drain.

Called by the choice of a tier's residency (``maps_sync``) and by whoever fills a mapped object (``MappedFile``).

How bytes become persistent on a DAX file system, two ways:
- ``MappedFile.copy`` … ``drain``: pmem_memcpy with non-temporal stores, which go past the CPU's caches, then one fence
  for any number of copies. With MAP_SYNC the file system's own metadata is durable before a page can be written to,
  so nothing else is needed. libpmem touches the mapping: a hole that the full file system cannot back, a bad block,
  somebody who truncates the file: all of them SIGBUS, which ends this process. Hence ``create`` allocates first.
- pwrite … fdatasync: the kernel makes the same kind of copy and answers trouble with ENOSPC or EIO. It costs a
  system call per block and a journal commit per file, and is what a tier uses unless it has a mapping.
"""

import contextlib
import ctypes
import errno
import mmap
import os
from pathlib import Path

from tierfs.tiers.pmem.library import Library, PmemError, load

_MAP_SHARED_VALIDATE, _MAP_SYNC = 0x03, 0x80000  # asm-generic/mman.h; the mmap module does not name them
_CREATE_EXCLUSIVE = 0b11  # PMEM_FILE_CREATE | PMEM_FILE_EXCL
_NONTEMPORAL_NO_DRAIN = 0b11  # PMEM_F_MEM_NODRAIN | PMEM_F_MEM_NONTEMPORAL


def maps_sync(folder: Path) -> bool:
    """Whether files of that folder can be mapped MAP_SYNC, which only a DAX file system can: mmap(2).

    A small file is made there and removed again. Raises OSError when it cannot be made.
    """
    probe = folder / f"probe-sync-{os.getpid()}"
    fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)  # a hole, which a full file system has room for
        return file_maps_sync(fd)
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(probe)


def file_maps_sync(fd: int) -> bool:
    """Whether that open file (at least a page long, opened for writing) can be mapped MAP_SYNC. Raises OSError."""
    try:
        # Nothing is read or written through it: a page of a mapping that is only made cannot be SIGBUS.
        mmap.mmap(fd, mmap.PAGESIZE, flags=_MAP_SHARED_VALIDATE | _MAP_SYNC).close()
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # EINVAL: a kernel before 4.15
            raise
        return False
    return True


class MappedFile:
    """A whole file, mapped for writing by libpmem. Python code never touches its bytes, libpmem does: see the head.

    One thread at a time may ``close``; copies to different places may run in several threads, and each thread must
    ``drain`` what it copied.
    """

    def __init__(self, library: Library, path: Path, length_bytes: int, flags: int) -> None:
        mapped_bytes, is_pmem = ctypes.c_size_t(), ctypes.c_int()
        address = library.pmem_map_file(
            os.fsencode(path), length_bytes, flags, 0o600, ctypes.byref(mapped_bytes), ctypes.byref(is_pmem)
        )
        if not address:
            raise library.memory_error("cannot map the file", str(path))
        self._library = library
        self._address: int | None = address
        self.path = path
        self.size_bytes = mapped_bytes.value
        self.is_pmem = bool(is_pmem.value)

    @classmethod
    def create(cls, path: Path, size_bytes: int) -> "MappedFile":
        """Make a file of that size, all of it allocated, and map it: pmem_map_file(3).

        Raises PmemError: EEXIST, ENOSPC; a file that could not be allocated is removed again.
        """
        return cls(load(), path, size_bytes, _CREATE_EXCLUSIVE)

    @classmethod
    def open(cls, path: Path) -> "MappedFile":
        """Map a file that is there: pmem_map_file(3). Raises PmemError: ENOENT, EACCES, EINVAL (empty)."""
        return cls(load(), path, 0, 0)

    def copy(self, offset_bytes: int, data: memoryview) -> None:
        """Copy with non-temporal stores: pmem_memcpy(3). Persistent only after ``drain`` in the same thread."""
        assert offset_bytes >= 0 and offset_bytes + len(data) <= self.size_bytes
        address = self._open_address() + offset_bytes
        source = ctypes.c_char * len(data)
        if data.readonly:
            self._library.pmem_memcpy(address, bytes(data), len(data), _NONTEMPORAL_NO_DRAIN)
        else:
            self._library.pmem_memcpy(address, source.from_buffer(data), len(data), _NONTEMPORAL_NO_DRAIN)

    def drain(self) -> None:
        """Wait until what this thread copied is persistent: pmem_drain(3).

        Where the file is not on persistent memory: pmem_msync(3), which may raise PmemError (EIO).
        """
        if self.is_pmem:
            self._library.pmem_drain()
        elif self._library.pmem_msync(self._open_address(), self.size_bytes):
            raise self._library.memory_error("cannot write the file back", str(self.path))

    def close(self) -> None:
        """Unmap it: pmem_unmap(3). A second time does nothing."""
        address, self._address = self._address, None
        if address is not None and self._library.pmem_unmap(address, self.size_bytes):
            raise self._library.memory_error("cannot unmap the file", str(self.path))

    def _open_address(self) -> int:
        if self._address is None:
            raise PmemError(errno.EBADF, "the mapping is closed", str(self.path))
        return self._address
