"""The kernel's table of mounts, read from /proc and never from a mount, which may hang.

Called by whoever must know what lies where: the kernel's limits of our own mount, the memory that a cgroup leaves, and
`tierfs doctor`. Paths in the table are those of the reading process's namespace: proc_pid_mountinfo(5).
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ESCAPED = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True)
class MountEntry:
    """One line of mountinfo."""

    device: str  # MAJOR:MINOR
    mountpoint: str
    file_system: str
    source: str
    root: str = "/"  # what of the file system is mounted
    options: frozenset[str] = frozenset()  # of the mount and of the file system


def mounts(table: Path = Path("/proc/self/mountinfo")) -> list[MountEntry]:
    """All mounts, in mount order: of two at the same place the later one is what one sees there."""
    entries = []
    for line in table.read_bytes().splitlines():
        fields = line.split(b" ")
        after = fields[fields.index(b"-") + 1 :]
        options = fields[5].split(b",") + after[2].split(b",")
        entries.append(
            MountEntry(
                device=fields[2].decode(),
                mountpoint=_text(fields[4]),
                file_system=after[0].decode(),
                source=_text(after[1]),
                root=_text(fields[3]),
                options=frozenset(map(_text, options)),
            )
        )
    return entries


def mount_at(mountpoint: str) -> MountEntry | None:
    """The topmost mount exactly at this path."""
    found = [entry for entry in mounts() if entry.mountpoint == mountpoint]
    return found[-1] if found else None


def mount_of(path: Path, table: Sequence[MountEntry]) -> MountEntry | None:
    """The mount that an absolute path without symlinks lies on."""
    found: MountEntry | None = None
    for entry in table:
        if path.is_relative_to(entry.mountpoint) and (found is None or len(entry.mountpoint) >= len(found.mountpoint)):
            found = entry
    return found


def nearest_existing(path: Path) -> Path:
    """The path, or of what is above it the nearest that exists and can be seen; absolute and without symlinks."""
    whole = path.absolute()
    return next(place for place in (whole, *whole.parents) if os.path.exists(place)).resolve()


def _text(field: bytes) -> str:
    return os.fsdecode(_ESCAPED.sub(lambda match: bytes([int(match[1], 8)]), field))
