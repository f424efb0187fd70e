"""Fixtures for faults under real mounts."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.disk_world import DiskWorld
from tests.faults.source_world import SourceWorld
from tests.integration.conftest import mount, serve

__all__ = ["mount", "serve"]

BLOCK_BYTES = 4 << 20


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Models a to d, of one file with four blocks each."""
    root = tmp_path / "models"
    rng = random.Random(41)
    for model in "abcd":
        (root / model).mkdir(parents=True)
        (root / model / "model.bin").write_bytes(rng.randbytes(3 * BLOCK_BYTES + 99))
    return root


def _worlds(kind: type[SourceWorld]) -> Any:
    """A fixture: world(mode=..., timeout=...) -> one of that kind; closed before its mount and its server are."""

    @pytest.fixture
    def make_world(
        models: Path, tmp_path: Path, serve: Callable[..., object], mount: Callable[..., object]
    ) -> Iterator[Callable[..., SourceWorld]]:
        made: list[SourceWorld] = []

        def make(**options: Any) -> SourceWorld:
            made.append(kind(models, tmp_path, serve, mount, **options))
            return made[-1]

        yield make
        for world in made:
            world.close()

    return make_world


source_world = _worlds(SourceWorld)
disk_world = _worlds(DiskWorld)
