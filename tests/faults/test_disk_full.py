"""The warm disk is full: others have filled it."""

from collections.abc import Callable

import pytest

from tests.faults.disk_world import MODES, DiskWorld

pytestmark = pytest.mark.fuse


@pytest.mark.parametrize("mode", MODES)
def test_a_full_disk_keeps_what_it_has_and_takes_more_later(disk_world: Callable[..., DiskWorld], mode: str) -> None:
    world = disk_world(mode=mode)
    world.remount()
    with world.disk.suffering("full"):
        world.is_right("b", "c")
        world.settled()
        warm = world.warm()
        assert warm["state"] == "degraded" and "no space left on the device" in warm["reason"]
        world.others_are_fine()
    world.keeps_again("d")
    assert world.fetched_by("d") == 0
    world.log_is_short(10)
