"""The disks below the warm tier: what they are, how they are queued and connected. Called by examination.py.

A directory's device is followed down through partitions, LVM, dm-crypt and md to the disks at the bottom. Everything is
read from /sys: sysfs-block, sysfs-bus-pci.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tierfs.app.doctor.finding import Finding, note, ok, warning
from tierfs.app.doctor.looking import entries, read_number, read_text
from tierfs.blocks.units import format_bytes
from tierfs.config.mounts import nearest_existing
from tierfs.config.schema import MountConfig

_READ_AHEAD_WANTED_KB = 4096
_READ_AHEAD_LOW_KB = 1024
_QUEUE_LOW = 32
# NVMe to look at, but remote: by the model that clouds give their network volumes.
_NOT_LOCAL = ("Amazon Elastic Block Store", "nvme_card-pd", "MSFT NVMe Accelerator")
_DEPTH_MAX = 8  # of devices upon devices


@dataclass(frozen=True, kw_only=True)
class Link:
    """A PCIe link: GT/s per lane and lanes, now and at most."""

    speed: float
    width: int
    speed_max: float
    width_max: int

    def __str__(self) -> str:
        return f"{self.speed:g} GT/s x{self.width}"

    @property
    def degraded(self) -> bool:
        """Whether it runs below what both the device and the slot can do."""
        return self.speed < self.speed_max or self.width < self.width_max


@dataclass(frozen=True, kw_only=True)
class Disk:
    """``kind``: nvme, virtio, xen, scsi, loop, zram, pmem or other. Numbers are None where /sys does not tell."""

    name: str
    kind: str
    model: str = ""
    rotating: bool = False
    scheduler: str = ""
    requests: int | None = None
    queues: int = 1
    read_ahead_kb: int | None = None
    link: Link | None = None
    numa_node: int | None = None


@dataclass(frozen=True, kw_only=True)
class StorageFacts:
    """``networks``: the NUMA node of each network device that has one; ``distances[a][b]`` of nodes, 10 is near."""

    disks: tuple[Disk, ...] = ()
    virtual_machine: bool = False
    networks: tuple[tuple[str, int], ...] = ()
    distances: tuple[tuple[int, ...], ...] = ()


def look(config: MountConfig | None, root: Path = Path("/")) -> StorageFacts:
    """``root`` is where /proc and /sys are found."""
    warm = () if config is None or config.warm is None else config.warm.directories
    found: dict[str, Disk] = {}
    for directory in warm:
        number = os.stat(nearest_existing(directory)).st_dev
        for disk in disks_of(f"{os.major(number)}:{os.minor(number)}", root):
            found[disk.name] = disk
    networks = []
    for device in entries(root / "sys/class/net"):
        node = read_number(device / "device/numa_node")
        if node is not None and node >= 0:
            networks.append((device.name, node))
    return StorageFacts(
        disks=tuple(found.values()),
        virtual_machine=" hypervisor" in (read_text(root / "proc/cpuinfo") or ""),
        networks=tuple(networks),
        distances=_distances(root),
    )


def disks_of(number: str, root: Path = Path("/")) -> Iterator[Disk]:
    """The disks at the bottom of a device, MAJOR:MINOR. None for what is no block device, such as btrfs or a tmpfs."""
    place = root / "sys/dev/block" / number
    if place.exists():
        yield from _bottom(place.resolve(), _DEPTH_MAX)


def judge(facts: StorageFacts) -> list[Finding]:
    """Pure."""
    findings = []
    for disk in facts.disks:
        findings += [_kind(disk, facts.virtual_machine), *_queueing(disk), *_link(disk), *_numa(disk, facts)]
    return findings


def _bottom(device: Path, depth: int) -> Iterator[Disk]:
    if (device / "partition").exists():
        device = device.parent
    below = entries(device / "slaves")
    if below and depth:
        for other in below:
            yield from _bottom(other.resolve(), depth - 1)
    else:
        yield _disk(device)


def _disk(device: Path) -> Disk:
    queue = device / "queue"
    chosen = re.search(r"\[([\w-]+)\]", read_text(queue / "scheduler") or "")
    kind = _kind_of(device)
    nodes = [node for place in _above(device) if (node := read_number(place / "numa_node")) is not None]
    return Disk(
        name=device.name,
        kind=kind,
        model=read_text(device / "device/model") or "",
        # Virtual disks say that they rotate when they do not know.
        rotating=kind == "scsi" and read_number(queue / "rotational") == 1,
        scheduler=chosen[1] if chosen else "",
        requests=read_number(queue / "nr_requests"),
        queues=max(1, len(entries(device / "mq"))),
        read_ahead_kb=read_number(queue / "read_ahead_kb"),
        link=_link_of(device),
        numa_node=next(iter(nodes), None),
    )


def _kind_of(device: Path) -> str:
    for beginning, kind in (
        ("nvme", "nvme"), ("vd", "virtio"), ("xvd", "xen"), ("sd", "scsi"), ("loop", "loop"), ("zram", "zram"),
        ("pmem", "pmem"),
    ):  # fmt: skip
        if device.name.startswith(beginning):
            # virtio-scsi and the like are virtual too, whatever the disk's name.
            virtual = kind == "scsi" and any(place.name.startswith("virtio") for place in _above(device))
            return "virtio" if virtual else kind
    return "other"


def _above(device: Path) -> Iterator[Path]:
    """The directories of the devices that this one is connected to, from the nearest."""
    for place in ((device / "device").resolve(), *(device / "device").resolve().parents):
        if place.name in ("devices", "sys", ""):
            return
        yield place


def _link_of(device: Path) -> Link | None:
    for place in _above(device):
        texts = [
            read_text(place / name)
            for name in ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
        ]
        numbers = [re.match(r"[\d.]+", text or "") for text in texts]
        if all(numbers):
            speed, width, speed_max, width_max = (float(number[0]) for number in numbers if number)
            return Link(speed=speed, width=int(width), speed_max=speed_max, width_max=int(width_max))
    return None


def _distances(root: Path) -> tuple[tuple[int, ...], ...]:
    nodes = [path for path in entries(root / "sys/devices/system/node") if re.fullmatch(r"node\d+", path.name)]
    nodes.sort(key=lambda path: int(path.name.removeprefix("node")))
    return tuple(tuple(map(int, (read_text(node / "distance") or "").split())) for node in nodes)


def _kind(disk: Disk, virtual_machine: bool) -> Finding:
    name = "storage.disk"
    if disk.rotating:
        why = "it reads some 200 MB/s in sequence, and far less when several models load at once"
        return warning(name, f"{disk.name} is a rotating disk", why, "put warm.path on an NVMe disk")
    if disk.kind in ("virtio", "xen"):
        return note(
            name,
            f"{disk.name} is a virtual disk ({disk.kind})",
            "the host decides how fast it is, often by bursts; nothing here can tell what lies behind it",
            "pass an NVMe disk through to the machine (PCI, VFIO), or choose one with local NVMe; see --measure",
        )
    if disk.kind in ("loop", "zram"):
        why = "a loop device reads its file system twice; zram is compressed memory"
        return warning(name, f"{disk.name} is a {disk.kind} device", why, "put warm.path on an NVMe disk")
    if disk.model.startswith(_NOT_LOCAL):
        why = "its speed is that of the network and of what was bought, and is shared with what is fetched"
        mend = "put warm.path on the machine's own NVMe disk (instance store, local SSD)"
        return warning(name, f"{disk.name} is a network volume ({disk.model})", why, mend)
    if disk.kind != "nvme":
        return ok(name, f"{disk.name} is a disk without moving parts{_called(disk)}")
    where = " of this machine, a virtual one" if virtual_machine else ""
    return ok(name, f"{disk.name} is an NVMe disk{where}{_called(disk)}")


def _called(disk: Disk) -> str:
    return f" ({disk.model})" if disk.model else ""


def _queueing(disk: Disk) -> list[Finding]:
    findings = []
    place = f"/sys/block/{disk.name}/queue"
    if disk.kind == "nvme" and disk.scheduler not in ("", "none"):
        what = f"{disk.name} has the I/O scheduler {disk.scheduler}"
        why = "an NVMe disk orders its requests better by itself"
        findings.append(note("storage.scheduler", what, why, f"echo none > {place}/scheduler"))
    if disk.requests is not None and disk.requests < _QUEUE_LOW:
        what = f"{disk.name} takes {disk.requests} requests at once on each of {disk.queues} queues"
        why = "several readers at once keep more under way"
        findings.append(note("storage.queue", what, why, f"echo 256 > {place}/nr_requests"))
    if disk.read_ahead_kb is not None and disk.read_ahead_kb < _READ_AHEAD_LOW_KB:
        what = f"{disk.name} is read ahead by {format_bytes(disk.read_ahead_kb * 1024)}"
        why = "models that are read by passthrough are read by the kernel, with the read-ahead of their disk"
        mend = f"echo {_READ_AHEAD_WANTED_KB} > {place}/read_ahead_kb (a udev rule makes it last)"
        findings.append(warning("storage.read_ahead", what, why, mend))
    return findings


def _link(disk: Disk) -> list[Finding]:
    if disk.link is None:
        return []
    most = f"{disk.link.speed_max:g} GT/s x{disk.link.width_max}"
    if not disk.link.degraded:
        return [ok("storage.link", f"{disk.name} is connected by {disk.link}, the most it can")]
    what = f"{disk.name} is connected by {disk.link}, it can {most}"
    why = "its sequential speed is cut in proportion"
    mend = "use a slot with more lanes or of a newer generation; reseat it; look at the BIOS: lspci -vv (LnkSta)"
    return [warning("storage.link", what, why, mend)]


def _numa(disk: Disk, facts: StorageFacts) -> list[Finding]:
    node = disk.numa_node
    if node is None or node < 0 or len(facts.distances) < 2:
        return []
    far = [
        f"{network} (node {other})"
        for network, other in facts.networks
        if other < len(facts.distances) and node < len(facts.distances[other]) and facts.distances[other][node] > 10
    ]
    if not far:
        return []
    what = f"{disk.name} is at NUMA node {node}, away from {', '.join(far)}"
    why = "what is fetched crosses between the processors on its way to the disk"
    mend = f"run the daemon there: numactl --cpunodebind={node}, or NUMAMask= and CPUAffinity= in the systemd unit"
    return [note("storage.numa", what, why, mend)]
