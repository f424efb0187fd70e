"""A mount that somebody else has made: `/dev/fd/N` in the place of a mountpoint is its opened /dev/fuse.

So a process without any right to mount serves in a container: the privileged side opens /dev/fuse, mounts with it, and
lets this process inherit the descriptor. cli/mount looks here; what must hold afterwards is that nobody here unmounts
what is not ours: the mount ends with the last copy of the descriptor.
"""

import os
import re
import select
import stat

from tierfs.blocks.errors import MountFailed

_FORM = re.compile(r"/dev/fd/(0|[1-9][0-9]{0,8})")
_DEVICE = os.makedev(10, 229)  # /dev/fuse: Documentation/admin-guide/devices.txt


def descriptor_of(mountpoint: str) -> int | None:
    """N of `/dev/fd/N`; None for anything else."""
    match = _FORM.fullmatch(mountpoint)
    return int(match[1]) if match else None


def check(descriptor: int) -> None:
    """Refuse what is not a /dev/fuse that is mounted. Raises MountFailed. Takes no request from it."""
    name = f"/dev/fd/{descriptor}"
    if descriptor <= 2:
        raise MountFailed(f"{name} is a standard stream: hand over a descriptor from 3 on")
    try:
        status = os.fstat(descriptor)
    except OSError as error:
        raise MountFailed(f"{name} is not open here: whoever starts this command must let it inherit it") from error
    if not stat.S_ISCHR(status.st_mode) or status.st_rdev != _DEVICE:
        raise MountFailed(f"{name} is not an opened /dev/fuse")
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if any(events & select.POLLERR for _, events in poll.poll(0)):
        raise MountFailed(f"nothing is mounted with {name}: first mount(2) with fd=N, then start this command")


def make_blocking(descriptor: int) -> None:
    """For libfuse, which takes no EAGAIN. It changes the open file, so for other holders of it as well."""
    os.set_blocking(descriptor, True)
