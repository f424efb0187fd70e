"""Two busy loops for each core beside a load."""

import os
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.faults.source_world import RIGHT, SourceWorld

pytestmark = [pytest.mark.fuse, pytest.mark.slow]


def test_a_starved_daemon_is_only_slow(source_world: Callable[..., SourceWorld]) -> None:
    world = source_world(timeout="20s")
    loops = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        started_s = time.monotonic()
        readers = {model: world.start(model, "map" if model == "c" else "read") for model in "bcd"}
        for model, reader in readers.items():
            assert world.outcome(model, reader, within_s=60) == RIGHT
        world.others_are_fine()
        assert time.monotonic() - started_s < 60
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert world.said("block_failed", "request_timeout", "tier_device_out_of_service") == 0
