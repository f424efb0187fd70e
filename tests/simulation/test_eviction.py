"""Placement over time: a small tier of whole objects under the eviction policy, with seeded loads."""

import random
from dataclasses import dataclass, field

import pytest

from tierfs.blocks.ids import ObjectKey
from tierfs.policy.eviction import Candidate, HeatTable, choose_victims
from tierfs.policy.watermarks import Watermarks

MINUTE_S = 60.0


@dataclass
class Tier:
    """Blocks of one unit; an object is a shard of a model. Loading a shard offers every block that is not there."""

    capacity: int
    heats: HeatTable = field(default_factory=HeatTable)
    shards: dict[ObjectKey, tuple[bytes, int, float]] = field(default_factory=dict)  # model, blocks here, last use
    now_s: float = 0.0

    @property
    def used(self) -> int:
        return sum(blocks for _, blocks, _ in self.shards.values())

    def load(self, model: str, shards: int, shard_blocks: int) -> int:
        """Load a model from its first to its last shard; the blocks that were hits."""
        hits = 0
        marks = Watermarks(self.capacity)
        for number in range(shards):
            key = ObjectKey(f"{model}/{number}".encode().ljust(16, b"."))
            self.now_s += 6.0
            self.heats.touch(model.encode(), key, self.now_s)
            here = self.shards.get(key, (b"", 0, 0.0))[1]
            hits += here
            self.shards[key] = (model.encode(), here, self.now_s)
            for _ in range(shard_blocks - here):
                if needed := marks.needed_bytes(self.used, 1):
                    candidates = [
                        Candidate(other, owner, blocks, used_s, pinned=other == key)
                        for other, (owner, blocks, used_s) in self.shards.items()
                    ]
                    victims = choose_victims(
                        candidates,
                        self.heats,
                        needed_bytes=needed,
                        wanted_bytes=marks.wanted_bytes(self.used, 1),
                        now_s=self.now_s,
                        incoming=model.encode(),
                    )
                    if not victims:
                        continue  # bypassed
                    for victim in victims:
                        assert victim.key != key
                        del self.shards[victim.key]
                owner, blocks, used_s = self.shards[key]
                self.shards[key] = (owner, blocks + 1, used_s)
                assert self.used <= self.capacity
        return hits


def test_second_pass_over_a_model_larger_than_the_tier_hits_for_most_of_the_tier() -> None:
    tier = Tier(1000)
    tier.load("old", 4, 100)
    assert tier.load("big", 15, 100) == 0
    for _ in range(3):
        assert tier.load("big", 15, 100) >= 850


def test_scan_over_many_models_once_leaves_the_one_loaded_repeatedly() -> None:
    tier = Tier(1000)
    for _ in range(3):
        tier.load("favourite", 4, 100)
    for number in range(40):
        tier.load(f"scanned-{number}", 3, 100)
    assert tier.load("favourite", 4, 100) == 400


def test_two_models_that_do_not_fit_together_do_not_take_turns_in_evicting_each_other() -> None:
    tier = Tier(1000)
    hits = 0
    for _ in range(10):
        hits += tier.load("one", 8, 100) + tier.load("two", 8, 100)
    assert hits >= 0.8 * 9 * 800


def test_last_week_s_favourite_gives_way_to_this_week_s() -> None:
    tier = Tier(1000)
    for _ in range(20):
        tier.load("last week", 9, 100)
    tier.now_s += 7 * 24 * 60 * MINUTE_S
    tier.load("this week", 9, 100)
    assert tier.load("this week", 9, 100) == 900


@pytest.mark.parametrize("seed", range(5))
def test_skewed_loads_hit_more_than_the_tier_s_share(seed: int) -> None:
    """20 models of 30 blocks, popularity 1/rank: the tier holds a sixth of them, and hits for clearly more."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    tier = Tier(100)
    ranks = list(range(1, 21))
    hits = loads = 0
    for turn in range(300):
        (rank,) = chance.choices(ranks, weights=[1 / rank for rank in ranks])
        got = tier.load(f"model-{rank}", 3, 10)
        tier.now_s += chance.expovariate(1 / (2 * MINUTE_S))
        if turn >= 50:
            hits += got
            loads += 30
    assert hits / loads > 0.35
