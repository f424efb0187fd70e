"""Fixtures for tests over real mounts."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration import processes
from tests.integration.processes import Mount, Serve


@pytest.fixture
def own_runtime_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No mount of another test is in sight."""
    monkeypatch.setitem(processes.ENVIRONMENT, "TIERFS_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    """serve(directory, *options) -> Serve; ended afterwards."""
    running: list[Serve] = []

    def start(directory: Path, *options: str) -> Serve:
        work = tmp_path / f"serve{len(running)}"
        work.mkdir()
        running.append(Serve(directory, work, *options))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def mount(tmp_path: Path, serve: object) -> Iterator[Callable[..., Mount]]:
    """mount(url, warm=..., hot=..., extra=...) -> Mount; cleaned up afterwards, before the servers end."""
    made: list[Mount] = []

    def make(url: str, **options: Any) -> Mount:
        work = tmp_path / f"mount{len(made)}"
        work.mkdir()
        made.append(Mount(url, work, **options))
        made[-1].mount()
        return made[-1]

    yield make
    for instance in made:
        instance.cleanup()
