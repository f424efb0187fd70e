"""Where the tiers' directories lie: the file system, its rights and its space. Called by examination.py."""

import os
from dataclasses import dataclass

from tierfs.app import launch
from tierfs.app.doctor.finding import Finding, note, ok, problem, warning
from tierfs.blocks.units import format_bytes
from tierfs.config.mounts import mount_of, mounts, nearest_existing
from tierfs.config.schema import MountConfig

NETWORK = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "lustre", "ceph", "glusterfs", "beegfs", "gpfs", "afs", "wekafs")
)
_MEMORY = ("tmpfs", "ramfs")
_TRIED = ("ext4", "xfs")
_FULL_SHARE = 0.02  # of a file system that has less than this to spare


@dataclass(frozen=True, kw_only=True)
class Directory:
    """A directory of a tier. ``usable``: the daemon can write there, or make it."""

    tier: str
    path: str
    exists: bool
    usable: bool
    file_system: str
    read_only: bool = False
    size_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class PlaceFacts:
    """The directories, and what the warm tier may hold over all of its own."""

    directories: tuple[Directory, ...] = ()
    warm_capacity_bytes: int = 0
    user: str | None = None  # the daemon's, who gets the directories when root mounts


def look(config: MountConfig | None) -> PlaceFacts:
    """Asks the file systems, which may hang."""
    if config is None:
        return PlaceFacts()
    table = mounts()
    found = []
    warm = () if config.warm is None else config.warm.directories
    for path in launch.tier_directories(config):
        existing = nearest_existing(path)
        entry = mount_of(existing, table)
        space = os.statvfs(existing)
        found.append(
            Directory(
                tier="warm" if path in warm else "hot",
                path=str(path),
                exists=path.is_dir(),
                usable=os.access(existing, os.W_OK | os.X_OK),
                file_system="unknown" if entry is None else entry.file_system,
                read_only=bool(space.f_flag & os.ST_RDONLY),
                size_bytes=space.f_blocks * space.f_frsize,
                free_bytes=space.f_bavail * space.f_frsize,
            )
        )
    return PlaceFacts(
        directories=tuple(found),
        warm_capacity_bytes=0 if config.warm is None else int(config.warm.capacity),
        user=config.mount.user,
    )


def judge(facts: PlaceFacts) -> list[Finding]:
    """Pure."""
    findings = []
    for place in facts.directories:
        findings += [*_rights(place), *_kind(place), *_space(place)]
    warm = [place for place in facts.directories if place.tier == "warm"]
    sizes = sum({(place.file_system, place.size_bytes): place.size_bytes for place in warm}.values())
    if warm and facts.warm_capacity_bytes > sizes:
        findings.append(
            warning(
                "tier.capacity",
                f"warm.capacity is {format_bytes(facts.warm_capacity_bytes)}, its file systems have"
                f" {format_bytes(sizes)}",
                "the tier holds no more than its file systems do, and stops at 97 % of them",
                "leave warm.capacity out, or add a directory to warm.paths",
            )
        )
    return findings


def _rights(place: Directory) -> list[Finding]:
    name = "tier.directory"
    if place.read_only:
        what = f"{place.path} lies on a file system that is mounted read-only"
        mend = "look at dmesg for disk errors; mount -o remount,rw, or choose another directory"
        return [problem(name, what, f"the {place.tier} tier cannot be filled", mend)]
    if not place.usable:
        doing = "be written" if place.exists else "be made"
        what = f"{place.path} cannot {doing} by this user"
        mend = f"mkdir -p {place.path}; chown USER {place.path}, or mount as root"
        return [problem(name, what, f"the {place.tier} tier cannot be filled", mend)]
    if not place.exists:
        return [ok(name, f"{place.path} will be made by the first mount")]
    return []


def _kind(place: Directory) -> list[Finding]:
    name, kind = "tier.file_system", place.file_system
    if place.tier == "hot":
        return []  # pmem.py
    if kind in NETWORK or kind.startswith("fuse"):
        what = f"the warm directory {place.path} lies on {kind}"
        why = "the warm tier is the copy that is near; there each read goes over the network or another program again"
        return [problem(name, what, why, "choose a directory on a local NVMe disk (ext4 or xfs)")]
    if kind in _MEMORY:
        what = f"the warm directory {place.path} lies on a {kind}"
        why = "it is memory and ends with the machine, but is treated as a disk"
        return [warning(name, what, why, "use it as hot.path, and a directory on a local disk as warm.path")]
    if kind == "overlay":
        what = f"the warm directory {place.path} lies on the container's own layer (overlay)"
        why = "it ends with the container, and files there cannot be read by passthrough"
        mend = "put it on a volume: docker run -v /var/cache/tierfs:/var/cache/tierfs, or hostPath"
        return [warning(name, what, why, mend)]
    if kind not in _TRIED:
        what = f"the warm directory {place.path} lies on {kind}"
        why = "tierfs is measured on ext4 and xfs; copy on write and compression cost reads by O_DIRECT their speed"
        return [note(name, what, why, "for most speed: mkfs.ext4 or mkfs.xfs on the disk")]
    return [ok(name, f"the warm directory {place.path} lies on {kind}")]


def _space(place: Directory) -> list[Finding]:
    if place.tier == "hot" or not place.size_bytes:
        return []
    free = f"{format_bytes(place.free_bytes)} of {format_bytes(place.size_bytes)} are free at {place.path}"
    if place.free_bytes < place.size_bytes * _FULL_SHARE:
        why = "a full disk pauses writes to the tier; only what tierfs itself holds can be evicted"
        return [warning("tier.space", free, why, "remove other files there, or lower warm.capacity")]
    return [ok("tier.space", free)]
