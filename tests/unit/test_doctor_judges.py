"""What the doctor says of machines that are not here: facts in, findings out."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tierfs.app.doctor import (
    clock,
    fuse,
    limits,
    memory,
    mounted,
    passthrough,
    places,
    pmem,
    rdma,
    source,
    speed,
    storage,
    transport,
)  # fmt: skip
from tierfs.app.doctor.disks import Disk, Layer, Link
from tierfs.app.doctor.finding import Finding, Level
from tierfs.config.memory import MemoryRoom

ROOT = Path(__file__).parents[2]
GIB = 1 << 30

FUSE = fuse.FuseFacts(root=True, device="usable", known_to_kernel=True)
USER = replace(FUSE, root=False, fusermount="/bin/fusermount3", fusermount_setuid=True, user_allow_other=True)
CHANNEL = passthrough.PassthroughFacts(
    release="6.12.30-amd64", sys_admin=True, initial_user_namespace=True, program="/opt/tierfs/bin/tierfs-channel",
    mode="auto", tiers=(("/var/cache/tierfs", "ext4"),),
)  # fmt: skip
ROOM = MemoryRoom(total_bytes=64 * GIB, limit_bytes=64 * GIB, available_bytes=60 * GIB)
POD = MemoryRoom(total_bytes=64 * GIB, limit_bytes=8 * GIB, available_bytes=7 * GIB, cgroup="/sys/fs/cgroup/pod")
HOT = memory.MemoryFacts(
    room=ROOM, memory_limit_bytes=GIB, hot_bytes=32 * GIB, hot_path="/mnt/hot/t", hot_mountpoint="/mnt/hot",
    tmpfs_options=frozenset(("rw", "huge=within_size", "noswap")), shmem_huge="never", release="6.12.1",
)  # fmt: skip
REGION = pmem.Region("region0", 128 * GIB, 0)
FSDAX = pmem.Namespace("namespace0.0", "fsdax", 128 * GIB, "pmem0")
DAX = pmem.Place("pmem0", "/mnt/pmem", "ext4", True)
PMEM = pmem.PmemFacts(regions=(REGION,), namespaces=(FSDAX,), places=(DAX,), hot_path="/mnt/pmem/t", hot_kind="pmem")
PORT = rdma.Port(
    device="mlx5_0", number=1, state="ACTIVE", rate="200 Gb/sec (4X HDR)", link_layer="InfiniBand", gids=2,
    network="ib0",
)  # fmt: skip
RDMA = rdma.RdmaFacts(ports=(PORT,), usable=True, pyverbs="59.0", lockable_bytes=None)
WARM = places.Directory(
    tier="warm", path="/var/cache/tierfs", exists=True, usable=True, file_system="ext4", size_bytes=1000 * GIB,
    free_bytes=900 * GIB,
)  # fmt: skip
PLACES = places.PlaceFacts(directories=(WARM,), warm_capacity_bytes=900 * GIB)
LINK = Link(speed=16.0, width=4, speed_max=16.0, width_max=4)
NVME = Disk(
    name="nvme0n1", kind="nvme", model="SAMSUNG MZQL2", scheduler="none", requests=1023, queues=64,
    read_ahead_of="nvme0n1", read_ahead_kb=4096, link=LINK, numa_node=0,
)  # fmt: skip
DISKS = storage.StorageFacts(disks=(NVME,), networks=(("eth0", 0),), distances=((10, 21), (21, 10)))
FAST = speed.SpeedFacts(speeds=(speed.Speed(path="/w", bytes_per_s=5e9),))
SOURCE = source.SourceFacts(
    url="tierfs://h:7411/m", elapsed_s=0.003, round_trip_s=0.0005, receive_buffer_bytes=6 << 20, token=True
)
RDMA_RUNS = transport.TransportFacts(
    wanted="auto", transport="rdma", routes=("mlx5_0 port 1, GID 3 (10.0.0.1), MTU 4KiB",), mtu_bytes=4096,
    link="Ethernet",
)  # fmt: skip
TCP_RUNS = replace(RDMA_RUNS, transport="tcp", routes=(), mtu_bytes=0, link="", reason="no RDMA device has 10.0.0.1")
UP = mounted.Mounted(
    mountpoint="/models", config="/etc/tierfs.toml", pid=5, alive=True, device="0:50", read_ahead_kb=4096,
    mode="channel", passthrough=True, source_state="connected", tiers=(("warm", "ok", ""),),
)  # fmt: skip


def disks(**changes: Any) -> storage.StorageFacts:
    return replace(DISKS, disks=(replace(NVME, **changes),))


def place(**changes: Any) -> places.PlaceFacts:
    return replace(PLACES, directories=(replace(WARM, **changes),))


def port(**changes: Any) -> rdma.RdmaFacts:
    return replace(RDMA, ports=(replace(PORT, **changes),))


HEALTHY: list[tuple[Callable[[Any], list[Finding]], Any]] = [
    (fuse.judge, FUSE),
    (fuse.judge, USER),
    (passthrough.judge, CHANNEL),
    (limits.judge, limits.LimitFacts(open_files_hard=1 << 20)),
    (memory.judge, HOT),
    (memory.judge, replace(HOT, room=replace(ROOM, available_bytes=GIB), running=True)),
    (memory.judge, memory.MemoryFacts(room=ROOM)),
    (clock.judge, clock.ClockFacts(now_s=1.8e9, synchronized=True, tls=True)),
    (pmem.judge, PMEM),
    (pmem.judge, pmem.PmemFacts()),
    (rdma.judge, RDMA),
    (rdma.judge, rdma.RdmaFacts()),
    (places.judge, PLACES),
    (storage.judge, DISKS),
    (storage.judge, storage.StorageFacts()),
    (storage.judge, replace(DISKS, virtual_machine=True, route="eth0")),
    (
        storage.judge,
        disks(layers=(Layer(name="dm-0", kind="LVM", detail="vg-models"), Layer(name="md0", kind="raid0"))),
    ),
    (speed.judge, FAST),
    (source.judge, SOURCE),
    (source.judge, None),
    (source.judge, source.SourceFacts(url="dir:/srv/models")),
    (transport.judge, RDMA_RUNS),
    (transport.judge, None),
    (transport.judge, replace(TCP_RUNS, device=False)),
    (transport.judge, replace(TCP_RUNS, connected=False)),
    (transport.judge, replace(TCP_RUNS, tried=False)),
    (transport.judge, replace(TCP_RUNS, wanted="rdma", connected=False)),
    (mounted.judge, [UP]),
    (mounted.judge, [replace(UP, transport="rdma", route="mlx5_0 port 1")]),
    (mounted.judge, []),
]
SICK: list[tuple[Callable[[Any], list[Finding]], Any, str, Level, str]] = [
    (fuse.judge, replace(FUSE, device="missing"), "fuse.device", Level.PROBLEM, "--device /dev/fuse"),
    (fuse.judge, replace(FUSE, device="missing", known_to_kernel=False), "fuse.device", Level.PROBLEM, "modprobe fuse"),
    (fuse.judge, replace(USER, device="Permission denied"), "fuse.device", Level.PROBLEM, "chmod 666"),
    (fuse.judge, replace(USER, fusermount=None), "fuse.fusermount", Level.PROBLEM, "install fuse3"),
    (fuse.judge, replace(USER, fusermount_setuid=False), "fuse.fusermount", Level.PROBLEM, "chmod u+s"),
    (fuse.judge, replace(USER, user_allow_other=False), "fuse.allow_other", Level.NOTE, "/etc/fuse.conf"),
    (
        fuse.judge, replace(USER, user_allow_other=False, wants_allow_other=True),
        "fuse.allow_other", Level.PROBLEM, "mount.allow_other = false",
    ),
    (
        fuse.judge, replace(FUSE, max_request_timeout_s=60, longest_wait_s=60.0),
        "fuse.max_request_timeout", Level.PROBLEM, "fs.fuse.max_request_timeout=0",
    ),
    (
        fuse.judge, replace(FUSE, default_request_timeout_s=30),
        "fuse.default_request_timeout", Level.PROBLEM, "fs.fuse.default_request_timeout=0",
    ),
    (passthrough.judge, replace(CHANNEL, program=None), "channel.program", Level.WARNING, "pip"),
    (passthrough.judge, replace(CHANNEL, program=None, mode="channel"), "channel.program", Level.PROBLEM, "pip"),
    (passthrough.judge, replace(CHANNEL, program=None, user="models"), "channel.program", Level.PROBLEM, "pip"),
    (passthrough.judge, replace(CHANNEL, mode="direct"), "channel.program", Level.NOTE, 'mode = "auto"'),
    (passthrough.judge, replace(CHANNEL, release="6.8.0-31-generic"), "passthrough.kernel", Level.WARNING, "6.9"),
    (passthrough.judge, replace(CHANNEL, sys_admin=False), "passthrough.rights", Level.WARNING, "SYS_ADMIN"),
    (
        passthrough.judge, replace(CHANNEL, initial_user_namespace=False),
        "passthrough.rights", Level.WARNING, "mount outside",
    ),
    (
        passthrough.judge, replace(CHANNEL, tiers=(("/var/cache/tierfs", "overlay"),)),
        "passthrough.stacking", Level.WARNING, "volume",
    ),
    (limits.judge, limits.LimitFacts(open_files_hard=4096), "limits.open_files", Level.WARNING, "LimitNOFILE"),
    (limits.judge, limits.LimitFacts(open_files_hard=512), "limits.open_files", Level.PROBLEM, "LimitNOFILE"),
    (memory.judge, replace(HOT, room=POD), "memory.budget", Level.PROBLEM, "hot.capacity to at most 6.3GiB"),
    (
        memory.judge, replace(HOT, room=POD, memory_limit_bytes=9 * GIB, hot_bytes=0, tmpfs_options=None),
        "memory.budget", Level.PROBLEM, "memory.limit to at most 2GiB",
    ),
    (
        memory.judge,
        replace(HOT, room=replace(ROOM, available_bytes=16 * GIB)),
        "memory.budget",
        Level.WARNING,
        "lower hot.capacity",
    ),
    (memory.judge, replace(HOT, hot_bytes=80 * GIB), "memory.budget", Level.PROBLEM, "hot.capacity"),
    (
        memory.judge, replace(HOT, swap_bytes=GIB, tmpfs_options=frozenset(("rw", "huge=within_size"))),
        "memory.noswap", Level.WARNING, "noswap tmpfs /mnt/hot",
    ),
    (
        memory.judge, replace(HOT, swap_bytes=GIB, tmpfs_options=frozenset(), release="6.1.0-38"),
        "memory.noswap", Level.WARNING, "swapoff",
    ),
    (
        memory.judge, replace(HOT, tmpfs_options=frozenset(("rw", "noswap"))),
        "memory.huge_pages", Level.WARNING, "remount,huge=within_size /mnt/hot",
    ),
    (memory.judge, replace(HOT, shmem_huge="deny"), "memory.huge_pages", Level.WARNING, "remount"),
    (clock.judge, clock.ClockFacts(now_s=1e9, synchronized=None, tls=True), "clock.time", Level.PROBLEM, "chrony"),
    (
        clock.judge, clock.ClockFacts(now_s=1.8e9, synchronized=False, tls=True),
        "clock.synchronized", Level.WARNING, "timedatectl",
    ),
    (
        clock.judge, clock.ClockFacts(now_s=1.8e9, synchronized=False, tls=False),
        "clock.synchronized", Level.NOTE, "timedatectl",
    ),
    (
        pmem.judge, replace(PMEM, regions=(replace(REGION, available_bytes=64 * GIB),)),
        "pmem.unused", Level.WARNING, "ndctl create-namespace -m fsdax -r region0",
    ),
    (
        pmem.judge, replace(PMEM, namespaces=(replace(FSDAX, mode="devdax"),)),
        "pmem.mode", Level.NOTE, "-e namespace0.0 -m fsdax",
    ),
    (
        pmem.judge, replace(PMEM, places=(), hot_kind=""),
        "pmem.mount", Level.WARNING, "mount -o dax=always /dev/pmem0",
    ),
    (
        pmem.judge, replace(PMEM, places=(replace(DAX, dax=False),), hot_kind="ext4"),
        "pmem.dax", Level.WARNING, "umount /mnt/pmem; mount -o dax=always",
    ),
    (
        pmem.judge, replace(PMEM, library_missing="libpmemobj cannot be loaded (x): install"),
        "pmem.library", Level.WARNING, "apt-get install libpmemobj1 libpmem1",
    ),
    (pmem.judge, replace(PMEM, hot_kind="ext4"), "pmem.hot_on_disk", Level.WARNING, "tmpfs"),
    (rdma.judge, port(state="DOWN"), "rdma.link", Level.WARNING, "ip link set ib0 up"),
    (rdma.judge, port(gids=0), "rdma.address", Level.WARNING, "dev ib0"),
    (rdma.judge, replace(RDMA, usable=False), "rdma.verbs", Level.WARNING, "modprobe ib_uverbs"),
    (rdma.judge, replace(RDMA, pyverbs=""), "rdma.pyverbs", Level.WARNING, "python3-pyverbs"),
    (rdma.judge, replace(RDMA, lockable_bytes=8 << 20), "rdma.locked_memory", Level.WARNING, "LimitMEMLOCK=infinity"),
    (places.judge, place(read_only=True), "tier.directory", Level.PROBLEM, "remount,rw"),
    (places.judge, place(usable=False), "tier.directory", Level.PROBLEM, "chown"),
    (places.judge, place(file_system="nfs4"), "tier.file_system", Level.PROBLEM, "local NVMe"),
    (places.judge, place(file_system="fuse.sshfs"), "tier.file_system", Level.PROBLEM, "local NVMe"),
    (places.judge, place(file_system="tmpfs"), "tier.file_system", Level.WARNING, "hot.path"),
    (places.judge, place(file_system="overlay"), "tier.file_system", Level.WARNING, "volume"),
    (places.judge, place(file_system="btrfs"), "tier.file_system", Level.NOTE, "mkfs.ext4"),
    (places.judge, place(free_bytes=GIB), "tier.space", Level.WARNING, "lower warm.capacity"),
    (places.judge, replace(PLACES, warm_capacity_bytes=1001 * GIB), "tier.capacity", Level.WARNING, "warm.paths"),
    (storage.judge, disks(kind="scsi", rotating=True), "storage.disk", Level.WARNING, "NVMe"),
    (storage.judge, disks(kind="virtio"), "storage.disk", Level.NOTE, "VFIO"),
    (storage.judge, disks(model="Amazon Elastic Block Store"), "storage.disk", Level.WARNING, "instance store"),
    (storage.judge, disks(kind="loop"), "storage.disk", Level.WARNING, "NVMe"),
    (storage.judge, disks(model="QEMU NVMe Ctrl"), "storage.disk", Level.NOTE, "vfio-pci"),
    (storage.judge, disks(kind="scsi", model="QEMU HARDDISK", rotating=True), "storage.disk", Level.NOTE, "vfio-pci"),
    (
        storage.judge, disks(layers=(Layer(name="loop3", kind="loop", detail="/srv/image"),)),
        "storage.layers", Level.WARNING, "losetup --direct-io=on /dev/loop3",
    ),
    (
        storage.judge, disks(layers=(Layer(name="dm-4", kind="dm-crypt", detail="luks-a"),)),
        "storage.layers", Level.NOTE, "cryptsetup refresh --perf-no_read_workqueue --perf-no_write_workqueue luks-a",
    ),
    (storage.judge, disks(scheduler="mq-deadline"), "storage.scheduler", Level.NOTE, "echo none > /sys/block/nvme0n1"),
    (storage.judge, disks(requests=8), "storage.queue", Level.NOTE, "nr_requests"),
    (storage.judge, disks(read_ahead_kb=128), "storage.read_ahead", Level.WARNING, "read_ahead_kb"),
    (storage.judge, disks(link=replace(LINK, width=2)), "storage.link", Level.WARNING, "lspci"),
    (storage.judge, disks(link=replace(LINK, speed=8.0)), "storage.link", Level.WARNING, "lspci"),
    (storage.judge, disks(numa_node=1), "storage.numa", Level.NOTE, "--cpunodebind=1"),
    (
        speed.judge, speed.SpeedFacts(speeds=(speed.Speed(path="/w", bytes_per_s=2e8),)),
        "speed.warm", Level.WARNING, "warm.paths",
    ),
    (
        speed.judge, speed.SpeedFacts(speeds=(speed.Speed(path="/w", reason="no object"),)),
        "speed.warm", Level.NOTE, "",
    ),
    (source.judge, replace(SOURCE, trouble="refused", kind="unreachable"), "source.reachable", Level.PROBLEM, "serve"),
    (source.judge, replace(SOURCE, trouble="bad", kind="token"), "source.token", Level.PROBLEM, "token_file"),
    (source.judge, replace(SOURCE, trouble="none", kind="export"), "source.export", Level.PROBLEM, "[exports.NAME]"),
    (source.judge, replace(SOURCE, trouble="TLS", kind="other"), "source.reachable", Level.PROBLEM, "source.tls"),
    (
        source.judge, source.SourceFacts(url="dir:/x", trouble="/x is empty", kind="unreachable"),
        "source.reachable", Level.PROBLEM, "mount what should be there",
    ),
    (source.judge, replace(SOURCE, round_trip_s=0.02), "source.receive_buffer", Level.NOTE, "tcp_rmem"),
    (source.judge, replace(SOURCE, round_trip_s=0.2), "source.receive_buffer", Level.WARNING, "tcp_rmem"),
    (transport.judge, TCP_RUNS, "source.transport", Level.WARNING, "source.url"),
    (transport.judge, replace(TCP_RUNS, device=False), "source.transport", Level.NOTE, "docs/RDMA.md"),
    (transport.judge, replace(TCP_RUNS, wanted="rdma"), "source.transport", Level.PROBLEM, '"auto"'),
    (transport.judge, replace(RDMA_RUNS, mtu_bytes=1024), "rdma.mtu", Level.NOTE, "mtu 4200"),
    (
        mounted.judge, [replace(UP, transport="rdma", transport_reason="gone")],
        "mount.transport", Level.WARNING, '"auto"',
    ),
    (mounted.judge, [replace(UP, alive=False)], "mount.dead", Level.PROBLEM, "tierfs mount /etc/tierfs.toml /models"),
    (mounted.judge, [replace(UP, trouble="did not answer")], "mount.silent", Level.PROBLEM, "tierfs restart /models"),
    (mounted.judge, [replace(UP, read_ahead_kb=128)], "mount.read_ahead", Level.WARNING, "bdi/0:50/read_ahead_kb"),
    (
        mounted.judge, [replace(UP, passthrough=False, passthrough_reason="old")],
        "mount.passthrough", Level.WARNING, "passthrough",
    ),
    (mounted.judge, [replace(UP, source_state="down")], "mount.source", Level.PROBLEM, "source"),
    (mounted.judge, [replace(UP, tiers=(("warm", "degraded", "full"),))], "mount.tier", Level.PROBLEM, "reason"),
]  # fmt: skip


@pytest.mark.parametrize(("judge", "facts"), HEALTHY)
def test_a_machine_where_all_is_well_gets_no_warning(judge: Callable[[Any], list[Finding]], facts: Any) -> None:
    bad = [finding for finding in judge(facts) if finding.level in (Level.WARNING, Level.PROBLEM)]
    assert not bad


@pytest.mark.parametrize(("judge", "facts", "name", "level", "mend"), SICK)
def test_what_is_wrong_is_found_with_what_mends_it(
    judge: Callable[[Any], list[Finding]], facts: Any, name: str, level: Level, mend: str
) -> None:
    found = judge(facts)
    (finding,) = [one for one in found if one.name == name and one.level is level] or pytest.fail(f"only {found}")
    assert mend in finding.mend


def test_every_finding_that_is_not_well_says_why_and_what_to_do_in_one_line_each() -> None:
    for judge, facts, *_ in SICK:
        for finding in judge(facts):
            assert not {"\n", "\r"} & set(finding.what + finding.why + finding.mend)
            if finding.level in (Level.WARNING, Level.PROBLEM):
                assert finding.what and finding.why and finding.mend, finding


def test_each_finding_that_can_be_anything_but_well_has_a_case_here() -> None:
    tried = {name for _, _, name, _, _ in SICK} | {"configuration.valid", "doctor.no_answer"}
    assert named() - tried <= {"passthrough.possible", "pmem.none", "pmem.hot", "rdma.none", "mount.answers"}


def test_the_page_lists_every_finding_and_no_other() -> None:
    page = (ROOT / "docs/DOCTOR.md").read_text()
    listed = set(re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \|", page, re.MULTILINE))
    assert listed == named()


@pytest.mark.parametrize(
    ("changes", "possible"), [({}, True), ({"release": "6.1.0"}, False), ({"sys_admin": False}, False),
                              ({"program": None}, False), ({"mode": "direct"}, False)]
)  # fmt: skip
def test_passthrough_is_possible_only_where_nothing_is_missing(changes: dict[str, Any], possible: bool) -> None:
    names = {finding.name for finding in passthrough.judge(replace(CHANNEL, **changes))}
    assert ("passthrough.possible" in names) is possible


@pytest.mark.parametrize(
    ("release", "version"),
    [("6.12.30-amd64", (6, 12)), ("6.9.0", (6, 9)), ("5.10.0-34", (5, 10)), ("odd", (0, 0))],
)
def test_versions_are_compared_as_numbers(release: str, version: tuple[int, int]) -> None:
    assert passthrough.version_of(release) == version


def test_a_disk_that_is_well_has_a_finding_for_each_thing_that_was_looked_at() -> None:
    found = {finding.name: finding for finding in storage.judge(replace(DISKS, virtual_machine=True, route="eth0"))}
    assert set(found) == {f"storage.{name}" for name in ("disk", "scheduler", "queue", "read_ahead", "link", "numa")}
    assert {finding.level for finding in found.values()} == {Level.OK}
    assert "passed through" in found["storage.disk"].what
    assert "eth0, by which the source is reached" in found["storage.numa"].what


def test_only_the_network_on_the_way_to_the_source_counts_as_far() -> None:
    two = replace(DISKS, networks=(("eth0", 0), ("ib0", 1)))
    (either,) = [finding for finding in storage.judge(two) if finding.name == "storage.numa"]
    (near,) = [finding for finding in storage.judge(replace(two, route="eth0")) if finding.name == "storage.numa"]
    (far,) = [finding for finding in storage.judge(replace(two, route="ib0")) if finding.name == "storage.numa"]
    assert (either.level, near.level, far.level) == (Level.NOTE, Level.OK, Level.NOTE)
    assert "ib0 (node 1, distance 21)" in far.what and "eth0" not in far.what
    assert not [one for one in storage.judge(replace(two, route="lo")) if one.name == "storage.numa"]


def test_what_the_disks_of_an_array_share_is_told_once_and_of_the_uppermost_device() -> None:
    array = (Layer(name="md0", kind="raid0"),)
    both = tuple(
        replace(NVME, name=name, read_ahead_of="md0", read_ahead_kb=128, layers=array)
        for name in ("nvme0n1", "nvme1n1")
    )
    found = storage.judge(replace(DISKS, disks=both))
    (read_ahead,) = [finding for finding in found if finding.name == "storage.read_ahead"]
    assert "/sys/block/md0/queue/read_ahead_kb" in read_ahead.mend
    layers = [finding.what for finding in found if finding.name == "storage.layers"]
    assert [what.partition(" lies")[0] for what in layers] == ["md0 (raid0) upon nvme0n1", "md0 (raid0) upon nvme1n1"]


def test_the_load_of_the_largest_model_is_told_with_the_speed() -> None:
    (quick,) = speed.judge(FAST, largest_model_bytes=10 * GIB)
    (long,) = speed.judge(FAST, largest_model_bytes=1000 * GIB)
    assert quick.level is Level.OK and "10GiB" in quick.what and "2.15s" in quick.what
    assert long.level is Level.WARNING


def named() -> set[str]:
    """Every name of a finding that the doctor's code has."""
    subjects = (
        "configuration|doctor|fuse|channel|passthrough|limits|memory|clock|pmem|rdma|tier|storage|speed|source|mount"
    )
    files: Sequence[Path] = sorted((ROOT / "tierfs/app/doctor").glob("*.py"))
    found = {name for file in files for name in re.findall(rf'"((?:{subjects})\.[a-z_]+)"', file.read_text())}
    return found - {"fuse.tierfs", "memory.limit"}  # the file system, a key
