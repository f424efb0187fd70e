"""Which device a connection uses is decided by the address it starts from; the rest is a reason."""

import socket
from pathlib import Path

import pytest

from tierfs.blocks.errors import SourceUnavailable
from tierfs.testing.verbs import roce_port
from tierfs.transport.rdma.devices import choose, interface_of, read_ports
from tierfs.transport.rdma.timing import longest_s, timing_for
from tierfs.transport.rdma.verbs import Gid, Port

INFINIBAND = Port("mlx0", 1, "InfiniBand", True, (Gid(0, bytes(range(16)), ""),), ("ib0",))


def no_interface(_: str) -> str:
    return ""


def write_port(sysfs: Path, device: str, *, state: str, gids: dict[int, tuple[str, str]]) -> None:
    port = sysfs / device / "ports" / "1"
    for directory in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / directory).mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text("Ethernet\n")
    for index, (gid, kind) in gids.items():
        (port / "gids" / str(index)).write_text(gid + "\n")
        (port / "gid_attrs" / "types" / str(index)).write_text(kind + "\n")


def test_ports_are_read_from_sysfs_without_their_empty_gids(tmp_path: Path) -> None:
    empty = ":".join(["0000"] * 8)
    address = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
    write_port(
        tmp_path,
        "rxe0",
        state="4: ACTIVE",
        gids={0: ("fe80:" + empty[5:-4] + "0001", "RoCE v2"), 1: (address, "RoCE v2"), 2: (empty, "")},
    )
    (port,) = read_ports(tmp_path)
    assert (port.device, port.number, port.link, port.active) == ("rxe0", 1, "Ethernet", True)
    assert [gid.index for gid in port.gids] == [0, 1]
    assert choose([port], "10.77.0.1", interface_of=no_interface)[1].index == 1


def test_no_sysfs_means_no_ports(tmp_path: Path) -> None:
    assert read_ports(tmp_path / "missing") == []


def test_the_address_of_the_route_decides_between_devices() -> None:
    ports = [roce_port(b"\x0a\x00\x00\x01", device="a"), roce_port(b"\x0a\x01\x00\x01", device="b")]
    assert choose(ports, "10.1.0.1", interface_of=no_interface)[0].device == "b"
    assert choose(ports, "10.0.0.1", interface_of=no_interface)[0].device == "a"
    assert choose(ports, "::ffff:10.0.0.1", interface_of=no_interface)[0].device == "a"


def test_a_gid_of_the_older_protocol_is_not_taken() -> None:
    gid = bytes(10) + b"\xff\xff\x0a\x00\x00\x01"
    port = Port("a", 1, "Ethernet", True, (Gid(2, gid, "IB/RoCE v1"), Gid(3, gid, "RoCE v2")))
    assert choose([port], "10.0.0.1", interface_of=no_interface)[1].index == 3


def test_infiniband_is_found_by_the_interface_of_the_address() -> None:
    port, gid = choose([roce_port(b"\x0a\x00\x00\x01"), INFINIBAND], "10.9.0.1", interface_of=lambda _: "ib0")
    assert (port.device, gid.index) == ("mlx0", 0)


@pytest.mark.parametrize(
    ("ports", "reason"),
    [
        ([], "there is no RDMA device here"),
        ([roce_port(b"\x0a\x00\x00\x02")], r"no RDMA device has 10\.0\.0\.1.*there is: fake0 port 1"),
        ([roce_port(b"\x0a\x00\x00\x01", active=False)], "not active: is its link up"),
        ([INFINIBAND], r"no RDMA device has 10\.0\.0\.1"),
    ],
)
def test_what_is_missing_is_said(ports: list[Port], reason: str) -> None:
    with pytest.raises(SourceUnavailable, match=reason):
        choose(ports, "10.0.0.1", interface_of=no_interface)


def test_interfaces_are_known_by_their_addresses() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") == ""
    if socket.has_ipv6 and Path("/proc/net/if_inet6").exists() and " lo" in Path("/proc/net/if_inet6").read_text():
        assert interface_of("::1") == "lo"


@pytest.mark.parametrize("timeout_s", [0.05, 0.5, 1.0, 3.75, 10.0, 100.0])
def test_a_queue_pair_gives_up_before_its_transfer_does(timeout_s: float) -> None:
    timing = timing_for(timeout_s)
    assert longest_s(timing) <= timeout_s
    assert 2 <= timing.retries < 7, "7 means for ever to soft-RoCE"


def test_more_time_is_never_less_patience() -> None:
    patience = [longest_s(timing_for(timeout_s / 10)) for timeout_s in range(1, 300)]
    assert all(later >= 0.7 * earlier for earlier, later in zip(patience, patience[1:], strict=False))
