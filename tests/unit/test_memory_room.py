"""How much memory a process has: file trees of both versions of cgroups, and what follows for a configuration."""

from pathlib import Path

import pytest

from tierfs.config.memory import MemoryRoom, default_memory_limit, memory_room, overcommitted

MIB, GIB = 1 << 20, 1 << 30
UNLIMITED = "9223372036854771712"


def machine(root: Path, cgroup: str, *mounts: str) -> Path:
    """A tree with the /proc of a machine with 64 GiB, 48 of them to spare."""
    proc = root / "proc/self"
    proc.mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {48 << 20} kB\n")
    (proc / "cgroup").write_text(cgroup)
    (proc / "mountinfo").write_text("".join(f"{line}\n" for line in mounts))
    return root


def v2(root: Path, path: str, **files: str) -> None:
    directory = root / "sys/fs/cgroup" / path
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / f"memory.{name}").write_text(text + "\n")


def v1(root: Path, path: str, limit: str, usage: int, stat: str = "") -> None:
    directory = root / "sys/fs/cgroup/memory" / path
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.limit_in_bytes").write_text(limit)
    (directory / "memory.usage_in_bytes").write_text(str(usage))
    (directory / "memory.stat").write_text(stat)


V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


def test_without_cgroups_it_is_the_machine(tmp_path: Path) -> None:
    room = memory_room(root=machine(tmp_path, ""))
    assert room == MemoryRoom(total_bytes=64 * GIB, limit_bytes=64 * GIB, available_bytes=48 * GIB)
    assert room.owner == "the machine"


def test_the_smallest_limit_of_all_ancestors_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/kubepods/pod1/box\n", V2_MOUNT)
    v2(root, "kubepods/pod1/box", max="max", current=str(GIB), stat="")
    v2(root, "kubepods/pod1", max=str(8 * GIB), current=str(2 * GIB), stat=f"inactive_file {GIB}\nactive_file 0")
    v2(root, "kubepods", max=str(32 * GIB), current=str(30 * GIB), stat="inactive_file 0")
    room = memory_room(root=root)
    assert room.limit_bytes == 8 * GIB
    assert room.cgroup == "/sys/fs/cgroup/kubepods/pod1"
    assert room.available_bytes == 2 * GIB, "what the fullest of them has left; dropped page cache counts as room"


def test_memory_high_is_a_limit_too(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/a\n", V2_MOUNT)
    v2(root, "a", max=str(8 * GIB), high=str(4 * GIB), current="0")
    assert memory_room(root=root).limit_bytes == 4 * GIB


def test_version_1_and_its_hierarchical_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/\n", V1_MOUNT)
    v1(root, "a/b", UNLIMITED, 3 * GIB, f"total_inactive_file {GIB}\nhierarchical_memory_limit {6 * GIB}\n")
    v1(root, "a", str(6 * GIB), 3 * GIB, f"total_active_file {GIB}\n")
    v1(root, ".", UNLIMITED, 10 * GIB)
    room = memory_room(root=root)
    assert room.limit_bytes == 6 * GIB
    assert room.available_bytes == 4 * GIB


@pytest.mark.parametrize("path", ["/docker/abc", "/../other", "/"])
def test_a_container_sees_its_own_cgroup_at_the_root_of_the_mount(tmp_path: Path, path: str) -> None:
    mount = "31 23 0:28 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
    root = machine(tmp_path, f"0::{path}\n", mount)
    v2(root, "", max=str(2 * GIB), current=str(GIB))
    assert memory_room(root=root).limit_bytes == 2 * GIB


def test_a_limit_above_the_machine_is_none(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/a\n", V2_MOUNT)
    v2(root, "a", max=str(640 * GIB), current="0")
    room = memory_room(root=root)
    assert (room.limit_bytes, room.cgroup) == (64 * GIB, "")


def test_this_machine_can_be_read() -> None:
    room = memory_room()
    assert 0 < room.limit_bytes <= room.total_bytes
    assert 0 < room.available_bytes <= room.total_bytes


@pytest.mark.parametrize(
    ("limit_bytes", "least_bytes", "default_bytes"),
    [
        (64 * GIB, 64 * MIB, GIB),
        (2 * GIB, 64 * MIB, 512 * MIB),
        (1001 * MIB, 64 * MIB, 250 * MIB),
        (128 * MIB, 64 * MIB, 64 * MIB),
        (64 * GIB, 1024 * MIB, GIB),
    ],
)
def test_the_default_of_memory_limit_is_a_quarter_of_a_small_machine(
    limit_bytes: int, least_bytes: int, default_bytes: int
) -> None:
    room = MemoryRoom(total_bytes=64 * GIB, limit_bytes=limit_bytes, available_bytes=0)
    assert default_memory_limit(room, least_bytes) == default_bytes


def test_what_does_not_fit_is_told_with_the_sizes_that_would() -> None:
    pod = MemoryRoom(total_bytes=64 * GIB, limit_bytes=8 * GIB, available_bytes=8 * GIB, cgroup="/sys/fs/cgroup/pod")
    assert overcommitted(pod, memory_limit_bytes=GIB, hot_bytes=7 * GIB) is None
    note = str(overcommitted(pod, memory_limit_bytes=GIB, hot_bytes=8 * GIB))
    assert "may take 9GiB, but the cgroup /sys/fs/cgroup/pod has 8GiB" in note
    assert "hot.capacity to at most 6.3GiB" in note and "MemoryMax=" in note
    alone = str(overcommitted(MemoryRoom(8 * GIB, 8 * GIB, GIB), memory_limit_bytes=9 * GIB, hot_bytes=0))
    assert "the machine has 8GiB" in alone and "MemoryMax=" not in alone and "memory.limit to at most 2GiB" in alone
