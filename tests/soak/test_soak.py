"""Forty seconds of the soak; tests/soak.sh runs it for as long as one likes."""

import os
import random
from pathlib import Path

import pytest

from tests.soak.main import soak

pytestmark = [pytest.mark.fuse, pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_short_soak_leaves_nothing(tmp_path: Path) -> None:
    seed = int(os.environ.get("TIERFS_SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
    print(f"TIERFS_SOAK_SEED={seed}")
    soak(tmp_path, 0.6, seed)
