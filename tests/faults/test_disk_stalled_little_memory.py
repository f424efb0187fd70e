"""The warm disk stalls under more reads than there are buffers."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import BLOCK_BYTES
from tests.faults.disk_world import DiskWorld
from tests.integration.processes import tierfs

pytestmark = [pytest.mark.fuse, pytest.mark.long]

FILES = 20


@pytest.mark.parametrize("mode", ["channel", "direct"])
def test_buffers_are_left_for_the_source(models: Path, disk_world: Callable[..., DiskWorld], mode: str) -> None:
    names = [f"m{number}" for number in range(FILES)]
    rng = random.Random(43)
    for name in names:
        (models / name).mkdir()
        (models / name / "model.bin").write_bytes(rng.randbytes(BLOCK_BYTES))
    world = disk_world(mode=mode, timeout="10s")
    config = world.mounted.config
    config.write_text(config.read_text() + '[memory]\nlimit = "64MiB"\n')
    tierfs("warm", *(world.mounted.path / name for name in names))
    world.remount()
    world.disk.suffer("stall")
    readers = [(name, world.start(name)) for name in names]
    for name, reader in readers:
        assert world.outcome(name, reader, 30) == "right"
    world.is_right("a", *names)
    assert world.said("tier_device_out_of_service") == 1
