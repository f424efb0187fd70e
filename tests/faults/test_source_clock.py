"""The clock of the server is two days off, and so are the times of its files."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.source_world import RIGHT, SourceWorld
from tests.integration import processes
from tests.integration.processes import eventually

pytestmark = pytest.mark.fuse

SHIFT = """
import os, time
shift = int(os.environ["TIERFS_TEST_SHIFT_S"])
now, now_ns = time.time, time.time_ns
time.time = lambda: now() + shift
time.time_ns = lambda: now_ns() + shift * 10**9
"""
TWO_DAYS_S = 2 * 24 * 3600


@pytest.mark.parametrize("shift_s", [TWO_DAYS_S, pytest.param(-TWO_DAYS_S, marks=pytest.mark.long)])
def test_a_clock_that_is_two_days_off_changes_nothing(
    source_world: Callable[..., SourceWorld],
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shift_s: int,
) -> None:
    (tmp_path / "shift").mkdir()
    (tmp_path / "shift" / "sitecustomize.py").write_text(SHIFT)
    path = f"{tmp_path / 'shift'}:{processes.ENVIRONMENT['PYTHONPATH']}"
    for model in "ab":
        then = time.time() + shift_s
        os.utime(models / model / "model.bin", (then, then))
    with monkeypatch.context() as only_the_server:
        only_the_server.setitem(processes.ENVIRONMENT, "PYTHONPATH", path)
        only_the_server.setitem(processes.ENVIRONMENT, "TIERFS_TEST_SHIFT_S", str(shift_s))
        world = source_world(before_mount=only_the_server.undo)
    for model in "abc":
        assert world.read(model).what == RIGHT
    data = os.urandom(5 << 20)
    (models / "d" / "new").write_bytes(data)
    (models / "d" / "new").rename(models / "d" / "model.bin")
    mounted = world.mounted.path / "d" / "model.bin"
    eventually(lambda: mounted.stat().st_size == len(data), "what is published is seen")
    assert mounted.read_bytes() == data
    assert world.said("block_failed") == 0
