"""Registering memory, and what to say when the system does not allow so much. Both ends call it.

Registered memory is pinned: it counts against RLIMIT_MEMLOCK, unless the process has CAP_IPC_LOCK.
"""

import ctypes
import errno
import resource

from tierfs.blocks.errors import SourceUnavailable
from tierfs.blocks.units import format_bytes
from tierfs.transport.rdma.verbs import Domain, Region


def address_of(memory: memoryview) -> int:
    """Where writable memory lies; it must outlive every use of the address."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def register(domain: Domain, memory: memoryview, *, remote_read: bool, whole_bytes: int, key: str) -> Region:
    """Register ``memory``, a part of ``whole_bytes`` that the configuration's ``key`` asks for.

    Raises SourceUnavailable, with what to do.
    """
    try:
        return domain.register(address_of(memory), len(memory), remote_read=remote_read)
    except OSError as error:
        text = f"{format_bytes(whole_bytes)} of memory ({key}) cannot be registered with the RDMA device"
        if error.errno in (errno.ENOMEM, errno.EAGAIN, errno.EPERM):
            raise SourceUnavailable(f"{text}: {_limit_advice()}") from error
        raise SourceUnavailable(f"{text}: {error}") from error


def _limit_advice() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return "it cannot be pinned, for the system has too little of it free"
    return (
        f"RLIMIT_MEMLOCK is {format_bytes(limit)}; raise it with LimitMEMLOCK=infinity in the unit of systemd,"
        " or `ulimit -l unlimited`, or a line `memlock unlimited` in /etc/security/limits.conf"
    )
