"""The warm disk answers nothing for a while."""

import time
from collections.abc import Callable

import pytest

from tests.faults.disk_world import DiskWorld
from tests.integration.processes import eventually

pytestmark = pytest.mark.fuse


@pytest.mark.parametrize("mode", ["channel", "direct"])
def test_a_stalled_disk_is_set_aside_and_read_around(disk_world: Callable[..., DiskWorld], mode: str) -> None:
    world = disk_world(mode=mode, timeout="10s")
    world.is_right("b")
    world.remount()
    world.disk.suffer("stall")
    began_s = time.monotonic()
    first = world.read("a", within_s=20)
    assert first.what == "right" and first.took_s < 12, first
    assert world.warm()["state"] == "failed" and "no answer" in world.warm()["reason"]
    assert time.monotonic() - began_s < 14
    world.is_right("b", "c", within_s=4)  # nobody waits for it again
    world.disk.suffer("stall", 0)
    world.in_service()
    world.is_right("a", "b", "c", "d", within_s=4)
    assert world.said("tier_device_out_of_service") == 1
    assert world.said("tier_device_in_service") == 1
    world.log_is_short(10)
    eventually(lambda: world.warm()["queued_bytes"] == 0, "what waited for the disk is let go")
