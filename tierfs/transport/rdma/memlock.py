"""Registering memory, and what to say when the system does not allow so much. Both ends call it.

Registered memory is pinned: it counts against the soft RLIMIT_MEMLOCK of the process, unless that has CAP_IPC_LOCK in
the machine's own user namespace (drivers/infiniband/core/umem.c).
"""

import contextlib
import ctypes
import errno
import re
import resource
from pathlib import Path

from tierfs.blocks.errors import SourceUnavailable
from tierfs.blocks.units import format_bytes
from tierfs.transport.rdma.verbs import Domain, Region


def address_of(memory: memoryview) -> int:
    """Where writable memory lies; it must outlive every use of the address."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


_IPC_LOCK = 14
_WHOLE_MACHINE = ["0", "0", "4294967295"]  # of uid_map: the machine's own user namespace


def raise_limit() -> None:
    """The soft limit becomes the hard one: what may be pinned is then what ``lockable_bytes`` says. Never raises."""
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))


def lockable_bytes(root: Path = Path("/"), *, keeps_rights: bool = True) -> int | None:
    """The most that this process may pin after ``raise_limit``; None: no limit.

    ``root`` is where /proc is found; without ``keeps_rights`` it is asked for a process that will have no capability.
    """
    if keeps_rights and _may_pin_all(root / "proc/self"):
        return None
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def check_limit(lockable: int | None, *, whole_bytes: int, key: str) -> None:
    """Pure. Raises SourceUnavailable, with what to do, where less may be pinned than ``key`` asks for."""
    if lockable is not None and lockable < whole_bytes:
        raise SourceUnavailable(
            f"{format_bytes(whole_bytes)} of memory ({key}) cannot be registered with the RDMA device:"
            f" {_limit_advice(lockable)}"
        )


def register(domain: Domain, memory: memoryview, *, remote_read: bool, whole_bytes: int, key: str) -> Region:
    """Register ``memory``, a part of ``whole_bytes`` that the configuration's ``key`` asks for.

    Raises SourceUnavailable, with what to do.
    """
    try:
        return domain.register(address_of(memory), len(memory), remote_read=remote_read)
    except OSError as error:
        text = f"{format_bytes(whole_bytes)} of memory ({key}) cannot be registered with the RDMA device"
        if error.errno in (errno.ENOMEM, errno.EAGAIN, errno.EPERM):
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            if limit == resource.RLIM_INFINITY:
                advice = "it cannot be pinned, for the system has too little of it free"
            else:
                advice = _limit_advice(limit)
            raise SourceUnavailable(f"{text}: {advice}") from error
        raise SourceUnavailable(f"{text}: {error}") from error


def _limit_advice(limit_bytes: int) -> str:
    return (
        f"RLIMIT_MEMLOCK is {format_bytes(limit_bytes)}; raise it with LimitMEMLOCK=infinity in the unit of systemd,"
        " or `ulimit -l unlimited`, or a line `memlock unlimited` in /etc/security/limits.conf"
    )


def _may_pin_all(process: Path) -> bool:
    try:
        effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", (process / "status").read_text(), re.MULTILINE)
        own = (process / "uid_map").read_text().split() == _WHOLE_MACHINE
    except OSError:
        return False
    return own and effective is not None and int(effective[1], 16) >> _IPC_LOCK & 1 == 1
