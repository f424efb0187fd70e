"""RDMA: devices, their links and addresses, pyverbs, and memory that may be locked. Called by examination.py.

The machine only: whether a source speaks RDMA is asked by whoever connects to it. Sources: sysfs-class-infiniband,
rdma-system(8), ulimit(1).
"""

import importlib.metadata
import os
import re
from dataclasses import dataclass
from pathlib import Path

from tierfs.app.doctor.finding import Finding, note, ok, warning
from tierfs.app.doctor.looking import entries, read_text
from tierfs.blocks.errors import SourceUnavailable
from tierfs.blocks.units import format_bytes
from tierfs.config.schema import MountConfig
from tierfs.transport.rdma.loading import load_pyverbs
from tierfs.transport.rdma.memlock import lockable_bytes

_NO_GID = re.compile(r"[0:]*")
_DEFAULT_BUFFERS_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Port:
    """One port of a device, in the words of the kernel."""

    device: str
    number: int
    state: str  # ACTIVE, DOWN, INIT ...
    rate: str
    link_layer: str
    gids: int  # addresses it has
    network: str = ""  # such as eth0


@dataclass(frozen=True, kw_only=True)
class RdmaFacts:
    """``pyverbs``: its version, empty where it cannot be imported, with ``pyverbs_error``."""

    ports: tuple[Port, ...] = ()
    usable: bool = False  # /dev/infiniband/uverbs* can be opened by this user
    pyverbs: str = ""
    pyverbs_error: str = ""
    lockable_bytes: int | None = None  # None: no limit
    buffers_bytes: int = _DEFAULT_BUFFERS_BYTES


def look(config: MountConfig | None, root: Path = Path("/")) -> RdmaFacts:
    """``root`` is where /sys and /dev are found. Imports pyverbs: to be called in a child process."""
    buffers = _DEFAULT_BUFFERS_BYTES if config is None else int(config.memory.limit)
    ports = [port for device in entries(root / "sys/class/infiniband") for port in _ports(device)]
    if not ports:
        return RdmaFacts(buffers_bytes=buffers)
    version, error = "", ""
    try:
        version = _version(load_pyverbs())
    except SourceUnavailable as problem:
        error = " ".join(str(problem).split())
    verbs = [path for path in entries(root / "dev/infiniband") if path.name.startswith("uverbs")]
    return RdmaFacts(
        ports=tuple(ports),
        usable=any(os.access(path, os.R_OK | os.W_OK) for path in verbs),
        pyverbs=version,
        pyverbs_error=error,
        # The daemon of another user has none of root's rights.
        lockable_bytes=lockable_bytes(root, keeps_rights=config is None or config.mount.user in (None, "root")),
        buffers_bytes=buffers,
    )


def judge(facts: RdmaFacts) -> list[Finding]:
    """Pure."""
    if not facts.ports:
        return [note("rdma.none", "no RDMA device: a tierfs:// source is reached over TCP")]
    findings = [_link(port) for port in facts.ports]
    if not facts.usable:
        what = "no /dev/infiniband/uverbs* that this user can open"
        mend = "modprobe ib_uverbs; in a container --device /dev/infiniband"
        findings.append(warning("rdma.verbs", what, "every use of the device goes through it", mend))
    if facts.pyverbs:
        findings.append(ok("rdma.pyverbs", f"pyverbs {facts.pyverbs}"))
    else:
        what = facts.pyverbs_error or "pyverbs is not installed"
        why = "tierfs speaks RDMA through it; without it the source is reached over TCP"
        mend = "apt-get install python3-pyverbs (for the system's Python), or pip install pyverbs, of the same version"
        findings.append(warning("rdma.pyverbs", what, why, mend + " as libibverbs"))
    if facts.lockable_bytes is not None and facts.lockable_bytes < facts.buffers_bytes:
        findings.append(
            warning(
                "rdma.locked_memory",
                f"a process may lock {format_bytes(facts.lockable_bytes)} of memory (RLIMIT_MEMLOCK), the buffers"
                f" (memory.limit) are {format_bytes(facts.buffers_bytes)}",
                "a device can only be given locked memory, and registering it fails",
                "LimitMEMLOCK=infinity in the systemd unit, or '* hard memlock unlimited' in /etc/security/limits.conf",
            )
        )
    return findings


def _link(port: Port) -> Finding:
    name = f"{port.device} port {port.number}"
    behind = f" ({port.network})" if port.network else ""
    if port.state != "ACTIVE":
        mend = f"ip link set {port.network or 'ETH'} up; look at the cable and the switch: rdma link show"
        return warning("rdma.link", f"{name}{behind} is {port.state}", "nothing can be sent over it", mend)
    if not port.gids:
        mend = f"ip address add ADDRESS/24 dev {port.network or 'ETH'}"
        return warning("rdma.address", f"{name}{behind} has no GID", "a peer reaches it by one", mend)
    return ok("rdma.link", f"{name}{behind} is active: {port.rate}, {port.link_layer}, {port.gids} GIDs")


def _ports(device: Path) -> list[Port]:
    networks = [entry.name for entry in entries(device / "device/net")]
    found = []
    for port in entries(device / "ports"):
        attributes = entries(port / "gid_attrs/ndevs")
        named = sorted({name for path in attributes if (name := read_text(path))} | set(networks))
        gids = [gid for path in entries(port / "gids") if (gid := read_text(path)) and not _NO_GID.fullmatch(gid)]
        found.append(
            Port(
                device=device.name,
                number=int(port.name),
                state=(read_text(port / "state") or "unknown").rpartition(": ")[2],
                rate=read_text(port / "rate") or "rate unknown",
                link_layer=read_text(port / "link_layer") or "link unknown",
                gids=len(gids),
                network=named[0] if named else "",
            )
        )
    return found


def _version(module: object) -> str:
    try:
        return importlib.metadata.version("pyverbs")
    except importlib.metadata.PackageNotFoundError:  # a distribution's package has no metadata of its own
        return str(getattr(module, "__version__", "of the system"))
