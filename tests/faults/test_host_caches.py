"""The kernel's caches are dropped again and again while files are read and mapped."""

import threading
from collections.abc import Callable

import pytest

from tests.faults.source_world import RIGHT, SourceWorld
from tests.integration.processes import drop_caches

pytestmark = pytest.mark.fuse


@pytest.mark.parametrize("mode", ["channel", "direct"])
def test_caches_dropped_at_random_are_only_time(source_world: Callable[..., SourceWorld], mode: str) -> None:
    world = source_world(mode=mode, timeout="10s")
    over = threading.Event()

    def keep_dropping() -> None:
        while not over.wait(0.05):
            drop_caches()

    dropper = threading.Thread(target=keep_dropping)
    dropper.start()
    try:
        for _ in range(3):
            readers = [(model, world.start(model, how)) for model in "abcd" for how in ("read", "map")]
            for model, reader in readers:
                assert world.outcome(model, reader, within_s=60) == RIGHT
    finally:
        over.set()
        dropper.join()
    assert world.said("block_failed", "request_timeout") == 0
