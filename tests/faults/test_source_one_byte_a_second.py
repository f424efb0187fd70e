"""Blocks come with one byte a second: there is progress, and no end."""

from collections.abc import Callable

import pytest

from tests.faults import fault_proxy
from tests.faults.source_world import SourceWorld

pytestmark = pytest.mark.fuse


@pytest.mark.parametrize("mode", ["channel", pytest.param("direct", marks=pytest.mark.long)])
def test_one_byte_a_second_is_an_errno_in_time(source_world: Callable[..., SourceWorld], mode: str) -> None:
    world = source_world(mode=mode)
    world.proxy.suffer(fault_proxy.trickle)
    outcome = world.read("b")
    assert outcome.what == "EIO" and outcome.took_s < 10
    world.others_are_fine()
    world.killed_reader_is_gone("c", within_s=1 if mode == "channel" else 8)
    assert 1 <= world.said("block_failed") <= 10
    world.heals("b", "c")
    world.log_is_short()
