"""The warm disk fails a tenth of its reads."""

from collections.abc import Callable

import pytest

from tests.faults.disk_world import MODES, DiskWorld
from tests.integration.processes import eventually, tierfs

pytestmark = pytest.mark.fuse


@pytest.mark.parametrize("mode", MODES)
def test_reads_that_fail_are_answered_by_the_source(disk_world: Callable[..., DiskWorld], mode: str) -> None:
    world = disk_world(mode=mode)
    tierfs("warm", world.mounted.path / "b")
    world.remount()
    with world.disk.suffering("read_eio", 0.1):
        for model in "abc":
            first = world.read(model).what
            # What the kernel was handed whole it reads by itself: the error is that reader's, and the last one's.
            assert first == "right" or (mode == "channel" and first == "EIO")
            eventually(lambda model=model: world.read(model).what == "right", "the next open is served from below", 10)
    warm = world.warm()
    assert warm["failed_reads"] > 0
    assert world.said("unreadable_block_dropped", "object_quarantined") <= 2 * 8
    world.in_service()
    world.is_right("a", "b", "c", "d")
    world.log_is_short(20)
