"""A hot tier on what is no persistent memory works, and `status` says what it is: a tmpfs, a disk, a place that is not
there (its device is not mounted). On a DAX file system: tests/vm.
"""

import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.processes import Mount, tierfs

pytestmark = pytest.mark.fuse

NO_DAX = "no DAX file system: files cannot be mapped MAP_SYNC here"


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, Path]]:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", memory], check=True)
    yield {"tmpfs": memory / "hot", "disk": disk / "hot", "not there": tmp_path / "mnt" / "pmem" / "hot"}
    subprocess.run(["umount", "-l", memory], check=True)


@pytest.mark.parametrize(
    ("where", "medium", "residency", "reason"),
    [
        ("tmpfs", "tmpfs (volatile)", "none", "nothing outlives the machine"),
        ("disk", "directory", "sqlite", NO_DAX),
        ("not there", "directory", "sqlite", NO_DAX),
    ],
)
def test_status_says_what_the_hot_tier_is(
    where: str, medium: str, residency: str, reason: str, places: dict[str, Path], tmp_path: Path,
    mount: Callable[..., Mount],
) -> None:  # fmt: skip
    content = random.Random(1).randbytes(5 << 20)
    (tmp_path / "source" / "m").mkdir(parents=True)
    (tmp_path / "source" / "m" / "weights.bin").write_bytes(content)
    mounted = mount(f"dir:{tmp_path / 'source'}", hot=f'path = "{places[where]}"\ncapacity = "32MiB"')
    tierfs("warm", mounted.path / "m", "--tier", "hot")
    hot = mounted.status()["tiers"]["hot"]
    assert (hot["medium"], hot["residency"], hot["state"]) == (medium, residency, "ok")
    assert reason in hot["residency_reason"]
    shown = tierfs("status", mounted.path).stdout
    assert f"({medium}, residency: {residency})" in shown
    assert f"no pool: {hot['residency_reason']}" in shown
    assert ("hot_tier_on_disk" in mounted.log()) == (medium == "directory")
    assert (mounted.path / "m" / "weights.bin").read_bytes() == content
    mounted.unmount()
    mounted.mount()  # what the next daemon finds is what status said
    kept = mounted.status()["tiers"]["hot"]["objects"]
    assert kept == (0 if residency == "none" else 1)
