"""The server is started again and has another generation: other files, other versions, nothing remembered."""

import hashlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.source_world import RIGHT, SourceWorld
from tests.integration.processes import eventually

pytestmark = pytest.mark.fuse


def test_another_generation_after_a_restart_is_never_a_mixture(
    source_world: Callable[..., SourceWorld], models: Path
) -> None:
    world = source_world(timeout="10s")
    path = models / "b" / "model.bin"
    mounted = world.mounted.path / "b" / "model.bin"
    old = path.read_bytes()
    with mounted.open("rb", buffering=0) as held:
        first = held.read(4096)
        assert first == old[:4096]
        world.server.kill()
        world.proxy.cut()
        new = random.Random(5).randbytes(len(old))
        replacement = path.with_name("new")
        replacement.write_bytes(new)
        replacement.rename(path)
        (models / "c" / "model.bin").unlink()
        shutil.rmtree(world.server.log.parent / "serve-state")
        world.server.start()
        try:
            rest = held.read()
            assert rest == old[4096 : 4096 + len(rest)], "bytes of another version under an open file"
        except OSError:
            pass  # ESTALE, or EIO while the server was away
    eventually(lambda: not (world.mounted.path / "c" / "model.bin").exists(), "what was removed is gone")
    expected = hashlib.sha256(new).hexdigest()
    eventually(lambda: hashlib.sha256(mounted.read_bytes()).hexdigest() == expected, "the new version is served")
    assert world.read("a").what == RIGHT
    assert world.read("d").what == RIGHT
