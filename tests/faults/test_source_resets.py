"""Connections are reset in the middle of a block."""

from collections.abc import Callable

import pytest

from tests.faults import fault_proxy
from tests.faults.source_world import SourceWorld

pytestmark = pytest.mark.fuse


def test_resets_in_the_middle_of_a_block_are_an_errno_in_time(source_world: Callable[..., SourceWorld]) -> None:
    world = source_world()
    world.proxy.suffer(fault_proxy.reset)
    before = world.proxy.connections
    outcome = world.read("b")
    assert outcome.what == "EIO" and outcome.took_s < 8
    assert 1 < world.proxy.connections - before < 100, "it tries again, and not in a busy loop"
    world.others_are_fine()
    world.killed_reader_is_gone("c", within_s=1)
    world.heals("b", "c")
    world.log_is_short()
