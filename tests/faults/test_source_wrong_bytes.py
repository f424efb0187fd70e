"""The source, or something on the way, changes bytes."""

from collections.abc import Callable

import pytest

from tests.faults import fault_proxy
from tests.faults.source_world import SourceWorld

pytestmark = pytest.mark.fuse


@pytest.mark.parametrize("how", ["map", "read"])
def test_wrong_bytes_are_never_read(source_world: Callable[..., SourceWorld], how: str) -> None:
    world = source_world()
    world.proxy.suffer(fault_proxy.wrong_bytes)
    before = world.proxy.blocks
    if how == "read":
        outcome = world.read("b")
        assert outcome.what == "EIO" and outcome.took_s < 8
    else:
        world.gets_sigbus("b", within_s=10)
    assert world.proxy.blocks - before < 40, "it tries again a few times only"
    world.others_are_fine()
    assert 1 <= world.said("corrupt_block") <= 20
    assert world.said("block_failed") >= 1
    world.heals("b", "c")
    world.log_is_short()
