"""A libpmemobj pool: one file that is mapped and changed by transactions. Called by tiers/pool_residency.py.

All that a pool holds here lies in its root object, at offsets in bytes from its start; nothing is allocated
afterwards. What must hold: no address beyond the root object is ever touched, and none after ``close``.

The pool's file is mapped by libpmemobj for as long as it is open: a bad block in it, or somebody who truncates it, is
SIGBUS and ends this process. Reading is a copy out of the mapping.
"""

import ctypes
import errno
import os
from pathlib import Path

from tierfs.tiers.pmem.checking import check
from tierfs.tiers.pmem.library import Library, PmemError, load
from tierfs.tiers.pmem.transaction import Transaction, roll_back_this_thread

# PMEMOBJ_MIN_POOL of libpmemobj/pool_base.h: lanes (3 MiB) and the heap's own bookkeeping need that much. A pool of
# this size has no room for an undo log of more than some kilobytes.
MIN_POOL_BYTES = 8 << 20


class Pool:
    """An open pool. Get one from ``Pool.create`` or ``Pool.open``. A transaction belongs to its thread; apart from that
    threads may share a pool, as long as they do not write to the same bytes at once."""

    def __init__(self, library: Library, handle: int, name: str, root_bytes: int) -> None:
        self._library = library
        self._handle: int | None = handle
        self.name = name
        self.root_bytes = root_bytes
        self._root = handle + int(library.pmemobj_root(handle, root_bytes).offset_bytes)

    @classmethod
    def create(cls, path: Path, layout: str, *, pool_bytes: int, root_bytes: int) -> "Pool":
        """Make a pool file of that size with a root object of zeros: pmemobj_create(3), pmemobj_root(3).

        Raises PmemError: EEXIST, ENOSPC, ENOMEM where the root object does not fit, EINVAL for a pool below
        MIN_POOL_BYTES. A file that was made by a call that failed is removed again.
        """
        library = load()
        handle = library.pmemobj_create(os.fsencode(path), layout.encode(), pool_bytes, 0o600)
        if not handle:
            raise library.pool_error("cannot create the pool", str(path))
        if not library.pmemobj_root(handle, root_bytes).offset_bytes:
            library.pmemobj_close(handle)
            os.unlink(path)
            message = f"a root object of {root_bytes} bytes does not fit into a pool of {pool_bytes} bytes"
            raise PmemError(errno.ENOMEM, message, str(path))
        return cls(library, handle, str(path), root_bytes)

    @classmethod
    def open(cls, path: Path, layout: str) -> "Pool":
        """Check a pool, open it and recover it, so that no part of an unfinished transaction is left: pmemobj_open(3).

        Raises PmemError: EINVAL for another layout or a damaged or truncated file, EIO for a bad block, EAGAIN while
        another process (or this one) has it open, ENOENT, EACCES; see checking.py.
        """
        library = load()
        if not check(path, layout):
            raise PmemError(errno.EINVAL, "the pool is inconsistent", str(path))
        handle = library.pmemobj_open(os.fsencode(path), layout.encode())
        if not handle:
            raise library.pool_error("cannot open the pool", str(path))
        root_bytes = int(library.pmemobj_root_size(handle))
        if not root_bytes:
            library.pmemobj_close(handle)
            raise PmemError(errno.EINVAL, "cannot open the pool: it has no root object", str(path))
        return cls(library, handle, str(path), root_bytes)

    @property
    def handle(self) -> int:
        """PMEMobjpool*. Raises PmemError (EBADF) once closed."""
        if self._handle is None:
            raise PmemError(errno.EBADF, "the pool is closed", self.name)
        return self._handle

    def close(self) -> None:
        """Close it: pmemobj_close(3). What this thread left open is rolled back. A second time does nothing.

        No other thread may be using it.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            roll_back_this_thread(self._library)
            self._library.pmemobj_close(handle)

    def transaction(self) -> Transaction:
        """An outermost transaction, to be used in a ``with`` statement of one thread; see transaction.py."""
        return Transaction(self._library, self)

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """A copy of some bytes of the root object."""
        return ctypes.string_at(self.address(offset_bytes, length_bytes), length_bytes)

    def write_persist(self, offset_bytes: int, data: bytes) -> None:
        """Write and make durable, outside of any transaction: pmemobj_memcpy_persist(3).

        A crash may leave any part of it: only for bytes that nothing refers to yet, or that may be lost.
        """
        address = self.address(offset_bytes, len(data))
        self._library.pmemobj_memcpy(self.handle, address, data, len(data), 0)

    def clear_persist(self, offset_bytes: int, length_bytes: int) -> None:
        """Write zeros and make them durable, outside of any transaction: pmemobj_memset(3)."""
        self._library.pmemobj_memset(self.handle, self.address(offset_bytes, length_bytes), 0, length_bytes, 0)

    def address(self, offset_bytes: int, length_bytes: int) -> int:
        """Where that range of the root object is mapped; what is outside of it is a bug of the caller."""
        assert offset_bytes >= 0 and length_bytes >= 0 and offset_bytes + length_bytes <= self.root_bytes
        assert self.handle
        return self._root + offset_bytes
