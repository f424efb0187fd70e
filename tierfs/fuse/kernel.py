"""Kernel limits of a mount that pyfuse3 cannot set at mount time: read-ahead and the queue of background requests.

Under a channel these are the channel's to set, and what it counted says what is in force.

Written after the mount through sysfs (root only) and read back, so that `status` says what is really in force.
Sources: Documentation/filesystems/fuse, Documentation/ABI/testing/sysfs-class-bdi.
"""

import contextlib
import logging
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tierfs.blocks.errors import MountFailed
from tierfs.config.mounts import mount_at as mount_at
from tierfs.fuse.channel import Channel

log = logging.getLogger(__name__)

_CONNECTIONS = "/sys/fs/fuse/connections"


@dataclass
class KernelLimits:
    """What is in force, in the words of `status`."""

    read_ahead_bytes: int = 0
    max_background: int = 0
    congestion_threshold: int = 0
    passthrough: bool = False
    passthrough_reason: str = "direct mode has none"  # why there is none
    notes: list[str] = field(default_factory=list)  # what was not applied, why, and what to do


def apply_limits(mountpoint: str, *, read_ahead_bytes: int, max_background: int) -> KernelLimits:
    """Set the limits of the mount at that path, and return what is in force afterwards. Never touches the mount."""
    entry = mount_at(mountpoint)
    if entry is None:
        raise MountFailed(f"nothing is mounted at {mountpoint}")
    limits = KernelLimits()
    _mount_control_files()
    bdi = Path("/sys/class/bdi") / entry.device / "read_ahead_kb"
    connection = Path(_CONNECTIONS) / entry.device.split(":")[1]
    congestion = max_background * 3 // 4  # the kernel's own default relation
    _set(bdi, read_ahead_bytes // 1024, limits)
    _set(connection / "max_background", max_background, limits)
    _set(connection / "congestion_threshold", congestion, limits)
    limits.read_ahead_bytes = _get(bdi) * 1024
    limits.max_background = _get(connection / "max_background")
    limits.congestion_threshold = _get(connection / "congestion_threshold")
    return limits


def limits_of(channel: Channel) -> KernelLimits:
    """What the channel negotiated and set."""
    named = channel.counters().named
    limits = KernelLimits(
        read_ahead_bytes=named["read_ahead_bytes"],
        max_background=named["max_background"],
        congestion_threshold=named["congestion_threshold"],
        passthrough=bool(named["passthrough_negotiated"]),
    )
    if limits.passthrough:
        limits.passthrough_reason = ""
    elif not channel.passthrough:
        limits.passthrough_reason = channel.passthrough_reason
    else:
        limits.passthrough_reason = "the kernel does not offer it: it came with Linux 6.9"
    return limits


def _mount_control_files() -> None:
    """Mount fusectl where a minimal system (a container, a small VM) has not; systemd does it elsewhere."""
    if os.geteuid() == 0 and mount_at(_CONNECTIONS) is None:
        command = ["mount", "-t", "fusectl", "fusectl", _CONNECTIONS]
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # _set reports what is missing
            subprocess.run(command, capture_output=True, timeout=10, check=False)


def _set(path: Path, value: int, limits: KernelLimits) -> None:
    try:
        path.write_text(str(value))
    except FileNotFoundError:
        limits.notes.append(f"{path} does not exist: mount -t fusectl fusectl /sys/fs/fuse/connections")
        return
    except OSError as error:
        limits.notes.append(f"{path} not set to {value} ({os.strerror(error.errno or 0)}): needs root")
        return
    if _get(path) != value:
        limits.notes.append(f"{path} is {_get(path)}, not {value}: the kernel limits it")


def _get(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
