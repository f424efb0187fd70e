"""Readers, and the mount itself, end while the warm disk answers nothing."""

from collections.abc import Callable

import pytest

from tests.faults.disk_world import MODES, DiskWorld
from tests.integration.processes import drop_caches, eventually, runs

pytestmark = pytest.mark.fuse

# Of both processes: 8 that read, 4 that write and 1 that looks in the daemon; and copiers, one more each half second.
THREADS = 40


@pytest.mark.parametrize("mode", MODES)
def test_readers_and_the_mount_end_on_a_disk_that_answers_nothing(
    disk_world: Callable[..., DiskWorld], mode: str
) -> None:
    world = disk_world(mode=mode, timeout="10s")
    world.has_beginning("b")  # which is never handed out whole
    world.remount()
    world.is_right("a")
    drop_caches()
    before = world.threads()
    world.disk.suffer("stall")
    if mode == "channel":
        world.killed_reader_is_gone("a", within_s=3)  # the kernel reads it from the disk by itself
    world.killed_reader_is_gone("b", within_s=3 if mode == "channel" else 12)
    readers = [world.start("b") for _ in range(8)]
    for reader in readers:
        assert world.outcome("b", reader, 25) == "right"
        assert world.threads() <= before + THREADS
    assert world.warm()["state"] == "failed"
    assert world.said("tier_device_out_of_service") == 1
    world.log_is_short(20)
    world.mounted.unmount()
    for pid in filter(None, (world.mounted.pid, world.mounted.channel_pid)):
        eventually(lambda pid=pid: not runs(pid), "the mount is gone")
    world.disk.suffer("stall", 0)
    world.mounted.mount()
    assert world.fetched_by("a") == 0  # a disk that does not answer costs nothing that is on it
