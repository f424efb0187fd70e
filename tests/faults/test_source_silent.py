"""The source accepts connections and answers nothing."""

from collections.abc import Callable

import pytest

from tests.faults.source_world import SourceWorld

pytestmark = pytest.mark.fuse


@pytest.mark.parametrize("mode", ["channel", "direct"])
def test_a_silent_source_is_an_errno_in_time(source_world: Callable[..., SourceWorld], mode: str) -> None:
    world = source_world(mode=mode)
    world.proxy.silence(True)
    outcome = world.read("b")
    assert outcome.what == "EIO" and 1.5 < outcome.took_s < 8
    world.others_are_fine()
    world.killed_reader_is_gone("c", within_s=1 if mode == "channel" else 8)
    assert world.said("source_down", "source_state")
    world.proxy.silence(False)
    world.heals("b", "c")
    world.log_is_short()
