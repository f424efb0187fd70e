"""A daemon that is killed while it promotes: the next one finds no wrong byte and no leaked space, and goes on.

More and other moments: TIERFS_PROMOTION_KILLS=200 TIERFS_PROMOTION_SEED=7.
"""

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests import promotions
from tests.pmem_pools import DAX, persistent_folder
from tests.promotions import Place

KILLS = int(os.environ.get("TIERFS_PROMOTION_KILLS", "8"))
SEED = int(os.environ.get("TIERFS_PROMOTION_SEED", "0"))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    for folder in persistent_folder():
        yield Place(folder / "hot", tmp_path / "warm", pretend=not DAX)


@pytest.mark.timeout(120 + 10 * KILLS)
def test_killed_at_random_points_of_promotions_no_byte_is_wrong_no_space_leaks_and_the_next_daemon_goes_on(
    place: Place,
) -> None:
    seed = SEED or random.randrange(1, 1 << 30)
    print(f"TIERFS_PROMOTION_SEED={seed}")
    trio.run(promotions.prepare, place)
    seen = promotions.kill_and_check(place, kills=KILLS, longest_s=0.15, seed=seed)
    print(f"{KILLS} kills: {seen}", file=sys.stderr)
    assert seen.blocks > KILLS
    assert KILLS < 50 or (seen.begun > 0 and seen.resumed > 0 and seen.swept > 0), "no kill hit a promotion"
    trio.run(promotions.empty, place)
