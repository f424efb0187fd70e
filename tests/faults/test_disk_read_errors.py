"""The warm disk fails a tenth of its reads."""

from collections.abc import Callable

import pytest

from tests.faults.disk_world import DiskWorld
from tests.integration.processes import tierfs

pytestmark = pytest.mark.fuse


@pytest.mark.parametrize("mode", ["direct"])
def test_reads_that_fail_are_answered_by_the_source(disk_world: Callable[..., DiskWorld], mode: str) -> None:
    world = disk_world(mode=mode)
    tierfs("warm", world.mounted.path / "b")
    world.remount()
    with world.disk.suffering("read_eio", 0.1):
        world.is_right("a", "b", "c")
    warm = world.warm()
    assert warm["failed_reads"] > 0
    assert world.said("unreadable_block_dropped", "object_quarantined") <= 2 * 8
    world.in_service()
    world.is_right("a", "b", "c", "d")
    world.log_is_short(20)
