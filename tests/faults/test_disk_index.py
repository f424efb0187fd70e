"""The index of the warm directory is lost, or older than the data."""

import shutil
from collections.abc import Callable

import pytest

from tests.faults.disk_world import DiskWorld
from tests.integration.processes import tierfs

pytestmark = [pytest.mark.fuse, pytest.mark.long]  # without a mount: test_tier_faults.py


@pytest.mark.parametrize("mode", ["channel", "direct"])
@pytest.mark.parametrize("fault", ["lost", "older"])
def test_an_index_that_does_not_fit_costs_refetches_only(
    disk_world: Callable[..., DiskWorld], mode: str, fault: str
) -> None:
    world = disk_world(mode=mode)
    world.settled()
    world.mounted.unmount()
    index = world.disk.path / "warm" / "residency.db"
    if fault == "lost":
        index.unlink()
    else:
        shutil.copy(index, index.with_name("older"))
    world.mounted.mount()
    if fault == "older":
        tierfs("warm", world.mounted.path / "b")
        tierfs("evict", world.mounted.path / "a")
        world.settled()
        world.mounted.unmount()
        index.with_name("older").rename(index)
        world.mounted.mount()
    assert world.said("tier_reconciled") == 1
    assert world.fetched_by("a", "b") > 0
    world.settled()
    world.remount()
    assert world.fetched_by("a", "b") == 0
    world.log_is_short(10)
