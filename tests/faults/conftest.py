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


@pytest.fixture
def source_world(
    models: Path, tmp_path: Path, serve: Callable[..., object], mount: Callable[..., object]
) -> Iterator[Callable[..., SourceWorld]]:
    """source_world(mode=..., timeout=...) -> SourceWorld; its proxy is closed before the mount is taken down."""
    made: list[SourceWorld] = []

    def make(**options: Any) -> SourceWorld:
        made.append(SourceWorld(models, tmp_path, serve, mount, **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def disk_world(
    models: Path, tmp_path: Path, serve: Callable[..., object], mount: Callable[..., object]
) -> Iterator[Callable[..., DiskWorld]]:
    """disk_world(mode=..., timeout=...) -> DiskWorld; its mount is taken down before its disk."""
    made: list[DiskWorld] = []

    def make(**options: Any) -> DiskWorld:
        made.append(DiskWorld(models, tmp_path, serve, mount, **options))
        return made[-1]

    yield make
    for world in made:
        world.close()
