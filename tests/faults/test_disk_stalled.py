"""The warm disk answers nothing for a while."""

import time
from collections.abc import Callable

import pytest

from tests.faults.disk_world import MODES, DiskWorld
from tests.integration.processes import eventually

pytestmark = pytest.mark.fuse


@pytest.mark.parametrize("mode", MODES)
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


def test_a_copy_that_waits_for_a_stalled_disk_is_given_up_and_costs_nothing(
    disk_world: Callable[..., DiskWorld],
) -> None:
    world = disk_world(mode="channel", timeout="10s")
    world.has_beginning("b")
    world.remount()
    world.page_is_right("b", 5 << 20)  # the channel has the file now
    world.page_is_right("b", 5 << 20)  # and the daemon its attributes: as on a local disk, it does not wait for them
    world.disk.suffer("stall")
    began_s = time.monotonic()
    world.page_is_right("b", 6 << 20)
    assert time.monotonic() - began_s < 14
    assert world.warm()["state"] == "failed" and "no answer" in world.warm()["reason"]
    assert world.said("channel_read_failed") > 0
    world.disk.suffer("stall", 0)
    world.in_service()
    assert world.warm()["failed_reads"] == world.warm()["corrupt_blocks"] == 0
    assert world.said("tier_device_out_of_service") == world.said("tier_device_in_service") == 1
    world.log_is_short(5)
