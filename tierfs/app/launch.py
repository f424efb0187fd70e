"""Which mode a mount runs in, and how `tierfs-channel` is started in front of its daemon.

cli/mount calls this before there is a daemon; the daemon calls plan() for the reason that `status` tells. A daemon that
a channel started launches nothing. What must hold: whatever the unprivileged daemon of ``mount.user`` cannot do by
itself (clearing a dead mount, owning its directories) is done here, by root, before it starts.
"""

import hashlib
import itertools
import math
import os
import pwd
import shutil
import stat
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tierfs.blocks.errors import ConfigError, ControlError, MountFailed
from tierfs.config.schema import MountConfig
from tierfs.control import registry
from tierfs.fuse.channel import ENVIRONMENT as UNDER_A_CHANNEL

PROGRAM = "tierfs-channel"
ENVIRONMENT = "TIERFS_CHANNEL_PROGRAM"

# What a channel is told once, when it mounts: its option and the key of the configuration.
_KEYS = {
    "--allow-other": "mount.allow_other",
    "--read-ahead": "mount.read_ahead",
    "--max-background": "mount.max_background",
    "--restart-grace": "mount.restart_grace",
    "--tier": "the tiers' directories (objects on a device it does not know are not read in passthrough)",
}
_FLAGS = frozenset({"--allow-other"})


@dataclass(frozen=True)
class Plan:
    """The mode a mount gets: with ``program`` the channel's, without it direct; and why."""

    program: str | None
    reason: str


def plan(config: MountConfig) -> Plan:
    """Which mode this configuration gets here. Raises ConfigError when the one it asks for cannot be."""
    options = config.mount
    if options.mode == "direct":
        return Plan(None, 'mount.mode is "direct"')
    program = find_program()
    if options.user is not None and os.geteuid() not in (0, pwd.getpwnam(options.user).pw_uid):
        raise ConfigError(f'mount.user is "{options.user}": only root can start a daemon as another user')
    if program is None:
        reason = f"{PROGRAM} is not installed: neither {ENVIRONMENT}, nor beside {sys.executable}, nor in PATH"
        if options.mode == "channel":
            raise ConfigError(f'mount.mode is "channel", but {reason}')
        if options.user is not None:
            raise ConfigError(f"mount.user needs the channel, but {reason}")
        return Plan(None, reason)
    return Plan(program, f'mount.mode is "{options.mode}" and {program} is installed')


def find_program() -> str | None:
    """The path of `tierfs-channel`, or None."""
    named = os.environ.get(ENVIRONMENT)
    if named:
        return named if os.access(named, os.X_OK) else None
    for directory in (sysconfig.get_path("scripts"), str(Path(sys.executable).parent)):
        candidate = Path(directory) / PROGRAM
        if os.access(candidate, os.X_OK):
            return str(candidate)
    return shutil.which(PROGRAM)


def command(
    program: str,
    config: MountConfig,
    mountpoint: str,
    daemon: list[str],
    *,
    fuse_fd: int | None = None,
    keep_fd: int | None = None,
) -> list[str]:
    """The channel's command line in front of the daemon's.

    ``fuse_fd`` is inherited by the channel, which then mounts nothing; ``keep_fd`` by the first daemon as well.
    """
    options = config.mount
    line = [program, "--mountpoint", mountpoint]
    if options.allow_other:
        line.append("--allow-other")
    line += ["--read-ahead", str(int(options.read_ahead)), "--max-background", str(options.max_background)]
    line += ["--restart-grace", str(math.ceil(options.restart_grace))]
    for directory in tier_directories(config):
        line += ["--tier", str(directory)]
    if options.user is not None and os.geteuid() == 0:
        entry = pwd.getpwnam(options.user)
        line += ["--user", f"{entry.pw_uid}:{entry.pw_gid}"]
        for group in os.getgrouplist(options.user, entry.pw_gid):
            line += ["--group", str(group)]
    if fuse_fd is not None:
        line += ["--fuse-fd", str(fuse_fd)]
    if keep_fd is not None:
        line += ["--keep-fd", str(keep_fd)]
    return [*line, "--", *daemon]


def environment(config: MountConfig) -> dict[str, str]:
    """What the channel and its daemons need besides this process's environment."""
    found = {"PYTHONPATH": _import_path()}
    if config.mount.user is not None and os.geteuid() == 0:
        entry = pwd.getpwnam(config.mount.user)
        found[registry.ENVIRONMENT] = str(registry.user_directory(entry.pw_uid, entry.pw_gid))
        found["HOME"] = entry.pw_dir
    return found


def check_user(config: MountConfig, channel_pid: int) -> None:
    """Refuse a ``mount.user`` that is not the user this channel starts its daemons as. Raises ControlError."""
    if os.geteuid() != 0:
        return
    options = _options_of(channel_pid)
    has = int(options[options.index("--user") + 1].partition(":")[0]) if "--user" in options else 0
    wanted = 0 if config.mount.user is None else pwd.getpwnam(config.mount.user).pw_uid
    if has != wanted:
        raise ControlError(
            f"mount.user is {config.mount.user or 'not set'}, but the daemons of this mount run as uid {has}:"
            " unmount and mount again to change it"
        )


def kept_options(config: MountConfig, mountpoint: str, channel_pid: int) -> list[str]:
    """The keys that this configuration has another value for than the running channel, which keeps its own.

    Raises ControlError.
    """
    has = _options_of(channel_pid)
    wants = command(PROGRAM, config, mountpoint, [])
    return [key for option, key in _KEYS.items() if _values(has, option) != _values(wants, option)]


def _values(words: list[str], option: str) -> list[str]:
    if option in _FLAGS:
        return [word for word in words if word == option]
    return [value for word, value in itertools.pairwise(words) if word == option]


def _options_of(channel_pid: int) -> list[str]:
    """The running channel's command line up to the daemon's."""
    try:
        words = os.fsdecode(Path(f"/proc/{channel_pid}/cmdline").read_bytes()).split("\0")
    except OSError as error:
        raise ControlError(f"the channel (pid {channel_pid}) cannot be looked at: {error.strerror}") from error
    return words[: words.index("--")] if "--" in words else words


def under_a_channel() -> bool:
    """Whether a channel started this process."""
    return UNDER_A_CHANNEL in os.environ


def tier_directories(config: MountConfig) -> list[Path]:
    """All directories of the local tiers."""
    return [*(config.warm.directories if config.warm else ()), *([config.hot.path] if config.hot else [])]


def state_directory(config: MountConfig, mountpoint: str) -> Path:
    """Where this mount's daemon remembers things."""
    name = hashlib.sha256(os.fsencode(f"{config.source.url} {mountpoint}")).hexdigest()[:16]
    return Path(config.state_dir) / "mounts" / name


def log_path(config: MountConfig, mountpoint: str) -> Path:
    """The log of this mount's daemon when it runs in the background."""
    directory = Path(config.state_dir) / "log"
    if config.mount.user is not None:
        directory /= config.mount.user  # its files are rotated, so the directory is the user's as well
    name = hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:24]
    return config.log.file or directory / f"{name}.log"


def prepare(config: MountConfig, mountpoint: str) -> None:
    """Make what the daemon of ``mount.user`` needs, and give it to that user; nothing without one. Raises MountFailed.

    Needs root. What lies below is given as well, since it may be what root's daemon left. Nothing is followed out of
    these directories: no symlink, and no file that has another name somewhere.
    """
    if config.mount.user is None or os.geteuid() != 0:
        return
    entry = pwd.getpwnam(config.mount.user)
    places = [state_directory(config, mountpoint), log_path(config, mountpoint).parent, *tier_directories(config)]
    if config.log.file is not None:
        places.remove(config.log.file.parent)  # somebody else's business, such as /var/log
    for place in places:
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            # A symlink that root made may lead to the tier; one of anybody else could lead to what is not theirs.
            if place.is_symlink() and (place.lstat().st_uid, place.parent.stat().st_uid) != (0, 0):
                raise MountFailed(f"{place} is a symlink that root did not make: name the directory itself")
            opened = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fchown(opened, entry.pw_uid, entry.pw_gid)
                for _, directories, files, descriptor in os.fwalk(".", dir_fd=opened, follow_symlinks=False):
                    for name in directories + files:
                        _give(name, descriptor, entry.pw_uid, entry.pw_gid)
            finally:
                os.close(opened)
        except OSError as error:
            raise MountFailed(f"cannot give {place} to the user {config.mount.user}: {error}") from error


def _give(name: str, directory: int, uid: int, gid: int) -> None:
    # What is looked at must be what is given: that user may put another file in its place meanwhile.
    descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        status = os.fstat(descriptor)
        linked = not stat.S_ISDIR(status.st_mode) and status.st_nlink != 1
        if status.st_uid != uid and not linked:
            os.chown(f"/proc/self/fd/{descriptor}", uid, gid)
    finally:
        os.close(descriptor)


def _import_path() -> str:
    """Where this tierfs was imported from, so that the daemon is the same one wherever it is started."""
    root = str(Path(__file__).parents[2])
    others = os.environ.get("PYTHONPATH", "")
    return f"{root}{os.pathsep}{others}" if others else root
