"""Each answer of the source takes a second."""

from collections.abc import Callable

import pytest

from tests.faults import fault_proxy
from tests.faults.source_world import RIGHT, SourceWorld

pytestmark = pytest.mark.fuse


def test_a_slow_source_is_only_time(source_world: Callable[..., SourceWorld]) -> None:
    world = source_world(timeout="10s")
    world.proxy.suffer(fault_proxy.slow)
    reader = world.start("b")
    world.others_are_fine()
    assert world.outcome("b", reader, within_s=30) == RIGHT
    world.killed_reader_is_gone("c", within_s=1)
    world.heals("c", "d")
    assert world.said("block_failed") == 0
