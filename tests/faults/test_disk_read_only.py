"""The warm disk turned read-only, as ext4 does after an error."""

from collections.abc import Callable

import pytest

from tests.faults.disk_world import MODES, DiskWorld
from tests.integration.processes import eventually

pytestmark = pytest.mark.fuse


@pytest.mark.parametrize("mode", MODES)
def test_a_read_only_disk_is_read_and_written_again_later(disk_world: Callable[..., DiskWorld], mode: str) -> None:
    world = disk_world(mode=mode)
    world.remount()
    with world.disk.suffering("read_only"):
        assert world.fetched_by("a") == 0  # opened for the first time since the start
        world.is_right("b", "c")
        world.settled()
        eventually(lambda: "Read-only" in world.warm()["reason"], "the reason is known")
        assert world.warm()["state"] == "degraded"
        world.others_are_fine()
    world.keeps_again("d")
    assert world.fetched_by("a", "d") == 0
    world.log_is_short(10)
