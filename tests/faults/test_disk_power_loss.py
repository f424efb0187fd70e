"""The machine loses power while the warm directory is being filled: what was not synced is gone."""

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.faults.conftest import BLOCK_BYTES
from tests.faults.disk_world import MODES, DiskWorld
from tests.integration.processes import eventually, runs

pytestmark = pytest.mark.fuse

LOST = [0.5, pytest.param(1, marks=pytest.mark.long)]  # the data alone; the index, too


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lost", LOST)
def test_what_was_written_and_not_synced_is_not_resident(
    disk_world: Callable[..., DiskWorld], mode: str, lost: float
) -> None:
    world = disk_world(mode=mode)
    world.remount()  # that a is in warm is durable from here on
    world.disk.suffer("stall_sync")
    world.is_right("b", "c", "d")
    eventually(lambda: written_bytes(world) > 4 * BLOCK_BYTES, "more than what was there is on the disk")
    loses_power(world, lost)
    world.disk.suffer("stall_sync", 0)
    world.mounted.mount()
    assert world.fetched_by("a") == 0
    assert world.fetched_by("b", "c", "d") >= 3 * 12 << 20
    comes_back(world)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["channel", "direct"])
@pytest.mark.parametrize("lost", [0.5, 1])
@pytest.mark.parametrize("after_s", [0.1, 0.3, 0.6, 1.0])
def test_power_loss_while_filling_leaves_no_wrong_byte(
    disk_world: Callable[..., DiskWorld], mode: str, lost: float, after_s: float
) -> None:
    world = disk_world(mode=mode)
    world.remount()
    readers = [world.start(model) for model in "bcd"]
    time.sleep(after_s)
    loses_power(world, lost)
    for reader in readers:
        reader.kill()
        reader.communicate(timeout=10)
    world.mounted.mount()
    assert world.fetched_by("a") == 0
    comes_back(world)


def written_bytes(world: DiskWorld) -> int:
    """What the objects take on the disk."""
    return sum(path.stat().st_blocks * 512 for path in (world.disk.backing / "warm" / "objects").glob("*/*"))


def loses_power(world: DiskWorld, lost: float) -> None:
    """Every process is gone at once, and what the disk had not been told to keep."""
    pids = [*filter(None, (world.mounted.channel_pid, world.mounted.pid))]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not any(map(runs, pids)), "the daemon is gone")
    world.disk.suffer("lose", lost)
    world.mounted.cleanup()
    world.disk.close()
    world.rebooted()
    world.disk.start()


def comes_back(world: DiskWorld) -> None:
    """A row is there only where its bytes are, and all is kept again."""
    world.is_right("a", "b", "c", "d")
    assert world.warm()["corrupt_blocks"] == 0
    world.log_is_short(10)
    world.remount()
    assert world.fetched_by("a", "b", "c", "d") == 0
