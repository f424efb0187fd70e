"""The machine loses power while the warm directory is being filled: what was not synced is gone."""

import os
import signal
from collections.abc import Callable

import pytest

from tests.faults.disk_world import DiskWorld
from tests.integration.processes import eventually, runs

pytestmark = pytest.mark.fuse


@pytest.mark.parametrize("mode", ["channel", "direct"])
def test_power_loss_while_filling_leaves_no_wrong_byte(disk_world: Callable[..., DiskWorld], mode: str) -> None:
    world = disk_world(mode=mode)
    readers = [world.start(model) for model in "bcd"]
    eventually(lambda: world.warm()["written_blocks"] > 5, "some of it is written")
    for pid in filter(None, (world.mounted.channel_pid, world.mounted.pid)):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not runs(world.mounted.pid), "the daemon is gone")
    world.disk.suffer("lose")
    for reader in readers:
        reader.kill()
        reader.communicate(timeout=10)
    world.mounted.cleanup()
    world.disk.close()
    world.disk.start()
    world.rebooted()
    world.mounted.mount()
    assert world.fetched_by("a") == 0
    world.is_right("b", "c", "d")
    assert world.warm()["corrupt_blocks"] == 0  # a row is there only where its bytes are
    world.log_is_short(10)
