"""Placement under random lives of a tier: what it evicts, and that its work is not for nothing. Many seeds; those that
fail are named.

Real are the memory behind the placement, the index, the marks and the policy; the tier around them is a count of bytes.
"""

import os
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tierfs.blocks.ids import ObjectKey, digest_block
from tierfs.policy.watermarks import Watermarks
from tierfs.tiers.index import Entry, Index
from tierfs.tiers.placement import Placement

BLOCK = 4096
SEEDS_LONG = int(os.environ.get("TIERFS_SIMULATION_SEEDS", "1000"))


def name_of(model: int, shard: int, kind: str = "version") -> ObjectKey:
    return ObjectKey(digest_block(f"{kind} {model} {shard}".encode()))


class Life:
    """A tier of ``capacity`` blocks and what happens to it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 1e6
        self.capacity = self.random.randint(20, 200)
        high = self.random.uniform(0.8, 1.0)
        self.marks = Watermarks(self.capacity * BLOCK, high, high * self.random.uniform(0.7, 1.0))
        self.placement, self.index = Placement(), Index()
        self.devices: list[Any] = [SimpleNamespace(evictable=True) for _ in range(2)]
        self.shards = {model: self.random.randint(1, 4) for model in range(self.random.randint(2, 9))}
        self.sizes = {model: self.random.randint(1, max(2, self.capacity // 4)) for model in self.shards}
        self.mapped: set[bytes] = set()
        self.pins: list[ObjectKey] = []
        self.keeps: list[ObjectKey] = []
        self.evicted = self.admitted = self.bypassed = 0

    @property
    def used(self) -> int:
        return sum(entry.allocated_bytes for entry in self.index)

    def offer(self, model: int, shard: int, block: int) -> bool:
        """As DirectoryTier.offer: whether the block is there afterwards."""
        key = self.index.canonical(name_of(model, shard))
        name = b"%d" % model
        self.placement.learn_model(key, name)
        entry = self.index.get(key)
        if entry is not None and entry.has(block):
            return True
        urgent = self.placement.kept(key)
        victims = self.placement.victims(
            self.index, self.marks, used_bytes=self.used, cost_bytes=BLOCK, model=name, mapped=self.mapped,
            now_s=self.now_s, urgent=urgent,
        )  # fmt: skip
        if victims is None:
            self.bypassed += 1
            return False
        self.check(victims, name, urgent, key)
        for victim in victims:
            self.remove(victim)
        assert self.index.get(key) is entry, "the object a block comes to was evicted for it"
        if entry is None:
            entry = Entry(
                name=key, key=key, size_bytes=self.sizes[model] * BLOCK, block_bytes=BLOCK, path=b"", model=name,
                model_bytes=0, device=self.random.choice(self.devices), last_use_s=self.now_s,
            )  # fmt: skip
            self.index.add(entry)
        entry.fill(block, digest_block(b""))
        entry.allocated_bytes += BLOCK
        self.admitted += 1
        assert self.used <= self.marks.high_bytes <= self.marks.capacity_bytes
        return True

    def check(self, victims: list[Entry], model: bytes | None, urgent: bool, key: ObjectKey | None) -> None:
        needed, wanted = (marks(self.used, BLOCK) for marks in (self.marks.needed_bytes, self.marks.wanted_bytes))
        for victim in victims:
            assert not self.placement.pinned(victim.key), "pinned"
            assert not self.placement.kept(victim.key), "pinned by an operator"
            assert not (victim.handed_out and victim.model in self.mapped), "somebody maps it"
            assert victim.device.evictable, "its device cannot record what leaves"
            assert victim.key != key and (urgent or victim.model != model), "of the model that comes"
        freed = sum(victim.allocated_bytes for victim in victims)
        assert freed >= needed, "not enough, and so in vain"
        assert not victims or needed, "there was room"
        assert not victims or freed - victims[-1].allocated_bytes < wanted, "more than was wanted"

    def remove(self, entry: Entry) -> None:
        self.evicted += entry.resident_blocks
        self.index.discard(entry)
        self.placement.room_changed()

    def open(self, model: int, shard: int) -> None:
        key = self.index.canonical(name_of(model, shard))
        entry = self.index.get(key)
        if entry is not None:
            entry.last_use_s = self.now_s
        self.placement.touch(key, entry, self.now_s)
        self.placement.pin(key)

    def load(self, model: int) -> int:
        """A whole model from its first to its last shard; how many of its blocks are there afterwards."""
        there = 0
        for shard in range(self.shards[model]):
            self.now_s += self.random.uniform(0, 8)
            self.open(model, shard)
            for block in range(self.sizes[model]):
                there += self.offer(model, shard, block)
            self.placement.unpin(self.index.canonical(name_of(model, shard)))
        return there

    def hits(self, model: int) -> int:
        entries = (self.index.get(name_of(model, shard)) for shard in range(self.shards[model]))
        return sum(entry.resident_blocks for entry in entries if entry is not None)

    def any_object(self) -> tuple[int, int]:
        model = self.random.choice(list(self.shards))
        return model, self.random.randrange(self.shards[model])

    def step(self) -> None:
        """Something happens."""
        what = self.random.choice(
            ["load", "load", "load", "pin", "unpin", "keep", "let go", "digest", "map", "unmap", "hand out", "shrink",
             "grow", "device", "time", "forget"]
        )  # fmt: skip
        version = name_of(*(found := self.any_object()))
        key = self.index.canonical(version)
        entry = self.index.get(key)
        if what == "load":
            self.load(self.random.choice(list(self.shards)))
        elif what == "pin":
            self.open(*found)
            self.pins.append(version)
        elif what == "unpin" and self.pins:
            self.placement.unpin(self.index.canonical(self.pins.pop(self.random.randrange(len(self.pins)))))
        elif what == "keep" and len(self.keeps) < 3:
            self.placement.keep(key)
            self.keeps.append(version)
        elif what == "let go" and self.keeps:
            self.placement.let_go(self.index.canonical(self.keeps.pop()))
        elif what == "digest":  # of some, equal contents
            content = name_of(found[0] // 2, found[1], "content")
            if self.sizes[found[0]] == self.sizes[found[0] // 2 * 2]:
                loser = self.index.alias(version, content)[1]
                self.placement.alias(version, content)
                if loser is not None:
                    self.remove(loser)
        elif what == "map":
            self.mapped.add(b"%d" % found[0])
        elif what == "unmap":
            self.mapped.clear()
        elif what == "hand out" and entry is not None:
            entry.handed_out = True
        elif what in ("shrink", "grow"):
            part = self.random.uniform(0.3, 0.9) if what == "shrink" else 1.0
            self.resize(int(self.capacity * part) * BLOCK)
        elif what == "device":
            self.devices[0].evictable = not self.devices[0].evictable
        elif what == "time":
            self.now_s += self.random.choice([10.0, 600.0, 4000.0, 1e6])
        elif what == "forget":
            self.placement.heats.forget_cold(self.now_s, {entry.model for entry in self.index})

    def resize(self, capacity_bytes: int) -> None:
        """As the keeper does: what is above a smaller capacity goes, but for what is in use."""
        self.marks = Watermarks(capacity_bytes, self.marks.high, self.marks.low)
        self.placement.room_changed()
        if self.used <= capacity_bytes:
            return
        victims = self.placement.victims(
            self.index, self.marks, used_bytes=self.used, cost_bytes=0, model=None, mapped=self.mapped, now_s=self.now_s
        )
        for victim in victims or ():
            assert not self.placement.pinned(victim.key) and victim.device.evictable
            self.remove(victim)
        held = (e for e in self.index if self.placement.pinned(e.key) or e.handed_out or not e.device.evictable)
        assert self.used <= self.marks.high_bytes or self.used == sum(e.allocated_bytes for e in held)

    def let_all_go(self) -> None:
        """Nobody uses anything any more."""
        while self.pins:
            self.placement.unpin(self.index.canonical(self.pins.pop()))
        while self.keeps:
            self.placement.let_go(self.index.canonical(self.keeps.pop()))
        self.mapped.clear()
        for device in self.devices:
            device.evictable = True
        self.resize(self.capacity * BLOCK)

    def fits(self, model: int) -> bool:
        return self.shards[model] * self.sizes[model] * BLOCK <= self.marks.low_bytes


def random_life(seed: int) -> None:
    """Whatever happens, the rules hold; and when nobody is in the way any more, what is loaded comes in, soon."""
    life = Life(seed)
    for _ in range(60):
        life.step()
    life.let_all_go()
    fitting = [model for model in life.shards if life.fits(model)]
    if not fitting:
        return
    model = life.random.choice(fitting)
    whole = life.shards[model] * life.sizes[model]
    for _ in range(80):  # the hottest of what is there was loaded 60 times at most
        life.now_s += 60
        if life.load(model) == whole:
            break
    else:
        raise AssertionError(f"model {model} was loaded 80 times, and never came in")
    evicted = life.evicted
    life.now_s += 60
    assert life.load(model) == whole and life.evicted == evicted, "what is there is there"


def repeated_cycle(seed: int) -> None:
    """The same models again and again, all of them more than fit: most of the tier's room serves hits, and no two go on
    evicting each other.
    """
    life = Life(seed)
    models = [model for model in life.shards if life.fits(model)]
    if len(models) < 2:
        return
    hits = evicted = rounds = 0
    for round_ in range(40):
        for model in models:
            life.now_s += 30
            if round_ >= 20:
                hits += life.hits(model)
                evicted -= life.evicted
            life.load(model)
            if round_ >= 20:
                evicted += life.evicted
        rounds += round_ >= 20
    everything = sum(life.shards[model] * life.sizes[model] for model in models)
    largest = max(life.shards[model] * life.sizes[model] for model in models)
    room = min(everything, life.marks.low_bytes // BLOCK - largest)
    assert hits >= rounds * room, f"{hits / rounds:.0f} blocks hit in a round of {everything}, there is room for {room}"
    assert evicted <= rounds * life.capacity / 4, f"{evicted} blocks evicted in {rounds} rounds"


def failing(simulation: Callable[[int], None], seeds: range) -> dict[int, str]:
    """Which seeds fail, and how."""
    found: dict[int, str] = {}
    for seed in seeds:
        try:
            simulation(seed)
        except AssertionError as error:
            found[seed] = str(error).split("\n")[0]
    return found


@pytest.mark.parametrize(("simulation", "seeds"), [(random_life, 150), (repeated_cycle, 40)])
def test_the_rules_hold_and_work_is_not_for_nothing(simulation: Callable[[int], None], seeds: int) -> None:
    assert failing(simulation, range(seeds)) == {}, "by seed"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("simulation", [random_life, repeated_cycle])
def test_the_rules_hold_with_many_seeds(simulation: Callable[[int], None]) -> None:
    assert failing(simulation, range(1000, 1000 + SEEDS_LONG)) == {}, "by seed"
