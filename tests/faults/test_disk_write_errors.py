"""The warm disk fails a tenth of its writes."""

from collections.abc import Callable

import pytest

from tests.faults.disk_world import MODES, DiskWorld

pytestmark = [pytest.mark.fuse, pytest.mark.long]


@pytest.mark.parametrize("mode", MODES)
def test_writes_that_fail_cost_nothing_but_the_tier(disk_world: Callable[..., DiskWorld], mode: str) -> None:
    world = disk_world(mode=mode)
    with world.disk.suffering("write_eio", 0.1):
        world.is_right("b", "c", "d")
        world.others_are_fine()
        world.settled()
    assert world.warm()["failed_writes"] > 0
    world.in_service()
    world.remount()
    world.is_right("b", "c", "d")  # what it says it has, it has
    world.settled()
    assert world.said("tier_device_out_of_service") <= 3
    world.log_is_short(20)
