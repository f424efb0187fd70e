"""The libraries libpmemobj.so.1 and libpmem.so.1: finding them, their functions, their errors.

Called by the other files of this folder; ``unavailable`` by whoever chooses between a pool and something else.

The short functions (those of a transaction, persist of a few bytes) are called with the GIL held: each takes about a
microsecond, while giving the GIL up can cost a switch interval (5 ms) before it is had again. What may take long
(open, create, check, copies of whole blocks, mapping) gives it up. Nothing is loaded at import.
"""

import ctypes
import errno
import functools
import os
from collections.abc import Callable
from typing import Any

from tierfs.blocks.errors import TierFailed

_Function = Callable[..., Any]

PACKAGES = "libpmemobj1 libpmem1"  # of Debian and Ubuntu; libpmemobj and libpmem elsewhere


class PmemError(OSError):
    """A call of the library failed: ``errno`` as it set it, ``strerror`` its own message, ``filename`` the pool."""


class ObjectId(ctypes.Structure):
    """PMEMoid: the id of a pool and an offset from the start of the pool, in bytes. See libpmemobj(7)."""

    _fields_ = (("pool", ctypes.c_uint64), ("offset_bytes", ctypes.c_uint64))


class Library:
    """The functions, each named as in its manual page (section 3). Get it from ``load``."""

    def __init__(self) -> None:
        pointer, size, text, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_int
        slow = ctypes.CDLL("libpmemobj.so.1", use_errno=True)
        quick = ctypes.PyDLL("libpmemobj.so.1", use_errno=True)
        self.pmemobj_create = _declare(slow, "pmemobj_create", pointer, text, text, size, ctypes.c_uint)
        self.pmemobj_open = _declare(slow, "pmemobj_open", pointer, text, text)
        self.pmemobj_check = _declare(slow, "pmemobj_check", number, text, text)
        self.pmemobj_close = _declare(slow, "pmemobj_close", None, pointer)
        self.pmemobj_root = _declare(slow, "pmemobj_root", ObjectId, pointer, size)
        self.pmemobj_root_size = _declare(quick, "pmemobj_root_size", size, pointer)
        self.pmemobj_errormsg = _declare(quick, "pmemobj_errormsg", text)
        self.pmemobj_memcpy = _declare(slow, "pmemobj_memcpy", pointer, pointer, pointer, text, size, ctypes.c_uint)
        self.pmemobj_memset = _declare(slow, "pmemobj_memset", pointer, pointer, pointer, number, size, ctypes.c_uint)
        self.pmemobj_persist = _declare(quick, "pmemobj_persist", None, pointer, pointer, size)
        self.pmemobj_tx_begin = _declare(quick, "pmemobj_tx_begin", number, pointer, pointer, number)
        self.pmemobj_tx_add_range_direct = _declare(quick, "pmemobj_tx_add_range_direct", number, pointer, size)
        self.pmemobj_tx_commit = _declare(quick, "pmemobj_tx_commit", None)
        self.pmemobj_tx_abort = _declare(quick, "pmemobj_tx_abort", None, number)
        self.pmemobj_tx_end = _declare(quick, "pmemobj_tx_end", number)
        self.pmemobj_tx_stage = _declare(quick, "pmemobj_tx_stage", number)

        slow = ctypes.CDLL("libpmem.so.1", use_errno=True)
        quick = ctypes.PyDLL("libpmem.so.1", use_errno=True)
        self.pmem_map_file = _declare(
            slow, "pmem_map_file", pointer, text, size, number, ctypes.c_uint, ctypes.POINTER(size),
            ctypes.POINTER(number),
        )  # fmt: skip
        self.pmem_unmap = _declare(slow, "pmem_unmap", number, pointer, size)
        self.pmem_is_pmem = _declare(slow, "pmem_is_pmem", number, pointer, size)
        self.pmem_memcpy = _declare(slow, "pmem_memcpy", pointer, pointer, pointer, size, ctypes.c_uint)
        self.pmem_msync = _declare(slow, "pmem_msync", number, pointer, size)
        self.pmem_drain = _declare(quick, "pmem_drain", None)
        self.pmem_errormsg = _declare(quick, "pmem_errormsg", text)

    def pool_error(self, doing: str, path: str, number: int | None = None) -> PmemError:
        """What libpmemobj says of its last failure in this thread. ``number``: the errno, where it was returned."""
        return _error(doing, path, ctypes.get_errno() if number is None else number, self.pmemobj_errormsg())

    def memory_error(self, doing: str, path: str) -> PmemError:
        """What libpmem says of its last failure in this thread."""
        return _error(doing, path, ctypes.get_errno(), self.pmem_errormsg())


@functools.cache  # a library is loaded once per process; PMEM_IS_PMEM_FORCE is read then
def load() -> Library:
    """The libraries. Raises TierFailed with the reason and what to install."""
    reason = unavailable()
    if reason:
        raise TierFailed(reason)
    return Library()


@functools.cache
def unavailable() -> str:
    """Why the libraries cannot be used and what to do about it; empty where they can."""
    try:
        Library()
    except (OSError, AttributeError) as error:  # AttributeError: a function that the library does not have
        return f"libpmemobj cannot be loaded ({error}): install the packages {PACKAGES}"
    return ""


def _declare(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> _Function:
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return function  # type: ignore[no-any-return]  # ctypes finds functions by name, with no type


def _error(doing: str, path: str, number: int, message: bytes | None) -> PmemError:
    said = (message or b"").decode("utf-8", "replace").strip()
    return PmemError(number or errno.EIO, f"{doing}: {said or os.strerror(number or errno.EIO)}", path)
