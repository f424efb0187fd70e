"""Which port and GID a connection uses: the ones that have the address its TCP connection has on this side.

So the system's routes decide, and several ports are used by giving the server several addresses. ``read_ports`` looks
at sysfs; ``choose`` is pure.

    RoCE          the GID that is the address itself (an IPv4 one as ::ffff:a.b.c.d), of RoCE v2
    InfiniBand    the port of the network interface (IPoIB) that has the address; its first GID
"""

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

from tierfs.blocks.errors import SourceUnavailable
from tierfs.transport.rdma.verbs import Gid, Port

SYSFS = Path("/sys/class/infiniband")
ETHERNET, INFINIBAND = "Ethernet", "InfiniBand"
_ROCE_V2 = "RoCE v2"
_GIDS_MOST = 256
_SIOCGIFADDR = 0x8915
_NO_GID = bytes(16)


def read_ports(sysfs: Path = SYSFS) -> list[Port]:
    """Every port that the kernel shows, also inactive ones."""
    found = []
    for device in sorted(_listed(sysfs)):
        interfaces = tuple(sorted(path.name for path in _listed(device / "device" / "net")))
        for port in sorted(_listed(device / "ports")):
            link = _text(port / "link_layer") or INFINIBAND
            found.append(
                Port(
                    device=device.name,
                    number=int(port.name),
                    link=link,
                    active="ACTIVE" in _text(port / "state"),
                    gids=tuple(_gids(port)),
                    interfaces=interfaces,
                )
            )
    return found


def choose(ports: Iterable[Port], local_host: str, *, interface_of: Callable[[str], str]) -> tuple[Port, Gid]:
    """The port and GID for a connection that has this address here. Raises SourceUnavailable with what is missing.

    ``interface_of`` names the network interface that has an address, or nothing.
    """
    ports = list(ports)
    if not ports:
        raise SourceUnavailable(
            "there is no RDMA device here (/sys/class/infiniband is empty): load its driver, or for soft-RoCE run"
            " `rdma link add rxe0 type rxe netdev INTERFACE`"
        )
    wanted = _mapped(local_host)
    interface = interface_of(local_host)
    inactive = ""
    for port in ports:
        gid: Gid | None
        if port.link == INFINIBAND:
            gid = port.gids[0] if port.gids and interface and interface in port.interfaces else None
        else:
            gid = next((one for one in port.gids if one.raw == wanted and one.kind == _ROCE_V2), None)
        if gid is None:
            continue
        if port.active:
            return port, gid
        inactive = f"; {port} has it, but is not active: is its link up?"
    names = ", ".join(str(port) for port in ports)
    raise SourceUnavailable(
        f"no RDMA device has {local_host}, the address that the route to the peer starts from{inactive or ''}"
        f" (there is: {names})"
    )


def interface_of(host: str) -> str:
    """The network interface with this address; empty if none shows it (IPv6 only: see the kernel's table)."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        for line in _text(Path("/proc/net/if_inet6")).splitlines():
            words = line.split()
            if len(words) == 6 and bytes.fromhex(words[0]) == address.packed:
                return words[5]
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        assert address.ipv4_mapped is not None
        address = address.ipv4_mapped
    return next((name for _, name in socket.if_nameindex() if address.packed in _ipv4_of(name)), "")


def _ipv4_of(interface: str) -> list[bytes]:
    """The interface's first IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return []
    return [answer[20:24]]


def _mapped(host: str) -> bytes:
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return bytes(10) + b"\xff\xff" + address.packed
    return address.packed


def _gids(port: Path) -> Iterable[Gid]:
    for path in sorted(_listed(port / "gids"), key=lambda path: int(path.name))[:_GIDS_MOST]:
        raw = _text(path).replace(":", "")
        kind = _text(port / "gid_attrs" / "types" / path.name)
        if len(raw) == 32 and (gid := bytes.fromhex(raw)) != _NO_GID:
            yield Gid(int(path.name), gid, kind, _text(port / "gid_attrs" / "ndevs" / path.name))


def _listed(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    """The file's text; nothing where it cannot be read (the kernel answers EINVAL for an empty GID)."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
