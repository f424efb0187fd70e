"""The source refuses connections, for long and for short."""

from collections.abc import Callable

import pytest

from tests.faults.source_world import RIGHT, SourceWorld

pytestmark = pytest.mark.fuse


def test_a_source_that_is_down_is_an_errno_in_time(source_world: Callable[..., SourceWorld]) -> None:
    world = source_world()
    world.proxy.down()
    outcome = world.read("b")
    assert outcome.what == "EIO" and 1.5 < outcome.took_s < 8
    assert world.read("b").what == "EIO"
    world.others_are_fine()
    world.killed_reader_is_gone("c", within_s=1)
    assert 1 <= world.said("source_down") <= 2
    assert 1 <= world.said("block_failed") <= 10
    world.proxy.up()
    world.heals("b", "c")
    world.log_is_short()


@pytest.mark.parametrize("mode", ["channel", "direct"])
@pytest.mark.parametrize("how", ["map", "read"])
def test_a_short_outage_is_only_time(source_world: Callable[..., SourceWorld], mode: str, how: str) -> None:
    world = source_world(mode=mode, timeout="15s")
    world.proxy.down()
    readers = {model: world.start(model, how) for model in "bcd"}
    world.others_are_fine()
    world.proxy.up()
    for model, reader in readers.items():
        assert world.outcome(model, reader, within_s=30) == RIGHT
    assert world.said("block_failed") == 0
