"""Persistent memory: what the machine has, whether it is a DAX mount yet, and what the hot tier lies on.

Called by examination.py. Sources: ndctl-create-namespace(1), Documentation/filesystems/dax.rst, sysfs-bus-nvdimm.
"""

from dataclasses import dataclass
from pathlib import Path

from tierfs.app.doctor.finding import Finding, note, ok, warning
from tierfs.app.doctor.looking import entries, read_number, read_text
from tierfs.blocks.units import format_bytes
from tierfs.config.mounts import mount_of, mounts, nearest_existing
from tierfs.config.schema import MountConfig
from tierfs.tiers.pmem.library import PACKAGES, unavailable


@dataclass(frozen=True)
class Region:
    """Persistent memory as the platform offers it."""

    name: str
    size_bytes: int
    available_bytes: int  # in no namespace yet


@dataclass(frozen=True)
class Namespace:
    """A part of a region in a mode: fsdax is the one that carries a DAX file system; its disk is such as pmem0."""

    name: str
    mode: str
    size_bytes: int
    disk: str = ""


@dataclass(frozen=True)
class Place:
    """A mount of a namespace's disk."""

    disk: str
    mountpoint: str
    file_system: str
    dax: bool


@dataclass(frozen=True, kw_only=True)
class PmemFacts:
    """``hot_kind``: pmem, tmpfs or the name of another file system; empty without a hot tier."""

    regions: tuple[Region, ...] = ()
    namespaces: tuple[Namespace, ...] = ()
    places: tuple[Place, ...] = ()
    library_missing: str = ""  # why libpmemobj cannot be used
    hot_path: str = ""
    hot_kind: str = ""


def look(config: MountConfig | None, root: Path = Path("/")) -> PmemFacts:
    """``root`` is where /proc and /sys are found."""
    devices = entries(root / "sys/bus/nd/devices")
    table = mounts(root / "proc/self/mountinfo")
    places = [
        Place(
            disk=entry.source.removeprefix("/dev/"),
            mountpoint=entry.mountpoint,
            file_system=entry.file_system,
            dax=bool({"dax", "dax=always"} & entry.options),
        )
        for entry in table
        if entry.source.startswith("/dev/pmem")
    ]
    hot = None if config is None else config.hot
    kind = ""
    if hot is not None:
        found = mount_of(nearest_existing(hot.path), table)
        dax = found is not None and bool({"dax", "dax=always"} & found.options)
        kind = "pmem" if dax else "unknown" if found is None else found.file_system
    return PmemFacts(
        regions=tuple(
            Region(path.name, read_number(path / "size") or 0, read_number(path / "available_size") or 0)
            for path in devices
            if path.name.startswith("region")
        ),
        namespaces=tuple(
            namespace for path in devices if path.name.startswith("namespace") and (namespace := _namespace(path))
        ),
        places=tuple(places),
        library_missing=unavailable(),
        hot_path="" if hot is None else str(hot.path),
        hot_kind=kind,
    )


def judge(facts: PmemFacts) -> list[Finding]:
    """Pure."""
    findings = []
    if not facts.regions and not facts.places:
        findings.append(note("pmem.none", "no persistent memory: a hot tier would lie on a tmpfs, see docs/DOCTOR.md"))
    findings += [_unused(region) for region in facts.regions if region.available_bytes >= 1 << 30]
    for namespace in facts.namespaces:
        findings.append(_used(namespace, facts.places))
    if facts.library_missing and any(place.dax for place in facts.places):
        findings.append(
            warning(
                "pmem.library",
                facts.library_missing.partition(":")[0],
                "the residency of a hot tier on persistent memory is kept in SQLite then, with a commit per batch",
                f"apt-get install {PACKAGES}",
            )
        )
    if facts.hot_kind and facts.hot_kind not in ("pmem", "tmpfs", "ramfs"):
        findings.append(
            warning(
                "pmem.hot_on_disk",
                f"the hot tier {facts.hot_path} lies on {facts.hot_kind}, neither memory nor persistent memory",
                "every block is then written to a disk twice, and read from it no faster than from the warm tier",
                "mount a tmpfs or a DAX file system there first (docs/HOT-TIER.md), or take the table [hot] out",
            )
        )
    elif facts.hot_kind:
        findings.append(ok("pmem.hot", f"the hot tier {facts.hot_path} lies on {facts.hot_kind}"))
    return findings


def _namespace(path: Path) -> Namespace | None:
    size = read_number(path / "size") or 0
    if not size:
        return None  # a seed: the place where the next one would be made
    disks = [disk.name for disk in entries(path / "block")]
    # The disk of a namespace with a page map belongs to a pfn device, which holds the namespace.
    for claim in entries(path.parent):
        if read_text(claim / "namespace") == path.name:
            disks += [disk.name for disk in entries(claim / "block")]
    mode = read_text(path / "mode") or "raw"
    return Namespace(path.name, {"memory": "fsdax", "dax": "devdax"}.get(mode, mode), size, disks[0] if disks else "")


def _unused(region: Region) -> Finding:
    return warning(
        "pmem.unused",
        f"{format_bytes(region.available_bytes)} of persistent memory in {region.name} are in no namespace",
        "it can be a hot tier that a restart or a power cut leaves as it was",
        f"ndctl create-namespace -m fsdax -r {region.name}, then mkfs.ext4 -b 4096 and mount -o dax=always"
        " (docs/HOT-TIER.md)",
    )


def _used(namespace: Namespace, places: tuple[Place, ...]) -> Finding:
    size = format_bytes(namespace.size_bytes)
    if namespace.mode != "fsdax":
        return note(
            "pmem.mode",
            f"{namespace.name} ({size}) is in {namespace.mode} mode",
            "only fsdax carries a file system whose files are the memory itself",
            f"its content would be lost: ndctl create-namespace -f -e {namespace.name} -m fsdax",
        )
    mounted = [place for place in places if place.disk == namespace.disk]
    disk = namespace.disk or "pmem0"
    why = "the hot tier maps files of a DAX mount with no copy and no page cache"
    if not mounted:
        mend = f"mkfs.ext4 -b 4096 /dev/{disk} (where it is empty); mount -o dax=always /dev/{disk} /mnt/pmem"
        return warning("pmem.mount", f"{namespace.name} ({size}, /dev/{disk}) is not mounted", why, mend)
    for place in mounted:
        if not place.dax:
            mend = f"umount {place.mountpoint}; mount -o dax=always /dev/{disk} {place.mountpoint}"
            what = f"/dev/{disk} is mounted at {place.mountpoint} ({place.file_system}) without DAX"
            return warning("pmem.dax", what, why, mend)
    return ok("pmem.mount", f"/dev/{disk} ({size}) is a DAX mount at {mounted[0].mountpoint}")
