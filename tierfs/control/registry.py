"""Which mounts there are and how to reach their daemons, without touching a mount.

Each daemon keeps one JSON record and one socket in the runtime directory (/run/tierfs as root, $XDG_RUNTIME_DIR/tierfs
otherwise), named by a hash of its mountpoint. A record whose process is gone is what a killed daemon leaves behind.
"""

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from tierfs.blocks.errors import ControlError


@dataclass(frozen=True)
class Record:
    """One daemon and its mount."""

    mountpoint: str
    pid: int
    started: int  # clock ticks since boot, from /proc/PID/stat: tells a reused pid
    socket: str
    config: str
    log_file: str = ""

    @property
    def alive(self) -> bool:
        """Whether that very process still runs."""
        return process_start(self.pid) == self.started


def runtime_directory() -> Path:
    """Where records and sockets are; made if missing, for this user alone."""
    if os.geteuid() == 0:
        directory = Path("/run/tierfs")
    elif os.environ.get("XDG_RUNTIME_DIR"):
        directory = Path(os.environ["XDG_RUNTIME_DIR"]) / "tierfs"
    else:
        directory = Path(tempfile.gettempdir()) / f"tierfs-{os.geteuid()}"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.geteuid():
        raise ControlError(f"{directory} belongs to another user")
    return directory


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot (proc_pid_stat(5), field 22); 0 when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    fields = stat[stat.rindex(b")") + 2 :].split()
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def record_path(mountpoint: str) -> Path:
    """The record's file for a mountpoint."""
    return runtime_directory() / (hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:24] + ".json")


def socket_path(mountpoint: str) -> Path:
    """The control socket for a mountpoint."""
    return record_path(mountpoint).with_suffix(".sock")


def write(record: Record) -> None:
    """Put a record in place, atomically."""
    path = record_path(record.mountpoint)
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(asdict(record)))
    temporary.replace(path)


def remove(mountpoint: str) -> None:
    """Take the record and the socket away."""
    record_path(mountpoint).unlink(missing_ok=True)
    socket_path(mountpoint).unlink(missing_ok=True)


def records() -> list[Record]:
    """All records, dead ones too."""
    found = []
    for path in sorted(runtime_directory().glob("*.json")):
        try:
            found.append(Record(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):
            continue  # being replaced or removed just now
    return found


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
