"""Somebody removes the warm directory under the daemon."""

import shutil
from collections.abc import Callable

import pytest

from tests.faults.disk_world import MODES, DiskWorld

pytestmark = pytest.mark.fuse


@pytest.mark.parametrize("mode", MODES)
def test_a_removed_directory_is_made_anew(disk_world: Callable[..., DiskWorld], mode: str) -> None:
    world = disk_world(mode=mode)
    world.remount()
    shutil.rmtree(world.disk.path / "warm")
    world.is_right("a", "b", within_s=12)
    world.in_service()
    world.is_right("c", "d")
    world.settled()
    world.remount()
    assert world.fetched_by("c", "d") == 0
    assert world.said("tier_device_out_of_service") == world.said("tier_device_in_service") == 1
    world.log_is_short(20)
