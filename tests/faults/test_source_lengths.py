"""Blocks end early or have more bytes than they should."""

from collections.abc import Callable

import pytest

from tests.faults import fault_proxy
from tests.faults.fault_proxy import Fault
from tests.faults.source_world import SourceWorld

pytestmark = pytest.mark.fuse

FAULTS = [
    fault_proxy.short,
    pytest.param(fault_proxy.long, marks=pytest.mark.long),
    pytest.param(fault_proxy.short_of_its_header, marks=pytest.mark.long),
    fault_proxy.longer_than_its_header,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_blocks_of_another_length_are_an_errno_in_time(source_world: Callable[..., SourceWorld], fault: Fault) -> None:
    world = source_world()
    world.proxy.suffer(fault)
    before = world.proxy.blocks
    outcome = world.read("b")
    # More bytes than the header says spoil the next frame only: what came before it is whole.
    assert outcome.what == "EIO" or fault is fault_proxy.longer_than_its_header
    assert outcome.took_s < 10
    assert world.proxy.blocks - before < 100
    world.others_are_fine()
    world.heals("b", "c")
    world.log_is_short()
