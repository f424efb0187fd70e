"""Everything stands still for twenty seconds, as a suspended or migrated virtual machine does."""

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.faults.source_world import RIGHT, SourceWorld
from tests.integration.processes import drop_caches

pytestmark = [pytest.mark.fuse, pytest.mark.slow]

STOPPED_S = 20.0


@pytest.mark.parametrize("mode", ["channel", pytest.param("direct", marks=pytest.mark.long)])
def test_a_daemon_that_stood_still_goes_on(source_world: Callable[..., SourceWorld], mode: str) -> None:
    world = source_world(mode=mode, timeout="8s")
    first = world.mounted.status()["daemon"]["pid"]
    held = world.hold("a", "map")
    os.kill(world.mounted.pid, signal.SIGSTOP)
    try:
        readers = {model: world.start(model) for model in "bc"}
        time.sleep(STOPPED_S / 2)
        if mode == "channel":
            drop_caches()
            assert world.outcome("a", held, within_s=8) == RIGHT, "what is in passthrough does not need the daemon"
        time.sleep(STOPPED_S / 2)
    finally:
        os.kill(world.mounted.pid, signal.SIGCONT)
    for model, reader in readers.items():
        assert world.outcome(model, reader, within_s=20) == RIGHT
    if mode != "channel":
        assert world.outcome("a", held, within_s=20) == RIGHT
    world.others_are_fine()
    assert world.mounted.status()["daemon"]["pid"] == first, "it was not given up"
    world.heals("d")


@pytest.mark.long
def test_a_server_that_stood_still_is_an_errno_and_then_goes_on(source_world: Callable[..., SourceWorld]) -> None:
    world = source_world()
    world.server.process.send_signal(signal.SIGSTOP)
    try:
        outcome = world.read("b")
        assert outcome.what == "EIO" and outcome.took_s < 8
        time.sleep(STOPPED_S)
        world.others_are_fine()
    finally:
        world.server.process.send_signal(signal.SIGCONT)
    world.heals("b", "c")
