"""What tests of pins and of verifying share: a source with four models, and local tiers with room for few of them."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from tests.local_tiers import until
from tierfs.blocks.ids import ObjectKey
from tierfs.cache.block_cache import BlockCache, FileFacts, blocks_of
from tierfs.cache.buffers import BufferPool
from tierfs.catalog.pin_store import PinStore
from tierfs.fs.inodes import Inodes
from tierfs.fs.pins import Pins
from tierfs.fs.tree import Tree
from tierfs.policy.admission import Mode
from tierfs.testing.sources import MemorySource
from tierfs.tiers.local import DirectoryTier

BLOCK = 64 << 10
SIZE = 8 * BLOCK


def data(*names: str, seed: int = 1) -> dict[bytes, bytes]:
    """One file for each model of these names."""
    return {f"{name}/model.bin".encode(): random.Random(f"{name} {seed}").randbytes(SIZE) for name in names}


class World:
    """A source with models a, b, c, d; a warm tier with room for two of them, and perhaps a hot one."""

    def __init__(self, root: Path, *, hot: bool = False, admission: Mode = "first") -> None:
        self.root = root
        self.hot = hot
        self.admission = admission
        self.source = MemorySource(data("a", "b", "c", "d"), block_bytes=BLOCK)
        self.store = PinStore(root / "pins.json")
        self.now_s = 1e6

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        def tier(name: str, models: int) -> DirectoryTier:
            capacity = int((models * SIZE + 4 * BLOCK) / 0.95)  # what is being written may be counted twice
            return DirectoryTier(
                name, [self.root / name], block_bytes=BLOCK, capacity_bytes=capacity, mapped=False,
                clock=lambda: self.now_s,
            )  # fmt: skip

        tiers = [*([tier("hot", 1)] if self.hot else []), tier("warm", 2)]
        self.warm = tiers[-1]
        self.pins = Pins(tiers, self.store, self.store.load())
        self.pins.follow(await self.tree())
        self.cache = BlockCache(
            source=self.source,
            tiers=tiers,
            pool=BufferPool(limit_bytes=32 * BLOCK, block_bytes=BLOCK),
            block_bytes=BLOCK,
            source_timeout_s=0.5,
            hot_admission=self.admission,
        )
        self.cache.is_pinned = self.pins.is_pinned
        async with trio.open_nursery() as nursery:
            for one in tiers:
                await nursery.start(one.run)
            await nursery.start(lambda task_status: self.cache.run(task_status=task_status))
            await nursery.start(lambda task_status: self.pins.run(self.cache, task_status=task_status))
            yield
            nursery.cancel_scope.cancel()

    async def tree(self) -> Tree:
        return Tree((await self.source.publication()).catalog, Inodes(None))

    async def file(self, name: str) -> FileFacts:
        tree = await self.tree()
        node = tree.resolve(f"{name}/model.bin".encode())
        assert node is not None
        return tree.facts(node)

    async def load(self, name: str, *, times: int = 1) -> None:
        """As a reader does, who comes back a minute later."""
        file = await self.file(name)
        for _ in range(times):
            self.now_s += 60
            self.cache.opened(file.version)
            for block in blocks_of(file, BLOCK):
                await self.cache.load(file, block)
                await self.warm.flush()
            self.cache.memory.clear()
            self.cache.closed(file.version)

    async def resident(self, name: str, tier: int = -1) -> int:
        return self.cache.tiers[tier].resident_bytes(ObjectKey((await self.file(name)).version))

    async def is_resident(self, name: str) -> None:
        await until(lambda: all(state.state == "resident" for state in self.pins.states()))
        assert await self.resident(name) == SIZE
