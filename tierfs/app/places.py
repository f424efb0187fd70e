"""What must be so at a mountpoint, and in the directories a configuration names, before anything is mounted there.

Called by cli/mount.py before a channel or a daemon starts, and by the daemon itself. Nothing here touches a tierfs that
lives: a command must not wait for a daemon that hangs.
"""

import ctypes
import logging
import os
import subprocess
import time
from pathlib import Path

from tierfs.app import launch, scraped
from tierfs.blocks.errors import MountFailed
from tierfs.config import addresses
from tierfs.config.schema import MountConfig
from tierfs.control import registry
from tierfs.fuse.kernel import mount_at

log = logging.getLogger(__name__)

ENDING_S = 8.0  # an ending daemon's watchdog gives it no longer; the promise is 10 s
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8  # umount2(2)


def unmount_dead(mountpoint: str) -> None:
    """Clear what a killed daemon left at a mountpoint. Raises MountFailed if one that lives has it.

    A daemon that is just starting or ending there is waited for, up to the time an ending one gives itself.
    """
    _wait_for_the_name(mountpoint, given=False)
    while (entry := mount_at(mountpoint)) is not None and entry.file_system == "fuse.tierfs":
        detach(mountpoint)
        log.info("dead_mount_cleared mountpoint=%s", mountpoint)
    registry.remove(mountpoint)


def _wait_for_the_name(mountpoint: str, *, given: bool) -> None:
    deadline_s = time.monotonic() + ENDING_S + 2
    while living := [one for one in registry.records() if one.mountpoint == mountpoint and one.running]:
        # A daemon without its channel ends by itself, and its mount is dead already.
        mounted = not given and mount_at(mountpoint) is not None and any(record.alive for record in living)
        if mounted or time.monotonic() > deadline_s:
            pid = next((one.pid for one in registry.records() if one.mountpoint == mountpoint and one.running), 0)
            if pid and given:
                raise MountFailed(f"{mountpoint} is the name of the mount of pid {pid}: give this one another --name")
            if pid:
                what = "already mounted by" if mounted else "being mounted or unmounted by"
                raise MountFailed(f"{mountpoint} is {what} the daemon with pid {pid}")
        time.sleep(0.02)


def detach(mountpoint: str) -> None:
    """Take the mount away, lazily. Raises MountFailed."""
    if os.geteuid() == 0:
        # Not umount(8), which looks at the mount before, and waits for a daemon that hangs.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.umount2(os.fsencode(mountpoint), _MNT_DETACH | _UMOUNT_NOFOLLOW) and mount_at(mountpoint) is not None:
            raise MountFailed(f"cannot unmount {mountpoint}: {os.strerror(ctypes.get_errno())}")
        return
    try:
        command = ["fusermount3", "-u", "-z", mountpoint]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MountFailed(f"cannot unmount {mountpoint}: {error}") from error
    if done.returncode != 0 and mount_at(mountpoint) is not None:
        raise MountFailed(f"cannot unmount {mountpoint}: {done.stderr.strip()}")


def clear_the_way(config: MountConfig, mountpoint: str, *, given: bool = False) -> None:
    """What must be done, or refused, before anything is mounted there. Raises MountFailed.

    ``given``: somebody else has mounted, and ``mountpoint`` but names it. What is at that place here is not looked at.
    """
    if given:
        _wait_for_the_name(mountpoint, given=True)
        registry.remove(mountpoint)
        check_tiers(config)
        return
    unmount_dead(mountpoint)
    check_places(config, mountpoint)


def check_places(config: MountConfig, mountpoint: str) -> None:
    """Refuse a mountpoint that cannot work, with the reason. Never touches a mounted tierfs."""
    path = Path(mountpoint)
    if not path.exists():
        raise MountFailed(f"{mountpoint} does not exist: make it with mkdir -p")
    if not path.is_dir():
        raise MountFailed(f"{mountpoint} is not a directory: mount on an existing, empty directory")
    tiers = [Path(place).resolve() for place in tier_paths(config)]
    for tier in tiers:
        if tier in path.parents:
            raise MountFailed(f"the mountpoint {mountpoint} lies inside the tier directory {tier}")
    check_tiers(config)
    directory = source_directory(config)
    # Everything the daemon itself reads or writes: through its own mount it would wait for itself, for ever.
    others = [
        config.state_dir, config.log.file, config.source.token_file, config.source.tls_ca_file, directory,
        scraped.socket_of(config.metrics),
    ]  # fmt: skip
    for place in tiers + [Path(other).resolve() for other in others if other is not None]:
        if place == path or path in place.parents:
            raise MountFailed(f"{place} lies inside the mountpoint {mountpoint}: tierfs would wait for itself")


def check_tiers(config: MountConfig) -> None:
    """Refuse tiers and a source that lie inside each other. Raises MountFailed."""
    directory = source_directory(config)
    if directory is None:
        return
    source = directory.resolve()
    for tier in [Path(place).resolve() for place in tier_paths(config)]:
        if tier == source or source in tier.parents or tier in source.parents:
            raise MountFailed(f"the tier directory {tier} and the source {source} lie inside each other")


def tier_paths(config: MountConfig) -> list[str]:
    """All directories of the local tiers."""
    return [str(path) for path in launch.tier_directories(config)]


def source_directory(config: MountConfig) -> Path | None:
    """The directory of a ``dir:`` source; None where the source is remote."""
    source = addresses.parse_source_url(config.source.url)
    return Path(source.path) if isinstance(source, addresses.DirectorySource) else None
