"""Looking never hangs: deadlines, crashes, large answers; and file trees of machines that are not here."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tierfs.app.doctor import mounted, pmem, rdma, speed
from tierfs.app.doctor.disks import Disk, Layer, disks_below, numa_node_of
from tierfs.app.doctor.looking import Failure, Look, look_all


def test_each_look_gives_its_facts_however_large() -> None:
    facts = look_all({"a": Look(lambda: "x" * (5 << 20), 20.0), "b": Look(os.getpid, 20.0)})
    assert facts["a"] == "x" * (5 << 20)
    assert facts["b"] != os.getpid(), "in a process of its own"


def test_a_look_that_hangs_is_given_up_and_the_others_count() -> None:
    started_s = time.monotonic()
    facts = look_all({"stuck": Look(partial(time.sleep, 600), 0.5), "fine": Look(lambda: 7, 20.0)})
    assert time.monotonic() - started_s < 15
    assert facts["fine"] == 7
    assert isinstance(facts["stuck"], Failure) and "0.5 s" in facts["stuck"].reason


def crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse() -> None:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize(("call", "says"), [(crash, "crash"), (refuse, "Input/output error")])
def test_a_look_that_crashes_or_raises_is_a_failure(call: Callable[[], object], says: str) -> None:
    started_s = time.monotonic()
    (failure,) = look_all({"x": Look(call, 30.0)}).values()
    assert isinstance(failure, Failure) and says in failure.reason
    assert time.monotonic() - started_s < 20, "its end is noticed before the deadline"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def nvme(root: Path) -> None:
    """An NVMe disk with two partitions at PCI 3d:00.0, with a volume of LVM and dm-crypt upon the second."""
    disk = "sys/devices/pci0000:3a/0000:3d:00.0/nvme/nvme0/nvme0n1"
    write(
        root,
        {
            "sys/devices/pci0000:3a/0000:3d:00.0/current_link_speed": "8.0 GT/s PCIe",
            "sys/devices/pci0000:3a/0000:3d:00.0/current_link_width": "4",
            "sys/devices/pci0000:3a/0000:3d:00.0/max_link_speed": "16.0 GT/s PCIe",
            "sys/devices/pci0000:3a/0000:3d:00.0/max_link_width": "4",
            "sys/devices/pci0000:3a/0000:3d:00.0/numa_node": "1",
            "sys/devices/pci0000:3a/0000:3d:00.0/nvme/nvme0/model": "SAMSUNG MZQL2  ",
            f"{disk}/queue/scheduler": "[none] mq-deadline kyber",
            f"{disk}/queue/nr_requests": "1023",
            f"{disk}/queue/read_ahead_kb": "128",
            "sys/devices/virtual/block/dm-1/queue/read_ahead_kb": "4096",
            f"{disk}/queue/rotational": "0",
            f"{disk}/mq/0/x": "", f"{disk}/mq/1/x": "",
            f"{disk}/nvme0n1p2/partition": "2",
            "sys/devices/virtual/block/dm-1/queue/rotational": "0",
            "sys/devices/virtual/block/dm-0/queue/rotational": "0",
            "sys/devices/virtual/block/dm-0/dm/name": "luks-models",
            "sys/devices/virtual/block/dm-0/dm/uuid": "CRYPT-LUKS2-7d-luks-models",
            "sys/devices/virtual/block/dm-1/dm/name": "vg-models",
            "sys/devices/virtual/block/dm-1/dm/uuid": "LVM-x1",
            "sys/devices/virtual/block/loop3/loop/backing_file": "/srv/images/warm (deleted)",
            "sys/devices/virtual/block/loop3/loop/dio": "0",
            "sys/devices/virtual/block/loop3/queue/read_ahead_kb": "256",
            "proc/self/mountinfo": "\n".join(
                f"{number} 1 {device} / {place} rw - ext4 /dev/x rw"
                for number, device, place in (
                    (30, "259:2", "/plain"), (31, "253:1", "/volume"), (32, "7:3", "/loop"), (33, "253:1", "/srv"),
                    (34, "0:77", "/dev/shm"), (35, "9:0", "/array"), (36, "7:4", "/around"),
                )
            ),
            "sys/devices/virtual/block/md0/md/level": "raid0",
            "sys/devices/virtual/block/loop4/loop/backing_file": "/around/itself",
            "sys/dev/block/x": "",
        },
    )  # fmt: skip
    (root / disk / "device").symlink_to(root / "sys/devices/pci0000:3a/0000:3d:00.0/nvme/nvme0")
    for upper, lower in (("dm-1", "sys/devices/virtual/block/dm-0"), ("dm-0", f"{disk}/nvme0n1p2")):
        (root / f"sys/devices/virtual/block/{upper}/slaves").mkdir()
        (root / f"sys/devices/virtual/block/{upper}/slaves/lower").symlink_to(root / lower)
    (root / "sys/devices/virtual/block/md0/slaves").mkdir()
    for number in "01":
        (root / f"sys/devices/pci1/nvme/nvme{number}n9").mkdir(parents=True)
        (root / f"sys/devices/virtual/block/md0/slaves/nvme{number}n9").symlink_to(
            root / f"sys/devices/pci1/nvme/nvme{number}n9"
        )
    for device, number in (("loop3", "7:3"), ("loop4", "7:4"), ("md0", "9:0")):
        (root / "sys/dev/block" / number).symlink_to(root / "sys/devices/virtual/block" / device)
    (root / "sys/dev/block/253:1").symlink_to(root / "sys/devices/virtual/block/dm-1")
    (root / "sys/dev/block/259:2").symlink_to(root / f"{disk}/nvme0n1p2")


VOLUME = (Layer(name="dm-1", kind="LVM", detail="vg-models"), Layer(name="dm-0", kind="dm-crypt", detail="luks-models"))
LOOP = Layer(name="loop3", kind="loop", detail="/srv/images/warm (deleted)")


def below(root: Path, directory: str) -> list[Disk]:
    return list(disks_below(Path(directory), root))


@pytest.mark.parametrize(
    ("directory", "layers", "read_ahead"),
    [
        ("/plain/warm", (), ("nvme0n1", 128)),
        ("/volume/warm", VOLUME, ("dm-1", 4096)),
        ("/loop/warm", (LOOP, *VOLUME), ("loop3", 256)),
    ],
    ids=["partition", "volume", "loop"],
)
def test_the_disk_at_the_bottom_is_found_and_what_lies_upon_it(
    tmp_path: Path, directory: str, layers: tuple[Layer, ...], read_ahead: tuple[str, int]
) -> None:
    nvme(tmp_path)
    (disk,) = below(tmp_path, directory)
    assert disk.layers == layers
    assert (disk.read_ahead_of, disk.read_ahead_kb) == read_ahead
    assert (disk.name, disk.kind, disk.model, disk.scheduler) == ("nvme0n1", "nvme", "SAMSUNG MZQL2", "none")
    assert (disk.requests, disk.queues, disk.rotating) == (1023, 2, False)
    assert disk.numa_node == 1
    assert disk.link is not None and disk.link.degraded and str(disk.link) == "8 GT/s x4"


def test_each_disk_of_an_array_is_found(tmp_path: Path) -> None:
    nvme(tmp_path)
    found = below(tmp_path, "/array/warm")
    assert [disk.name for disk in found] == ["nvme0n9", "nvme1n9"]
    assert {disk.layers for disk in found} == {(Layer(name="md0", kind="raid0"),)}


def test_a_loop_device_upon_itself_and_what_is_no_disk_end(tmp_path: Path) -> None:
    nvme(tmp_path)
    (disk,) = below(tmp_path, "/around/warm")
    assert disk.kind == "loop" and len(disk.layers) < 20
    assert below(tmp_path, "/dev/shm/hot") == [], "a tmpfs"
    assert below(tmp_path, "/nowhere") == []


def test_the_numa_node_of_a_network_device_is_that_of_the_card_below_it(tmp_path: Path) -> None:
    net = tmp_path / "sys/class/net"
    write(net, {"eth5/device/numa_node": "1", "vlan7/x": "", "bond0/x": "", "lo/x": "", "old/device/numa_node": "-1"})
    (net / "bond0/lower_eth5").symlink_to(net / "eth5")
    (net / "vlan7/lower_bond0").symlink_to(net / "bond0")
    assert [numa_node_of(name, tmp_path) for name in ("eth5", "bond0", "vlan7", "lo", "old")] == [1, 1, 1, None, None]


def test_a_virtual_disk_is_not_believed_to_rotate(tmp_path: Path) -> None:
    disk = "sys/devices/pci0000:00/0000:00:02.0/virtio1/block/vda"
    write(tmp_path, {f"{disk}/queue/rotational": "1", f"{disk}/queue/scheduler": "none [mq-deadline]"})
    (tmp_path / disk / "device").symlink_to(tmp_path / "sys/devices/pci0000:00/0000:00:02.0/virtio1")
    (tmp_path / "sys/dev/block").mkdir(parents=True)
    (tmp_path / "sys/dev/block/254:0").symlink_to(tmp_path / disk)
    write(tmp_path, {"proc/self/mountinfo": "30 1 254:0 / / rw - ext4 /dev/vda rw"})
    (found,) = below(tmp_path, "/warm")
    assert (found.kind, found.rotating, found.link) == ("virtio", False, None)


def test_namespaces_regions_and_dax_mounts_are_found(tmp_path: Path) -> None:
    bus = "sys/bus/nd/devices"
    write(
        tmp_path,
        {
            f"{bus}/region0/size": str(128 << 30), f"{bus}/region0/available_size": str(64 << 30),
            f"{bus}/namespace0.0/size": str(64 << 30), f"{bus}/namespace0.0/mode": "memory",
            f"{bus}/namespace0.1/size": "0", f"{bus}/namespace0.1/mode": "raw",
            f"{bus}/pfn0.1/namespace": "namespace0.0", f"{bus}/pfn0.1/block/pmem0/size": "1",
            "proc/self/mountinfo": "50 27 259:0 / /mnt/my\\040pmem rw - ext4 /dev/pmem0 rw,dax=always",
        },
    )  # fmt: skip
    facts = pmem.look(None, tmp_path)
    assert facts.regions == (pmem.Region("region0", 128 << 30, 64 << 30),)
    assert facts.namespaces == (pmem.Namespace("namespace0.0", "fsdax", 64 << 30, "pmem0"),), "no seed"
    assert facts.places == (pmem.Place("pmem0", "/mnt/my pmem", "ext4", True),)


def test_ports_of_rdma_devices_are_found(tmp_path: Path) -> None:
    port = "sys/class/infiniband/rxe0/ports/1"
    write(
        tmp_path,
        {
            f"{port}/state": "4: ACTIVE", f"{port}/rate": "2.5 Gb/sec (1X SDR)", f"{port}/link_layer": "Ethernet",
            f"{port}/gids/0": "fe80:0000:0000:0000:5054:00ff:fe12:3456",
            f"{port}/gids/1": "0000:0000:0000:0000:0000:ffff:0a00:0001",
            f"{port}/gids/2": "0000:0000:0000:0000:0000:0000:0000:0000",
            f"{port}/gid_attrs/ndevs/0": "eth0",
        },
    )  # fmt: skip
    (found,) = rdma.look(None, tmp_path).ports
    assert (found.device, found.number, found.state, found.gids, found.network) == ("rxe0", 1, "ACTIVE", 2, "eth0")


def test_a_file_is_read_within_a_bound_and_its_speed_is_known(tmp_path: Path) -> None:
    path = tmp_path / "object"
    path.write_bytes(bytes(8 << 20))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        assert speed.read_speed(descriptor) > 1 << 20
    finally:
        os.close(descriptor)


def test_no_mounts_are_no_findings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIERFS_RUNTIME_DIR", str(tmp_path))
    assert mounted.look() == []
