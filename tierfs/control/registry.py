"""Which mounts there are and how to reach their daemons, without touching a mount.

Each daemon keeps one JSON record and one socket in the runtime directory (/run/tierfs as root, $XDG_RUNTIME_DIR/tierfs
otherwise), named by a hash of its mountpoint. The record's process is the owner of the mount: the channel, or in direct
mode the daemon itself. A record whose process is gone is what a killed owner leaves behind.

A daemon that root's channel runs as another user has a directory of its own below root's, /run/tierfs/uUID, which the
command that mounts makes and names in TIERFS_RUNTIME_DIR; root's commands look there too.

A daemon that cannot start under a channel leaves a third file there, which says why, until one starts.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from tierfs.blocks.errors import ControlError
from tierfs.blocks.text import printable

ENVIRONMENT = "TIERFS_RUNTIME_DIR"
_ROOT = Path("/run/tierfs")
_FAILURE = ".failed"  # the suffix of its file
_FAILURE_CHARACTERS_MAX = 2000
_FILE_BYTES_MAX = 1 << 20


@dataclass(frozen=True)
class Record:
    """One daemon and its mount."""

    mountpoint: str
    pid: int  # of the owner of the mount
    started: int  # clock ticks since boot, from /proc/PID/stat: tells a reused pid
    socket: str
    config: str
    log_file: str = ""
    daemon_pid: int = 0  # of the daemon, where the owner is a channel
    daemon_started: int = 0
    options: list[str] = field(default_factory=list)  # --set KEY=VALUE of the mount command
    given: bool = False  # somebody else has mounted (fuse/given.py): mountpoint is but a name

    @property
    def alive(self) -> bool:
        """Whether that very process still runs."""
        return process_start(self.pid) == self.started

    @property
    def channel(self) -> bool:
        """Whether a channel owns the mount."""
        return self.daemon_pid != 0

    @property
    def daemon_alive(self) -> bool:
        """Whether the daemon that wrote this still runs."""
        return process_start(self.daemon_pid) == self.daemon_started if self.channel else self.alive

    @property
    def running(self) -> bool:
        """Whether anything of the mount still runs."""
        return self.alive or self.daemon_alive


def runtime_directory() -> Path:
    """Where records and sockets are; made if missing, for this user alone."""
    directory = _place()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _owned(directory)


def _place() -> Path:
    if os.environ.get(ENVIRONMENT):
        return Path(os.environ[ENVIRONMENT])
    if os.geteuid() == 0:
        return _ROOT
    if os.environ.get("XDG_RUNTIME_DIR"):
        return Path(os.environ["XDG_RUNTIME_DIR"]) / "tierfs"
    return Path(tempfile.gettempdir()) / f"tierfs-{os.geteuid()}"


def _owned(directory: Path) -> Path:
    """Refuse a directory in which another user could put a socket or a record of his own."""
    status = directory.stat()
    if status.st_uid != os.geteuid() or directory.lstat().st_uid != os.geteuid():
        raise ControlError(f"{directory} belongs to another user")
    if status.st_mode & 0o022:
        raise ControlError(f"{directory} can be written by other users: chmod 700 {directory}")
    return directory


def user_directory(uid: int, gid: int) -> Path:
    """The runtime directory of a daemon that root runs as another user; made if missing. Only for root."""
    _ROOT.mkdir(mode=0o711, parents=True, exist_ok=True)
    _ROOT.chmod(0o711)  # to be passed through; its files are for root alone
    directory = _ROOT / f"u{uid}"
    directory.mkdir(mode=0o700, exist_ok=True)
    os.chown(directory, uid, gid, follow_symlinks=False)
    return directory


def _directories() -> list[Path]:
    """Every runtime directory this process answers for, as far as there are any: looking makes none."""
    directory = _place()
    if not directory.exists():
        return []
    _owned(directory)
    return [directory, *sorted(directory.glob("u[0-9]*"))] if directory == _ROOT else [directory]


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot (proc_pid_stat(5), field 22); 0 when there is none."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    fields = line[line.rindex(b")") + 2 :].split()
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def record_path(mountpoint: str) -> Path:
    """The record's file for a mountpoint."""
    return runtime_directory() / (hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:24] + ".json")


def socket_path(mountpoint: str) -> Path:
    """The control socket for a mountpoint."""
    return record_path(mountpoint).with_suffix(".sock")


@contextlib.contextmanager
def starting(mountpoint: str, *, wait_s: float) -> Iterator[None]:
    """Held by a command from its look at what is mounted there until its own mount is: two would both find nothing.

    The kernel lets go of it with the process. Raises ControlError when another command has it for ``wait_s``.
    """
    path = record_path(mountpoint).with_suffix(".lock")
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline_s = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise ControlError(f"another command has been mounting {mountpoint} for {wait_s:g} s") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(lock)


def write(record: Record) -> None:
    """Put a record in place, atomically."""
    path = record_path(record.mountpoint)
    temporary = path.with_suffix(".new")
    temporary.touch(mode=0o600)
    temporary.write_text(json.dumps(asdict(record)))
    temporary.replace(path)
    path.with_suffix(_FAILURE).unlink(missing_ok=True)


def write_failure(mountpoint: str, reason: str) -> None:
    """Leave word why this daemon could not start, for those who wait for it: where one before it left a record."""
    path = record_path(mountpoint)
    if not path.exists():
        return
    temporary = path.with_suffix(".reason")
    temporary.touch(mode=0o600)
    temporary.write_text(" ".join(reason.split())[:_FAILURE_CHARACTERS_MAX])
    temporary.replace(path.with_suffix(_FAILURE))


def failure(record: Record) -> str:
    """Why the last daemon of this mount could not start; empty when it could, or when that is not known."""
    try:
        text = _read(Path(record.socket).with_suffix(_FAILURE)).decode("utf-8", errors="replace")
    except (OSError, ValueError):
        return ""
    return printable(" ".join(text.split())[:_FAILURE_CHARACTERS_MAX])


def _read(path: Path) -> bytes:
    """A small file that a daemon of another user may have put there: neither waits (a fifo), nor leads elsewhere (a
    link), nor ends late. Raises OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no regular file")
        return os.read(descriptor, _FILE_BYTES_MAX)
    finally:
        os.close(descriptor)


def forget_failure(record: Record) -> None:
    """So that the next one is news."""
    Path(record.socket).with_suffix(_FAILURE).unlink(missing_ok=True)


def remove(mountpoint: str) -> None:
    """Take the record and what lies beside it away."""
    path = record_path(mountpoint)
    for directory in _directories():
        for name in (path.name, socket_path(mountpoint).name, path.with_suffix(_FAILURE).name):
            (directory / name).unlink(missing_ok=True)


def records() -> list[Record]:
    """All records, dead ones too."""
    found = []
    for path in sorted(path for directory in _directories() for path in directory.glob("*.json")):
        try:
            record = msgspec.json.decode(_read(path), type=Record)
        except (OSError, ValueError, RecursionError):
            continue  # being replaced or removed just now, or not ours
        if path.parent.parent != _ROOT or _credible(record, path):
            found.append(record)
    return found


def _credible(record: Record, path: Path) -> bool:
    """Whether root may believe what a daemon without rights wrote: a command ends the processes a record names, and
    gives the directories that its configuration names to that daemon's user. The command line of root's channel tells.
    """
    try:
        if record.socket != str(path.with_suffix(".sock")) or path.name != record_path(record.mountpoint).name:
            return False
        if record.daemon_alive and _owner(record.daemon_pid) != path.parent.stat().st_uid:
            return False
        if not record.alive:
            return True
        command = os.fsdecode(Path(f"/proc/{record.pid}/cmdline").read_bytes()).split("\0")
        named = command[command.index("--mountpoint") + 1]
        daemon = command[command.index("--") + 1 :]
        config = daemon[daemon.index("mount") + 1]
        options = [value for word, value in itertools.pairwise(daemon) if word == "--set"]
        same = (named, config, options) == (record.mountpoint, record.config, record.options)
        return record.channel and _owner(record.pid) == 0 and same
    except (OSError, ValueError, IndexError, TypeError):
        return False


def _owner(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid


def find(path: str) -> Record:
    """The record of the mount that holds an absolute path. Raises ControlError when there is none."""
    holding = [
        record
        for record in records()
        if path == record.mountpoint or path.startswith(record.mountpoint.rstrip("/") + "/")
    ]
    if not holding:
        raise ControlError(f"{path} is not in a tierfs mount of this user; `tierfs status` lists the mounts there are")
    return max(holding, key=lambda record: len(record.mountpoint))
