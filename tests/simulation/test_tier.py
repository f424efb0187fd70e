"""A local tier under random loads, all at once: loaders, readers, maps, places under copy, an operator. Real
directories, real threads; the order of things comes from a seed, which is the test's parameter.

What must hold at every moment: capacity is not exceeded, nor on the device; what is in use loses no block; what is
mapped or being copied keeps its bytes, whatever is evicted. And at the end: nothing hangs, nothing is left over, and a
model that fits comes in.
"""

import contextlib
import os
import random
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.local_tiers import BLOCK, Content, FakeLender, object_files, running, until
from tierfs.blocks.spans import Span
from tierfs.tiers.interface import Offer
from tierfs.tiers.local import DirectoryTier

SHM = Path("/dev/shm")
CAPACITY = 40 * BLOCK
STEPS = 60
LONG = int(os.environ.get("TIERFS_SIMULATION_TIERS", "60"))


class Tier:
    """The tier and those who use it."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.random = root, random.Random(seed)
        self.now_s = 1e6
        self.tier = DirectoryTier(
            "warm", [root], block_bytes=BLOCK, capacity_bytes=CAPACITY, mapped=False, probe_s=0.05, open_objects=6,
            clock=lambda: self.now_s,
        )  # fmt: skip
        self.lender = FakeLender()
        self.tier.lender = self.lender
        self.contents = [
            Content(seed * 100 + number, self.random.randint(1, 9 * BLOCK), model=f"m{number // 2}")
            for number in range(16)
        ]
        self.used: dict[int, int] = {}  # by content: who has it open

    @contextlib.contextmanager
    def open(self, number: int) -> Iterator[Content]:
        content = self.contents[number]
        self.tier.touch(content.key)
        self.tier.pin(content.key)
        self.used[number] = self.used.get(number, 0) + 1
        try:
            yield content
        finally:
            self.used[number] -= 1
            self.tier.unpin(content.key)

    def any(self) -> int:
        """Some are more popular than others."""
        return min(int(self.random.expovariate(0.25)), len(self.contents) - 1)

    async def load(self) -> None:
        """Read a file from its first to its last block; what is not here comes from elsewhere, and is offered."""
        for _ in range(STEPS):
            self.now_s += self.random.choice([1.0, 60.0, 2000.0])
            with self.open(self.any()) as content:
                for block in content.blocks:
                    data = await content.read(self.tier, block)
                    assert data is None or data == content.block(block), "wrong bytes"
                    if data is None and content.offer(self.tier, block) is Offer.FULL:
                        await self.tier.flush()
                    if self.random.random() < 0.3:
                        await trio.lowlevel.checkpoint()

    async def map(self) -> None:
        """A passthrough reader: it maps the whole file, closes it, and goes on reading."""
        for _ in range(STEPS):
            with self.open(self.any()) as content:
                lent = await self.tier.whole(content.key)
                mapped = None if lent is None or lent.slot not in self.lender.files else self.lender.map(lent)
            if mapped is not None:
                await self.a_while()
                assert mapped[:] == content.bytes, "a file that somebody maps has changed"
                mapped.close()
            await trio.lowlevel.checkpoint()

    async def copy(self) -> None:
        """The channel copies a part some time after it was told its place."""
        for _ in range(STEPS):
            content = self.contents[self.any()]
            block = self.random.choice(content.blocks)
            part = await self.tier.locate(content.key, Span(block, 0, content.length(block)))
            if part is not None:
                await self.a_while()
                assert self.lender.read(part) == content.block(block), "a part under copy has changed"
                part.hold.release()
            await trio.lowlevel.checkpoint()

    async def operate(self) -> None:
        """Pins, evictions, another capacity."""
        for _ in range(STEPS // 2):
            content = self.contents[self.any()]
            what = self.random.choice(["keep", "evict", "evict", "resize"])
            if what == "keep":
                self.tier.keep(content.key)
                await self.a_while()
                self.tier.let_go(content.key)
            elif what == "evict":
                with trio.move_on_after(0.1):  # it goes all the same, once nobody copies from it
                    await self.tier.evict(content.key)
            else:
                self.tier.resize(capacity_bytes=int(CAPACITY * self.random.uniform(0.3, 1.0)))
                await self.a_while()
                self.tier.resize(capacity_bytes=CAPACITY)
            await trio.sleep(0.002)

    async def watch(self) -> None:
        """What must hold at every moment."""
        before: dict[int, set[int]] = {}
        while True:
            space = self.tier._space
            assert space.used_bytes - space.leaving_bytes <= CAPACITY, "more than fits was accepted"
            # Files come and go while they are counted one by one: what is too much must be so each time.
            assert min(self.on_device() for _ in range(5 if self.on_device() > CAPACITY else 1)) <= CAPACITY
            now = {
                number: {block for block in content.blocks if self.tier.resident(content.key, block)}
                for number, content in enumerate(self.contents)
                if self.used.get(number)
            }
            for number, blocks in before.items():
                assert blocks <= now.get(number, blocks), f"content {number} is in use, and has lost blocks"
            before = now
            await trio.lowlevel.checkpoint()
            before = {number: blocks for number, blocks in before.items() if self.used.get(number)}

    def on_device(self) -> int:
        taken = 0
        for file in (*object_files(self.root), *(self.root / "dying").iterdir()):
            with contextlib.suppress(FileNotFoundError):
                taken += file.stat().st_blocks * 512
        return taken

    async def a_while(self) -> None:
        await trio.sleep(self.random.choice([0.0, 0.001, 0.01]))

    async def live(self) -> None:
        async with running(self.tier):
            async with trio.open_nursery() as watching:
                watching.start_soon(self.watch)
                async with trio.open_nursery() as nursery:
                    for work in (self.load, self.load, self.load, self.map, self.copy, self.operate):
                        nursery.start_soon(work)
                watching.cancel_scope.cancel()
            await self.nothing_is_left()

    async def nothing_is_left(self) -> None:
        tier = self.tier
        await tier.flush()
        await until(lambda: not tier._removals._leaving and not tier._space.leaving_bytes)
        await until(lambda: tier.statistics().used_bytes == self.on_device())
        assert (tier.statistics().queued_bytes, tier._space.reserved_bytes) == (0, 0)
        fitting = Content(-1, 20 * BLOCK, model="fitting")
        for _ in range(100):  # loaded as often as the hottest
            self.now_s += 600
            if await fitting.fill(tier) == 0 and tier.resident_bytes(fitting.key) == len(fitting.bytes):
                break
        assert await fitting.hits(tier) == len(fitting.blocks)
        for content in self.contents:
            await content.hits(tier)
        for content in (*self.contents, fitting):
            await tier.evict(content.key)
        await until(lambda: tier.statistics().used_bytes == 0 and self.on_device() == 0)


def simulate(seed: int) -> None:
    if not SHM.is_dir():
        pytest.skip("no /dev/shm here")
    root = SHM / f"tierfs-test-{uuid.uuid4().hex}"

    async def bounded() -> None:
        with trio.fail_after(60):
            await Tier(root, seed).live()

    try:
        trio.run(bounded)
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.mark.parametrize("seed", range(4))
def test_a_tier_keeps_its_promises_under_everything_at_once(seed: int) -> None:
    simulate(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1000 + LONG))
def test_a_tier_keeps_its_promises_with_many_seeds(seed: int) -> None:
    simulate(seed)
