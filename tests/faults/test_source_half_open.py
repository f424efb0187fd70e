"""Connections go nowhere any more without a word, as after a reboot of a firewall; new ones are fine."""

import time
from collections.abc import Callable

import pytest

from tests.faults.source_world import RIGHT, SourceWorld

pytestmark = pytest.mark.fuse


def test_half_open_connections_are_only_time(source_world: Callable[..., SourceWorld]) -> None:
    world = source_world(timeout="8s")
    world.proxy.half_open()
    reader = world.start("b")
    world.others_are_fine()
    assert world.outcome("b", reader, within_s=20) == RIGHT
    world.heals("c", "d")
    assert world.said("block_failed") == 0


@pytest.mark.long
def test_connections_that_die_again_and_again_end_in_an_errno_in_time(
    source_world: Callable[..., SourceWorld],
) -> None:
    world = source_world()
    world.proxy.half_open()
    reader = world.start("b")
    started_s = time.monotonic()
    while reader.poll() is None and time.monotonic() - started_s < 15:
        world.proxy.half_open()
        time.sleep(0.05)
    assert world.outcome("b", reader, within_s=1) in (RIGHT, "EIO")
    world.others_are_fine()
    world.heals("b", "c")
