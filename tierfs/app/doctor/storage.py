"""The disks below the warm tier: what they are, how they are queued and connected. Called by examination.py.

disks.py finds them. What must hold: each thing that was looked at is a finding, also where all is well.
"""

import re
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

from tierfs.app.doctor.disks import Disk, disks_below, numa_node_of
from tierfs.app.doctor.finding import Finding, note, ok, warning
from tierfs.app.doctor.looking import entries, read_text
from tierfs.blocks.units import format_bytes
from tierfs.config import addresses
from tierfs.config.mounts import nearest_existing
from tierfs.config.schema import MountConfig
from tierfs.transport.rdma.devices import interface_of

_READ_AHEAD_WANTED_KB = 4096
_READ_AHEAD_LOW_KB = 1024
_QUEUE_LOW = 32
_RESOLVING_S = 2.0
_NEAR = 10  # the distance of a node to itself: ACPI's SLIT
# NVMe to look at, but remote: by the model that clouds give their network volumes.
_NOT_LOCAL = ("Amazon Elastic Block Store", "nvme_card-pd", "MSFT NVMe Accelerator")
# By the model that hypervisors give the disks they emulate.
_EMULATED = (
    "QEMU", "VMware", "ORCL-VBOX", "VBOX", "Virtual disk", "Virtual Disk", "Parallels", "PROXMOX", "bhyve",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StorageFacts:
    """``networks``: the NUMA node of each network device that has one; ``distances[a][b]`` of nodes, 10 is near.
    ``route``: the network device on the way to the source, empty where that is not known.
    """

    disks: tuple[Disk, ...] = ()
    virtual_machine: bool = False
    networks: tuple[tuple[str, int], ...] = ()
    distances: tuple[tuple[int, ...], ...] = ()
    route: str = ""


def look(config: MountConfig | None, root: Path = Path("/")) -> StorageFacts:
    """``root`` is where /proc, /sys and /dev are found."""
    warm = () if config is None or config.warm is None else config.warm.directories
    found: dict[str, Disk] = {}
    for directory in warm:
        for disk in disks_below(nearest_existing(directory), root):
            found[disk.name] = disk
    networks = []
    for device in entries(root / "sys/class/net"):
        node = numa_node_of(device.name, root)
        if node is not None:
            networks.append((device.name, node))
    return StorageFacts(
        disks=tuple(found.values()),
        virtual_machine=" hypervisor" in (read_text(root / "proc/cpuinfo") or ""),
        networks=tuple(networks),
        distances=_distances(root),
        route="" if config is None else _route(config.source.url),
    )


def judge(facts: StorageFacts) -> list[Finding]:
    """Pure."""
    findings = []
    for disk in facts.disks:
        findings += [
            _kind(disk, facts.virtual_machine), *_layers(disk), *_queueing(disk), *_read_ahead(disk), *_link(disk),
            *_numa(disk, facts),
        ]  # fmt: skip
    return list(dict.fromkeys(findings))  # the disks of an array have some in common


def _route(url: str) -> str:
    """The network device by which the kernel would send to the source; a name gets 2 s to be resolved."""
    source = addresses.parse_source_url(url)
    if isinstance(source, addresses.DirectorySource):
        return ""
    found: list[str] = []

    def ask() -> None:
        try:
            where = socket.getaddrinfo(source.address.host, source.address.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(*where[:3]) as unsent:  # connecting a datagram socket only asks for the route: udp(7)
                unsent.connect(where[4])
                found.append(interface_of(str(unsent.getsockname()[0])))
        except (OSError, ValueError):
            pass

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_RESOLVING_S)
    return next(iter(found), "")


def _distances(root: Path) -> tuple[tuple[int, ...], ...]:
    nodes = [path for path in entries(root / "sys/devices/system/node") if re.fullmatch(r"node\d+", path.name)]
    nodes.sort(key=lambda path: int(path.name.removeprefix("node")))
    return tuple(tuple(map(int, (read_text(node / "distance") or "").split())) for node in nodes)


def _kind(disk: Disk, virtual_machine: bool) -> Finding:
    name = "storage.disk"
    if disk.kind in ("virtio", "xen"):
        return note(
            name,
            f"{disk.name} is a virtual disk ({disk.kind})",
            "the host decides how fast it is, often by bursts; nothing here can tell what lies behind it",
            "pass an NVMe disk through to the machine (PCI, VFIO), or choose one with local NVMe; see --measure",
        )
    if disk.kind in ("nvme", "scsi") and disk.model.startswith(_EMULATED):
        return note(
            name,
            f"{disk.name} is not passed through: the host emulates it ({disk.model})",
            "each request goes through the host's processors, to a file or a volume there that nothing here can see",
            "pass the NVMe disk itself through to the machine (PCI, VFIO: vfio-pci, hostdev); see --measure",
        )
    if disk.rotating:
        why = "it reads some 200 MB/s in sequence, and far less when several models load at once"
        return warning(name, f"{disk.name} is a rotating disk", why, "put warm.path on an NVMe disk")
    if disk.kind in ("loop", "zram"):
        why = "a loop device reads its file system twice; zram is compressed memory"
        return warning(name, f"{disk.name} is a {disk.kind} device", why, "put warm.path on an NVMe disk")
    if disk.model.startswith(_NOT_LOCAL):
        why = "its speed is that of the network and of what was bought, and is shared with what is fetched"
        mend = "put warm.path on the machine's own NVMe disk (instance store, local SSD)"
        return warning(name, f"{disk.name} is a network volume ({disk.model})", why, mend)
    if disk.kind != "nvme":
        return ok(name, f"{disk.name} is a disk without moving parts{_called(disk)}")
    where = ", passed through to this virtual machine" if virtual_machine else ""
    return ok(name, f"{disk.name} is an NVMe disk{_called(disk)}{where}")


def _called(disk: Disk) -> str:
    return f" ({disk.model})" if disk.model else ""


def _layers(disk: Disk) -> list[Finding]:
    if not disk.layers:
        return []
    name = "storage.layers"
    what = f"{' upon '.join(map(str, disk.layers))} upon {disk.name} lies below the warm tier"
    for layer in disk.layers:
        if layer.kind == "loop":
            why = "what is read goes through two file systems" + ("" if layer.direct else ", and twice through memory")
            direct = "" if layer.direct else f"; or at least: losetup --direct-io=on /dev/{layer.name}"
            return [warning(name, what, why, f"put warm.path on the file system that {layer.detail} lies on{direct}")]
    for layer in disk.layers:
        if layer.kind == "dm-crypt":
            why = "each byte is decrypted by a processor; the queues before it only cost time on a fast disk"
            switches = "--perf-no_read_workqueue --perf-no_write_workqueue"
            mend = (
                f"cryptsetup refresh {switches} {layer.detail or layer.name}; models that are public need no encryption"
            )
            return [note(name, what, why, mend)]
    return [ok(name, what)]


def _queueing(disk: Disk) -> list[Finding]:
    findings = []
    place = f"/sys/block/{disk.name}/queue"
    if disk.kind == "nvme" and disk.scheduler not in ("", "none"):
        what = f"{disk.name} has the I/O scheduler {disk.scheduler}"
        why = "an NVMe disk orders its requests better by itself"
        findings.append(note("storage.scheduler", what, why, f"echo none > {place}/scheduler"))
    elif disk.scheduler:
        chosen = "no I/O scheduler" if disk.scheduler == "none" else f"the I/O scheduler {disk.scheduler}"
        findings.append(ok("storage.scheduler", f"{disk.name} has {chosen}"))
    if disk.requests is not None:
        what = f"{disk.name} takes {disk.requests} requests at once on each of its queues ({disk.queues})"
        why = "several readers at once keep more under way"
        few = note("storage.queue", what, why, f"echo 256 > {place}/nr_requests")
        findings.append(few if disk.requests < _QUEUE_LOW else ok("storage.queue", what))
    return findings


def _read_ahead(disk: Disk) -> list[Finding]:
    if disk.read_ahead_kb is None:
        return []
    what = f"{disk.read_ahead_of} is read ahead by {format_bytes(disk.read_ahead_kb * 1024)}"
    if disk.read_ahead_kb >= _READ_AHEAD_LOW_KB:
        return [ok("storage.read_ahead", what)]
    why = "models that are read by passthrough are read by the kernel, with the read-ahead of their disk"
    place = f"/sys/block/{disk.read_ahead_of}/queue/read_ahead_kb"
    mend = f"echo {_READ_AHEAD_WANTED_KB} > {place} (a udev rule makes it last)"
    return [warning("storage.read_ahead", what, why, mend)]


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
    if node is None or node < 0 or not 1 < len(facts.distances) > node:
        return []  # of one node nothing is far
    # Without a known way every network device may be it.
    on_the_way = [one for one in facts.networks if not facts.route or one[0] == facts.route]
    away = [
        f"{network} (node {other}, distance {facts.distances[other][node]})"
        for network, other in on_the_way
        if other < len(facts.distances) and node < len(facts.distances[other]) and facts.distances[other][node] > _NEAR
    ]
    to_source = ", by which the source is reached" if facts.route else ""
    if away:
        what = f"{disk.name} is at NUMA node {node}, away from {', '.join(away)}{to_source}"
        why = "what is fetched crosses between the processors on its way to the disk"
        mend = f"run the daemon there: numactl --cpunodebind={node}, or NUMAMask= and CPUAffinity= in the systemd unit"
        return [note("storage.numa", what, why, mend)]
    if not on_the_way:
        return []
    names = ", ".join(network for network, _ in on_the_way)
    return [ok("storage.numa", f"{disk.name} is at NUMA node {node}, like {names}{to_source}")]
