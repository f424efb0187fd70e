"""From a directory down to the disks its bytes are on, through partitions, LVM, dm-crypt, md and loop devices.

storage.py asks and judges. Everything is read from /sys and the table of mounts: sysfs-block, sysfs-bus-pci,
sysfs-block-loop (Documentation/ABI of the kernel).
"""

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tierfs.app.doctor.looking import entries, read_number, read_text
from tierfs.config.mounts import MountEntry, mount_of, mounts

_DEPTH_MAX = 8  # of devices upon devices
_DELETED = " (deleted)"  # what the kernel says of a file without a name


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
class Layer:
    """A device upon others. ``kind``: LVM, dm-crypt, multipath, dm, md (or its level), loop; ``detail``: its name, or
    the file that a loop device reads. ``direct``: whether a loop device reads it past the page cache.
    """

    name: str
    kind: str
    detail: str = ""
    direct: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}{self.detail and ' ' + self.detail})"


@dataclass(frozen=True, kw_only=True)
class Disk:
    """``kind``: nvme, virtio, xen, scsi, loop, zram, pmem or other. Numbers are None where /sys does not tell.
    ``layers``: what lies between the file system and the disk, from above. ``read_ahead_of``: the device whose
    read-ahead counts, which is the uppermost.
    """

    name: str
    kind: str
    model: str = ""
    rotating: bool = False
    scheduler: str = ""
    requests: int | None = None
    queues: int = 1
    read_ahead_of: str = ""
    read_ahead_kb: int | None = None
    link: Link | None = None
    numa_node: int | None = None
    layers: tuple[Layer, ...] = ()


def disks_below(directory: Path, root: Path = Path("/")) -> Iterator[Disk]:
    """The disks below an absolute directory without symlinks. None for a tmpfs, a network file system and the like.

    ``root`` is where /proc, /sys and /dev are found. Of a btrfs on several devices only the first is found.
    """
    entry = _entry(directory, root)
    if entry is not None:
        for device in _device_of(entry, root):
            yield from _down(device, root, (), None)


def numa_node_of(interface: str, root: Path = Path("/")) -> int | None:
    """The NUMA node of a network interface, or of one below it (a bond, a VLAN, a bridge's port)."""
    return next(_nodes(root / "sys/class/net" / interface, _DEPTH_MAX), None)


def _nodes(interface: Path, depth: int) -> Iterator[int]:
    node = read_number(interface / "device/numa_node")
    if node is not None:
        if node >= 0:
            yield node
    elif depth:
        for lower in entries(interface):
            if lower.name.startswith("lower_"):
                yield from _nodes(lower.resolve(), depth - 1)
        for lower in entries(interface / "brif"):
            yield from _nodes(interface.parent / lower.name, depth - 1)


def _entry(path: Path, root: Path) -> MountEntry | None:
    try:
        return mount_of(path, mounts(root / "proc/self/mountinfo"))
    except OSError:
        return None


def _device_of(entry: MountEntry, root: Path) -> list[Path]:
    """The device's directory in /sys, if there is one."""
    number = entry.device
    if not (root / "sys/dev/block" / number).exists() and entry.source.startswith("/dev/"):
        try:  # btrfs has a number of its own
            status = os.stat(root / entry.source.removeprefix("/"))
        except OSError:
            return []
        if not stat.S_ISBLK(status.st_mode):
            return []
        number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    place = root / "sys/dev/block" / number
    return [place.resolve()] if place.exists() else []


def _down(device: Path, root: Path, layers: tuple[Layer, ...], top: Path | None) -> Iterator[Disk]:
    if (device / "partition").exists():
        device = device.parent
    top = top or device
    below = [other.resolve() for other in entries(device / "slaves")] or _backing(device, root)
    if not below or len(layers) == _DEPTH_MAX:
        yield _disk(device, layers, top)
        return
    for other in below:
        yield from _down(other, root, (*layers, _layer(device)), top)


def _backing(device: Path, root: Path) -> list[Path]:
    """What the file lies on that a loop device reads."""
    file = read_text(device / "loop/backing_file")
    entry = None if file is None else _entry(Path(file.removesuffix(_DELETED)), root)
    return [] if entry is None else _device_of(entry, root)


def _layer(device: Path) -> Layer:
    file = read_text(device / "loop/backing_file")
    if file is not None:
        return Layer(name=device.name, kind="loop", detail=file, direct=read_number(device / "loop/dio") == 1)
    if (device / "md").is_dir():
        return Layer(name=device.name, kind=read_text(device / "md/level") or "md")
    beginning = (read_text(device / "dm/uuid") or "").partition("-")[0]
    kind = {"LVM": "LVM", "CRYPT": "dm-crypt", "mpath": "multipath"}.get(beginning, "dm")
    return Layer(name=device.name, kind=kind, detail=read_text(device / "dm/name") or "")


def _disk(device: Path, layers: tuple[Layer, ...], top: Path) -> Disk:
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
        read_ahead_of=top.name,
        read_ahead_kb=read_number(top / "queue/read_ahead_kb"),
        link=_link_of(device),
        numa_node=next(iter(nodes), None),
        layers=layers,
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
