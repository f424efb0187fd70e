"""What the tests of the local tiers share: contents of known bytes, leases, and a tier that runs for a test."""

import mmap
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from tierfs.blocks.ids import ObjectKey, digest_block
from tierfs.blocks.spans import block_count, block_length
from tierfs.tiers.interface import LentFile, ObjectFacts, Offer, Part
from tierfs.tiers.local import DirectoryTier

BLOCK = 64 << 10


class PoolLease:
    """A lease on page-aligned memory, as the buffer pool gives them; counts its releases."""

    def __init__(self, data: bytes) -> None:
        self._memory = mmap.mmap(-1, max(1, len(data)))
        self._memory[: len(data)] = data
        self.view = memoryview(self._memory)[: len(data)]
        self.released = 0

    def release(self) -> None:
        """Overwrites the bytes: whoever reads them after this gets caught by the digest."""
        self.released += 1
        assert self.released == 1
        self._memory[: len(self.view)] = b"\xee" * len(self.view)


def buffer(length_bytes: int) -> memoryview:
    """Page-aligned memory for a read."""
    return memoryview(mmap.mmap(-1, length_bytes))[:length_bytes]


class Content:
    """One file of known bytes."""

    def __init__(self, seed: int, size_bytes: int, *, model: str = "m", block_bytes: int = BLOCK) -> None:
        self.bytes = random.Random(seed).randbytes(size_bytes)
        self.key = ObjectKey(digest_block(f"{seed} {size_bytes}".encode()))
        self.facts = ObjectFacts(self.key, size_bytes, block_bytes, b"a/%d" % seed, model.encode(), size_bytes)
        self.blocks = range(block_count(size_bytes, block_bytes))

    def block(self, number: int) -> bytes:
        """The bytes of one block."""
        start = number * self.facts.block_bytes
        return self.bytes[start : start + self.length(number)]

    def length(self, number: int) -> int:
        """The length of one block."""
        return block_length(self.facts.size_bytes, self.facts.block_bytes, number)

    def offer(self, tier: DirectoryTier, number: int, leases: list[PoolLease] | None = None) -> Offer:
        """Offer one block; the lease is released here unless the tier took it."""
        lease = PoolLease(self.block(number))
        answer = tier.offer(self.facts, number, digest_block(self.block(number)), lease)
        if answer is not Offer.ACCEPTED:
            lease.release()
        if leases is not None:
            leases.append(lease)
        return answer

    async def fill(self, tier: DirectoryTier) -> int:
        """Load the content into the tier as the cache would after an open; how many blocks were accepted."""
        tier.touch(self.key)
        accepted = 0
        for number in self.blocks:
            answer = self.offer(tier, number)
            while answer is Offer.FULL:
                await tier.flush()
                answer = self.offer(tier, number)
            accepted += answer is Offer.ACCEPTED
        await tier.flush()
        return accepted

    async def read(self, tier: DirectoryTier, number: int) -> bytes | None:
        """One whole block from the tier, None for a miss."""
        target = buffer(self.length(number))
        return bytes(target) if await tier.read_block(self.key, number, target) else None

    async def hits(self, tier: DirectoryTier) -> int:
        """How many blocks are hits; each of them must be right."""
        hits = 0
        for number in self.blocks:
            data = await self.read(tier, number)
            assert data is None or data == self.block(number), f"block {number} is wrong"
            hits += data is not None
        return hits


@asynccontextmanager
async def running(tier: DirectoryTier) -> AsyncIterator[DirectoryTier]:
    """The tier while it runs; stopped in order at the end."""
    async with trio.open_nursery() as nursery:
        await nursery.start(tier.run)
        yield tier
        nursery.cancel_scope.cancel()


def warm(*paths: Path, capacity_bytes: int | None = 64 << 20, **more: Any) -> DirectoryTier:
    """A warm tier that looks at its devices often."""
    return DirectoryTier(
        "warm", paths, block_bytes=BLOCK, capacity_bytes=capacity_bytes, mapped=False, **{"probe_s": 0.05, **more}
    )


def run(test: Callable[[], Any], *, seconds: float = 30) -> None:
    """Run an async test with a deadline."""

    async def bounded() -> None:
        with trio.fail_after(seconds):
            await test()

    trio.run(bounded)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a state that another task or thread brings about; the test's deadline bounds it."""
    while not condition():  # noqa: ASYNC110  # the tier shows its state, it does not announce it
        await trio.sleep(0.005)


def object_files(root: Path) -> list[Path]:
    """The files of all objects of a tier directory."""
    return sorted(path for path in (root / "objects").glob("*/*") if path.is_file())


class FakeLent:
    """A file the fake lender has; what it is known as."""

    def __init__(self, slot: int) -> None:
        self.slot, self.generation = slot, slot + 1


class FakeLender:
    """Keeps a descriptor of each file as the channel does, and reads from it on the tier's behalf."""

    def __init__(self) -> None:
        self.files: dict[int, int] = {}  # slot: descriptor
        self.lent: list[FakeLent] = []
        self.refuse = False
        self.meanwhile: Callable[[], None] = lambda: None

    async def lend(self, fd: int, size_bytes: int) -> LentFile | None:
        kept = os.dup(fd)
        try:
            await trio.lowlevel.checkpoint()
            self.meanwhile()
        except BaseException:
            os.close(kept)
            raise
        if self.refuse:
            os.close(kept)
            return None
        assert os.fstat(kept).st_size == size_bytes
        lent = FakeLent(len(self.lent))
        self.lent.append(lent)
        self.files[lent.slot] = kept
        return lent

    def take_back(self, lent: LentFile) -> None:
        assert trio.lowlevel.current_task() is not None
        os.close(self.files.pop(lent.slot))

    async def offer(self, inode: int, lent: LentFile) -> bool:
        raise AssertionError("tiers offer nothing")

    def read(self, part: Part) -> bytes:
        assert part.lent is not None
        return os.pread(self.files[part.lent.slot], part.length_bytes, part.offset_bytes)

    def map(self, lent: LentFile) -> mmap.mmap:
        """As a reader of a passthrough file does; the map is all that is left of its open."""
        fd = os.open(f"/proc/self/fd/{self.files[lent.slot]}", os.O_RDONLY)
        try:
            return mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)
