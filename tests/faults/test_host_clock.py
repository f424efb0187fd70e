"""The clock of the machine with the mount jumps by a day, forwards and back, while files are read."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.source_world import RIGHT, SourceWorld
from tests.integration import processes
from tests.integration.processes import tierfs

pytestmark = pytest.mark.fuse

# The system's clock is everybody's; the daemon's idea of it is not. Read anew at each look, so that it jumps.
JUMP = """
import os, time
now, now_ns = time.time, time.time_ns
def shift_s():
    try:
        return int(open(os.environ["TIERFS_TEST_JUMP"]).read())
    except (OSError, ValueError):
        return 0
time.time = lambda: now() + shift_s()
time.time_ns = lambda: now_ns() + shift_s() * 10**9
"""
DAY_S = 24 * 3600


def test_a_clock_that_jumps_changes_nothing(
    source_world: Callable[..., SourceWorld], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jump").mkdir()
    (tmp_path / "jump" / "sitecustomize.py").write_text(JUMP)
    shift = tmp_path / "shift"
    monkeypatch.setitem(
        processes.ENVIRONMENT, "PYTHONPATH", f"{tmp_path / 'jump'}:{processes.ENVIRONMENT['PYTHONPATH']}"
    )
    monkeypatch.setitem(processes.ENVIRONMENT, "TIERFS_TEST_JUMP", str(shift))
    world = source_world()
    for model, jump_s in (("b", DAY_S), ("c", -DAY_S), ("d", 0)):
        shift.write_text(str(jump_s))
        outcome = world.read(model)
        assert outcome.what == RIGHT and outcome.took_s < 5
        world.others_are_fine()
        status = world.mounted.status()
        assert status["source"]["state"] == "connected" and status["oldest_request_s"] < 5
    tierfs("evict", world.mounted.path / "b")
    tierfs("warm", world.mounted.path / "b")
    assert world.said("block_failed", "request_timeout", "source_down") == 0
