"""The bytes of the warm directory are not what was written there."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import BLOCK_BYTES
from tests.faults.disk_world import MODES, DiskWorld
from tests.integration.processes import drop_caches, tierfs

pytestmark = pytest.mark.fuse


def flipped(file: int) -> None:
    """One bit of the third block."""
    at = 2 * BLOCK_BYTES + 4097
    os.pwrite(file, bytes([os.pread(file, 1, at)[0] ^ 8]), at)


def swapped(file: int) -> None:
    """The first two blocks."""
    first, second = (os.pread(file, BLOCK_BYTES, at) for at in (0, BLOCK_BYTES))
    os.pwrite(file, second, 0)
    os.pwrite(file, first, BLOCK_BYTES)


def truncated(file: int) -> None:
    """All but the first block and a half."""
    os.ftruncate(file, BLOCK_BYTES * 3 // 2)


def damage(warm: Path, how: Callable[[int], None]) -> None:
    """Every object."""
    files = [*(warm / "objects").glob("*/*")]
    assert files
    for path in files:
        file = os.open(path, os.O_RDWR)
        how(file)
        os.close(file)


def long(how: Callable[[int], None]) -> Any:
    """For the long run."""
    return pytest.param(how, marks=pytest.mark.long)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", [long(flipped), swapped, long(truncated)])
def test_what_somebody_else_wrote_is_never_read(
    disk_world: Callable[..., DiskWorld], mode: str, how: Callable[[int], None]
) -> None:
    world = disk_world(mode=mode)
    world.is_right("b")
    world.remount()
    world.is_right("a", "b")  # they are open there, and in channel mode handed out
    damage(world.disk.path / "warm", how)
    assert 0 < world.fetched_by("a", "b") <= 2 * 4 * BLOCK_BYTES
    world.remount()
    world.is_right("a", "b")  # now they are kept again
    world.settled()
    damage(world.disk.path / "warm", how)
    world.remount()  # which is the first to see it
    world.is_right("a", "b")
    world.keeps("a", "b")
    world.log_is_short(40)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["channel", "direct"])
@pytest.mark.parametrize("how", [flipped, swapped, truncated])
def test_what_rotted_is_found_after_an_unclean_stop_and_by_verify(
    disk_world: Callable[..., DiskWorld], mode: str, how: Callable[[int], None]
) -> None:
    world = disk_world(mode=mode)
    world.is_right("b")
    world.settled()
    world.mounted.unmount()
    world.disk.close()
    damage(world.disk.backing / "warm", how)
    world.rebooted()
    world.disk.start()
    world.mounted.mount()
    assert 0 < world.fetched_by("a", "b") <= 2 * 4 * BLOCK_BYTES
    world.keeps("a", "b")
    damage(world.disk.backing / "warm", how)  # the disk's attributes are cached: nobody can see that it was written to
    drop_caches()
    found = tierfs("verify", world.mounted.path, check=False)
    assert found.returncode == 1 and "repaired" in found.stdout, found.stdout
    world.keeps("a", "b")
    world.log_is_short(40)
