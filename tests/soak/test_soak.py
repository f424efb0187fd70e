"""Thirty seconds of the soak; tests/soak.sh runs it for as long as one likes."""

import os
import random
import time
from pathlib import Path

import pytest

from tests.integration.channel_load import running
from tests.soak.main import soak

pytestmark = [pytest.mark.fuse, pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_short_soak_leaves_nothing(tmp_path: Path) -> None:
    seed = int(os.environ.get("TIERFS_SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
    print(f"TIERFS_SOAK_SEED={seed}")
    soak(tmp_path, 0.5, seed)


def test_a_reader_that_hangs_is_seen_and_what_it_waits_for_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sleeper = ("sleeper", ["-c", "import time; time.sleep(60)"])
    with (
        pytest.raises(AssertionError, match="'sleeper' .* hangs for"),
        running([sleeper], tmp_path, tmp_path / "stop", 1, round_s=1) as all_well,
    ):
        for _ in range(200):
            all_well()
            time.sleep(0.05)
    assert "nanosleep" in capfd.readouterr().out
