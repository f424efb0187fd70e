"""How much memory there is for this process: the machine's, as far as its cgroup and all cgroups above leave it.

Called for computed defaults (relations.py), by the daemon's warning about a configuration that is too large, and by
`tierfs doctor`. Both versions of cgroups are read: the limit of a cgroup holds for all below it, so the smallest of all
ancestors counts, and the room is what the fullest of them has left. Page cache that can be dropped counts as room.
Sources: cgroups(7), Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tierfs.blocks.units import Size, format_bytes
from tierfs.config.mounts import MountEntry, mounts

DEFAULT_LIMIT_BYTES = 1 << 30
_DEFAULT_SHARE = 4  # of the memory there is, the part that the default of memory.limit never exceeds
_MIB = 1 << 20


@dataclass(frozen=True)
class MemoryRoom:
    """``limit_bytes``: the most this process can ever have; ``available_bytes``: what of it is not in use now."""

    total_bytes: int  # of the machine
    limit_bytes: int
    available_bytes: int
    cgroup: str = ""  # the directory of the cgroup with that limit; empty where none has less than the machine

    @property
    def owner(self) -> str:
        """Who has that limit, for a person."""
        return f"the cgroup {self.cgroup}" if self.cgroup else "the machine"


@dataclass(frozen=True)
class Overcommitment:
    """A configuration that asks for more memory than there is."""

    what: str
    mend: str
    why: str = "the kernel ends processes when memory is used up"

    def __str__(self) -> str:
        return f"{self.what}: {self.why}; {self.mend}"


@dataclass(frozen=True)
class _Level:
    directory: Path
    limit_bytes: int
    used_bytes: int


def memory_room(pid: int | str = "self", root: Path = Path("/")) -> MemoryRoom:
    """The room of a process. ``root`` is where /proc and /sys are found. Raises OSError without a /proc."""
    meminfo = _table(root / "proc/meminfo")
    total = meminfo["MemTotal:"] * 1024
    available = meminfo.get("MemAvailable:", meminfo["MemFree:"]) * 1024
    limit, cgroup = total, ""
    for level in _levels(root, pid):
        if level.limit_bytes < limit:
            limit, cgroup = level.limit_bytes, "/" + str(level.directory.relative_to(root))
        available = min(available, max(0, level.limit_bytes - level.used_bytes))
    return MemoryRoom(total_bytes=total, limit_bytes=limit, available_bytes=available, cgroup=cgroup)


def default_memory_limit(room: MemoryRoom, least_bytes: int) -> Size:
    """What ``memory.limit`` is where it is not configured: 1 GiB, or a quarter of the memory where that is less."""
    return Size(max(least_bytes, min(DEFAULT_LIMIT_BYTES, room.limit_bytes // _DEFAULT_SHARE // _MIB * _MIB)))


def overcommitted(room: MemoryRoom, *, memory_limit_bytes: int, hot_bytes: int) -> Overcommitment | None:
    """What is wrong with buffers and a hot tier of these sizes; None when they fit.

    ``hot_bytes`` is the capacity of a hot tier on a tmpfs, which is memory; 0 for any other.
    """
    wanted = memory_limit_bytes + hot_bytes
    if wanted <= room.limit_bytes:
        return None
    parts = f"memory.limit ({format_bytes(memory_limit_bytes)})"
    if hot_bytes:
        parts += f" and hot.capacity ({format_bytes(hot_bytes)}, on a tmpfs)"
    fit = room.limit_bytes - memory_limit_bytes
    if hot_bytes and fit > 0:
        mend = f"set hot.capacity to at most {format_bytes(fit * 9 // 10)}"
    else:
        mend = f"set memory.limit to at most {format_bytes(room.limit_bytes // _DEFAULT_SHARE)}"
    if room.cgroup:
        mend += ", or give the cgroup more (MemoryMax= of a unit, resources.limits.memory of a pod)"
    has = f"{room.owner} has {format_bytes(room.limit_bytes)}"
    return Overcommitment(f"{parts} may take {format_bytes(wanted)}, but {has}", mend)


def _levels(root: Path, pid: int | str) -> Iterator[_Level]:
    """The process's cgroups that have a limit of memory, from the innermost out."""
    try:
        lines = (root / f"proc/{pid}/cgroup").read_text().splitlines()
        table = mounts(root / "proc/self/mountinfo")
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            entries = [entry for entry in table if entry.file_system == "cgroup2"]
            read = _read_v2
        elif "memory" in controllers.split(","):
            entries = [entry for entry in table if entry.file_system == "cgroup" and "memory" in entry.options]
            read = _read_v1
        else:
            continue
        for entry in entries[:1]:
            for directory in _ancestors(root, entry, path):
                level = read(directory)
                if level is not None:
                    yield level


def _ancestors(root: Path, entry: MountEntry, path: str) -> Iterator[Path]:
    """The directories of a cgroup and those above it, as far as they are visible here."""
    top = root / entry.mountpoint.lstrip("/")
    inside = PurePosixPath(path)
    # A container may see its own cgroup as the root of the mount, while the path is that of the host, or begins "/..".
    relative = inside.relative_to(entry.root) if inside.is_relative_to(entry.root) else PurePosixPath()
    if ".." in relative.parts:
        relative = PurePosixPath()
    for part in (relative, *relative.parents):
        yield top / part


def _read_v2(directory: Path) -> _Level | None:
    limits = [limit for name in ("memory.max", "memory.high") if (limit := _number(directory / name)) is not None]
    used = _number(directory / "memory.current")
    if not limits or used is None:
        return None
    statistics = _table(directory / "memory.stat")
    dropped = statistics.get("active_file", 0) + statistics.get("inactive_file", 0)
    return _Level(directory, min(limits), max(0, used - dropped))


def _read_v1(directory: Path) -> _Level | None:
    limit = _number(directory / "memory.limit_in_bytes")
    used = _number(directory / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    statistics = _table(directory / "memory.stat")
    dropped = statistics.get("total_active_file", 0) + statistics.get("total_inactive_file", 0)
    # Of ancestors that a container does not see, this file tells the limit all the same.
    return _Level(directory, min(limit, statistics.get("hierarchical_memory_limit", limit)), max(0, used - dropped))


def _number(path: Path) -> int | None:
    """The number in a file; None for "max" and where there is no such file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _table(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return {}
    return {fields[0]: int(fields[1]) for line in lines if len(fields := line.split()) >= 2 and fields[1].isdigit()}
