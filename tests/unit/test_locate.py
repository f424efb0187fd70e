"""Places instead of bytes: another process copies them from the pool or a tier's file, and says when it is done."""

import errno
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import tierfs.cache.block_cache as block_cache
from tests.local_tiers import run, until
from tierfs.blocks.errors import NoBuffer, StaleVersion
from tierfs.blocks.ids import BlockDigest, ObjectKey
from tierfs.blocks.spans import Span
from tierfs.cache.block_cache import BlockCache, FileFacts
from tierfs.cache.buffers import Buffer, BufferPool, PartBudget
from tierfs.cache.prefetcher import Prefetcher
from tierfs.catalog.schema import Entry, Kind
from tierfs.fs.file_view import FileView
from tierfs.policy.readahead import Readahead, ReadaheadConfig
from tierfs.testing.sources import MemorySource, version_of
from tierfs.tiers.interface import Lease, LentFile, ObjectFacts, Offer, Part
from tierfs.tiers.local import DirectoryTier

BLOCK = 64 << 10
DATA = random.Random(5).randbytes(9 * BLOCK + 77)
PATH = b"m/model.bin"
FILE = FileFacts(version=version_of(PATH, DATA), size_bytes=len(DATA), path=PATH, model=b"m", model_bytes=len(DATA))


class Lent:
    def __init__(self, slot: int) -> None:
        self.slot, self.generation = slot, 1


class Lender:
    """Keeps what it is lent, and answers when the gate is open, as a channel on a slow machine."""

    def __init__(self) -> None:
        self.files: list[int] = []
        self.gate = trio.Event()
        self.gate.set()

    async def lend(self, fd: int, size_bytes: int) -> LentFile:
        await self.gate.wait()
        self.files.append(os.dup(fd))
        return Lent(len(self.files) - 1)

    def take_back(self, lent: LentFile) -> None:
        os.close(self.files[lent.slot])

    async def offer(self, inode: int, lent: LentFile) -> bool:
        raise AssertionError("nobody offers here")


class CountingTier(DirectoryTier):
    """Counts the parts it told, and which of them are held."""

    told: list[Part]

    async def locate(self, key: ObjectKey, span: Span) -> Part | None:
        part = await super().locate(key, span)
        if part is not None:
            self.told.append(part)
        return part

    @property
    def held(self) -> int:
        return sum(part.hold._opened is not None for part in self.told)  # type: ignore[attr-defined]


def tier_in(path: Path, lender: Lender, *, mapped: bool = False) -> CountingTier:
    tier = CountingTier("warm", [path], block_bytes=BLOCK, capacity_bytes=64 << 20, mapped=mapped, probe_s=0.05)
    tier.told = []
    tier.lender = lender
    return tier


@asynccontextmanager
async def cached(source: MemorySource, *tiers: DirectoryTier, slots: int = 16) -> AsyncIterator[BlockCache]:
    pool = BufferPool(limit_bytes=slots * BLOCK, block_bytes=BLOCK)
    cache = BlockCache(source=source, tiers=tiers, pool=pool, block_bytes=BLOCK, source_timeout_s=5)
    async with trio.open_nursery() as nursery:
        for tier in tiers:
            await nursery.start(tier.run)
        await nursery.start(lambda task_status: cache.run(task_status=task_status))
        yield cache
        nursery.cancel_scope.cancel()


async def fill(cache: BlockCache) -> None:
    """All blocks into the tiers, and none left in memory."""
    cache.opened(FILE.version)
    for block in range(10):
        await cache.load(FILE, block)
        await cache.tiers[0].flush()
    cache.memory.clear()
    assert cache.tiers[0].resident_bytes(ObjectKey(FILE.version)) == len(DATA)


def view_of(cache: BlockCache) -> FileView:
    entry = Entry(0, b"model.bin", Kind.FILE, 0o644, 1, size_bytes=len(DATA), version=FILE.version)
    return FileView(
        FILE,
        entry,
        cache=cache,
        prefetcher=Prefetcher(cache),
        readahead=Readahead(ReadaheadConfig(window_max_bytes=BLOCK), size_bytes=len(DATA), block_bytes=BLOCK),
        request_timeout_s=10,
        go_on=lambda window_bytes: None,
    )


def bytes_at(cache: BlockCache, part: Part, lender: Lender | None = None) -> bytes:
    """As the channel copies them."""
    if part.lent is None:
        return os.pread(cache.pool.fd, part.length_bytes, part.offset_bytes)
    assert lender is not None
    return os.pread(lender.files[part.lent.slot], part.length_bytes, part.offset_bytes)


def source() -> MemorySource:
    return MemorySource({PATH: DATA}, block_bytes=BLOCK)


# -- the pool


def test_the_pool_is_a_file_that_neither_shrinks_nor_grows() -> None:
    pool = BufferPool(limit_bytes=8 * BLOCK, block_bytes=BLOCK)
    buffers = [pool.acquire_nowait() for _ in range(3)]
    assert os.fstat(pool.fd).st_size == pool.size_bytes == 8 * BLOCK
    for number, buffer in enumerate(buffers):
        assert buffer is not None
        buffer.view[:2] = b"%02d" % number
        assert os.pread(pool.fd, 2, buffer.offset_bytes) == b"%02d" % number
    for size in (7 * BLOCK, 9 * BLOCK):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.fd, size)


def test_the_memory_file_is_closed_with_its_pool() -> None:
    pool = BufferPool(limit_bytes=4 * BLOCK, block_bytes=BLOCK)
    link = os.readlink(f"/proc/self/fd/{pool.fd}")
    fd = pool.fd
    assert "tierfs-pool" in link
    del pool
    with pytest.raises(OSError):
        os.fstat(fd)


class Outside:
    """Holds of another process: over when it has said so, which nobody hears."""

    def __init__(self, pool: BufferPool) -> None:
        self.held: list[Buffer] = []
        self.over = 0
        self.looks = 0
        pool.sweep = self.sweep
        while (buffer := pool.acquire_nowait()) is not None:
            self.held.append(buffer)
        self.looks = 0

    def sweep(self) -> bool:
        self.looks += 1
        released = self.over > 0
        while self.over:
            self.over -= 1
            self.held.pop().release()
        return released


def test_a_buffer_that_another_process_is_done_with_is_taken_at_once() -> None:
    pool = BufferPool(limit_bytes=4 * BLOCK, block_bytes=BLOCK)
    outside = Outside(pool)
    assert pool.acquire_nowait() is None
    outside.over = 1
    assert pool.acquire_nowait() is not None
    assert pool.acquire_nowait() is None


def test_releases_that_wake_nobody_are_found_and_one_looks_for_all() -> None:
    got: list[str] = []

    async def test() -> None:
        pool = BufferPool(limit_bytes=4 * BLOCK, block_bytes=BLOCK)
        outside = Outside(pool)

        async def wait(name: str, timeout_s: float) -> None:
            try:
                await pool.acquire(timeout_s=timeout_s)
                got.append(name)
            except NoBuffer:
                got.append(f"no {name}")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, "impatient", 0.5)  # looks for the others until it leaves
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(3):
                nursery.start_soon(wait, "patient", 60.0)
            await trio.sleep(1)
            assert got == ["no impatient"]
            assert 300 < outside.looks < 600  # every 2 ms, not for each of them
            outside.over = 2
            await trio.sleep(0.01)
            assert got[1:] == ["patient"] * 2
            outside.over = 1
            await trio.sleep(0.01)
            assert got[1:] == ["patient"] * 3
        looks = outside.looks
        await trio.sleep(1)
        assert outside.looks == looks  # nobody waits, nobody looks

    trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))


def test_requests_of_several_parts_share_a_budget_in_order() -> None:
    inside: list[str] = []

    async def test() -> None:
        budget = PartBudget(4)
        events = {name: trio.Event() for name in "abcd"}
        scopes = {name: trio.CancelScope() for name in "abcd"}

        async def request(name: str, parts: int) -> None:
            with scopes[name]:
                async with budget.hold(parts):
                    inside.append(name)
                    await events[name].wait()

        async with trio.open_nursery() as nursery:
            for name, parts in (("a", 3), ("b", 100), ("c", 2), ("d", 1)):
                nursery.start_soon(request, name, parts)
                await trio.testing.wait_all_tasks_blocked()
            assert inside == ["a"]
            scopes["b"].cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert inside == ["a"]  # c does not fit, and d waits its turn
            events["a"].set()
            await trio.testing.wait_all_tasks_blocked()
            assert inside == ["a", "c", "d"]
            events["c"].set()
            events["d"].set()
        with trio.fail_after(1):
            async with budget.hold(100):
                pass

    run(test)


# -- the cache


def test_a_hold_keeps_the_bytes_though_the_block_is_dropped_and_others_want_the_buffer() -> None:
    async def test() -> None:
        async with cached(source(), slots=4) as cache:
            part = await cache.locate(FILE, Span(2, 7, 1000), sequential=True)
            cache.memory.drop((cache.key(FILE.version), 2))
            for block in (3, 4, 5, 6, 7, 8):
                await cache.read(FILE, Span(block, 0, BLOCK), sequential=True)
            assert bytes_at(cache, part) == DATA[2 * BLOCK + 7 : 2 * BLOCK + 1007]
            cache.memory.clear()
            assert cache.pool.used_slots == 1
            part.hold.release()
            assert cache.pool.used_slots == 0

    run(test)


def test_a_block_dropped_before_its_reader_ran_is_located_all_the_same() -> None:
    async def test() -> None:
        async with cached(source()) as cache:
            cache.on_room = lambda: cache.memory.drop((cache.key(FILE.version), 1))
            part = await cache.locate(FILE, Span(1, 0, BLOCK), sequential=True)
            assert bytes_at(cache, part) == DATA[BLOCK : 2 * BLOCK]
            part.hold.release()
            assert cache.pool.used_slots == 0

    run(test)


def test_a_lone_span_lies_in_the_tier_and_a_sequential_one_in_the_pool(tmp_path: Path) -> None:
    async def test() -> None:
        lender = Lender()
        tier = tier_in(tmp_path, lender)
        async with cached(source(), tier) as cache:
            await fill(cache)
            lone = await cache.locate(FILE, Span(4, 100, 50), sequential=False)
            assert lone.lent is not None
            assert bytes_at(cache, lone, lender) == DATA[4 * BLOCK + 100 : 4 * BLOCK + 150]
            assert tier.held == 1 and len(cache.memory) == 0
            lone.hold.release()
            assert tier.held == 0
            assert cache.locate_nowait(FILE, Span(5, 0, 10), sequential=True) is None
            for _ in range(2):
                part = await cache.locate(FILE, Span(5, 0, 10), sequential=True)
                assert part.lent is None and bytes_at(cache, part) == DATA[5 * BLOCK : 5 * BLOCK + 10]
                part.hold.release()
            assert cache.statistics.tier_bytes == BLOCK
            assert cache.statistics.memory_hit_blocks == 0  # counted where nobody had to wait
            part_nowait = cache.locate_nowait(FILE, Span(5, 0, 10), sequential=True)
            assert part_nowait is not None and cache.statistics.memory_hit_blocks == 1
            part_nowait.hold.release()

    run(test)


def test_a_mapped_tier_is_read_in_place_even_sequentially(tmp_path: Path) -> None:
    async def test() -> None:
        lender = Lender()
        async with cached(source(), tier_in(tmp_path, lender, mapped=True)) as cache:
            await fill(cache)
            part = await cache.locate(FILE, Span(9, 0, 77), sequential=True)
            assert part.lent is not None and bytes_at(cache, part, lender) == DATA[9 * BLOCK :]
            part.hold.release()

    run(test)


def test_a_tier_that_hangs_does_not_hold_the_reader_and_its_late_part_is_released(tmp_path: Path) -> None:
    async def test() -> None:
        lender = Lender()
        tier = tier_in(tmp_path, lender)
        async with cached(source(), tier) as cache:
            await fill(cache)
            lender.gate = trio.Event()
            with trio.move_on_after(0.05) as scope:
                await cache.locate(FILE, Span(4, 0, 50), sequential=False)
            assert scope.cancelled_caught
            lender.gate.set()
            await until(lambda: bool(tier.told))
            await trio.testing.wait_all_tasks_blocked()
            assert len(tier.told) == 1 and tier.held == 0

    run(test)


def test_a_whole_file_is_handed_out_by_the_tier_that_has_it_all(tmp_path: Path) -> None:
    async def test() -> None:
        lender = Lender()
        async with cached(source(), tier_in(tmp_path / "a", Lender()), tier_in(tmp_path / "b", lender)) as cache:
            near, far = cache.tiers
            await fill(cache)
            await far.flush()
            assert await near.evict(ObjectKey(FILE.version)) == 0  # pinned
            cache.closed(FILE.version)
            assert await near.evict(ObjectKey(FILE.version)) > 0
            lent = await cache.whole(FILE)
            assert lent is not None
            assert os.pread(lender.files[lent.slot], len(DATA), 0) == DATA

    run(test)


def test_an_open_waits_for_no_tier_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cache, "_WHOLE_S", 0.05)

    async def test() -> None:
        lender = Lender()
        async with cached(source(), tier_in(tmp_path, lender)) as cache:
            assert await cache.whole(FILE) is None  # nothing of it is here
            await fill(cache)
            lender.gate = trio.Event()
            with trio.fail_after(5):
                assert await cache.whole(FILE) is None
            assert cache.statistics.late_handouts == 1
            lender.gate.set()

    run(test)


def test_small_blocks_that_wait_to_be_written_leave_buffers_to_readers(tmp_path: Path) -> None:
    files = {b"m/%d" % number: b"%d" % number * 9 for number in range(40)}
    source = MemorySource(files, block_bytes=BLOCK)

    class Slow(DirectoryTier):
        """A tier whose disk writes nothing for now."""

        leases: list[Lease]

        def offer(self, facts: ObjectFacts, block: int, digest: BlockDigest, lease: Lease) -> Offer:
            self.leases.append(lease)
            return Offer.ACCEPTED

    tier = Slow("warm", [tmp_path], block_bytes=BLOCK, capacity_bytes=64 << 20, mapped=False)
    tier.leases = []

    async def test() -> None:
        async with cached(source, tier) as cache:
            for path, data in files.items():
                facts = FileFacts(version_of(path, data), len(data), path, b"m", len(data))
                kept = await cache.load(facts, 0)
                assert bytes(kept.buffer.view[: kept.length_bytes]) == data
            assert len(tier.leases) == 4
            for lease in tier.leases:
                lease.release()
            file = FileFacts(version_of(b"m/0", files[b"m/0"]), len(files[b"m/0"]), b"m/0", b"m", 9)
            cache.memory.clear()
            await cache.load(file, 0)
            assert len(tier.leases) == 5
            tier.leases[-1].release()

    run(test)


def test_a_place_that_cannot_be_read_is_its_tiers_affair_and_the_next_read_goes_below(tmp_path: Path) -> None:
    async def test() -> None:
        lender = Lender()
        tier = tier_in(tmp_path, lender)
        async with cached(source(), tier) as cache:
            await fill(cache)
            part = await cache.locate(FILE, Span(4, 0, 50), sequential=False)
            assert part.lent is not None
            await cache.failed(None, 0, errno.EFAULT)  # the pool has no medium
            assert tier.resident(ObjectKey(FILE.version), 4)
            await cache.failed(part.lent, part.offset_bytes, errno.EIO)
            part.hold.release()
            assert not tier.resident(ObjectKey(FILE.version), 4)
            again = await cache.locate(FILE, Span(4, 0, 50), sequential=False)
            assert again.lent is None and bytes_at(cache, again) == DATA[4 * BLOCK : 4 * BLOCK + 50]
            again.hold.release()

    run(test)


# -- file views


def test_the_parts_of_a_request_are_exactly_its_bytes() -> None:
    async def test() -> None:
        async with cached(source(), slots=8) as cache:
            view = view_of(cache)
            borders = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 3, 9 * BLOCK, len(DATA) - 1, len(DATA), 1 << 40)
            for offset in borders:
                for length in (0, 1, 5, BLOCK, BLOCK + 1, 2 * BLOCK + 5):
                    parts = await view.locate(offset, length)
                    found = b"".join(bytes_at(cache, part) for part in parts)
                    assert found == DATA[offset : offset + length], (offset, length)
                    for part in parts:
                        part.hold.release()
            cache.memory.clear()
            assert cache.pool.used_slots == 0

    run(test)


@pytest.mark.parametrize("how", ["error", "cancel"])
def test_a_request_that_fails_half_way_leaves_no_hold(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with cached(source()) as cache:
            locate = cache.locate

            async def second_fails(file: FileFacts, span: Span, **more: Any) -> Part:
                if span.block == 1:
                    assert any(block.buffer.holders == 2 for block in cache.memory._partly.values())
                    if how == "error":
                        raise StaleVersion("gone")
                    scope.cancel()
                    await trio.sleep_forever()
                return await locate(file, span, **more)

            monkeypatch.setattr(cache, "locate", second_fails)
            with trio.CancelScope() as scope:
                if how == "error":
                    with pytest.raises(StaleVersion):
                        await view_of(cache).locate(BLOCK // 2, BLOCK)
                else:
                    await view_of(cache).locate(BLOCK // 2, BLOCK)
            assert scope.cancelled_caught == (how == "cancel")
            cache.memory.clear()
            await trio.testing.wait_all_tasks_blocked()
            assert cache.pool.used_slots == 0

    run(test)


def test_readers_of_a_source_that_is_away_keep_nothing_from_those_of_resident_blocks() -> None:
    async def test() -> None:
        away = source()
        async with cached(away, slots=8) as cache, trio.open_nursery() as nursery:
            view = view_of(cache)
            for block in (0, 1):
                await cache.load(FILE, block)
            away.gate = trio.Event()
            for block in range(2, 8):
                nursery.start_soon(view.locate, block * BLOCK + BLOCK // 2, BLOCK)
            await trio.testing.wait_all_tasks_blocked()
            with trio.fail_after(2):
                parts = await view.locate(BLOCK // 2, BLOCK)
            assert b"".join(bytes_at(cache, part) for part in parts) == DATA[BLOCK // 2 : BLOCK // 2 + BLOCK]
            nursery.cancel_scope.cancel()

    run(test)


def test_many_requests_over_block_borders_get_through_a_small_pool() -> None:
    async def test() -> None:
        right: list[bool] = []
        async with cached(source(), slots=4) as cache:
            view = view_of(cache)

            async def reader(number: int) -> None:
                offset = number % 9 * BLOCK + BLOCK // 2
                parts = await view.locate(offset, BLOCK // 2 + 70)
                await trio.lowlevel.checkpoint()
                right.append(b"".join(bytes_at(cache, part) for part in parts) == DATA[offset:][: BLOCK // 2 + 70])
                for part in parts:
                    part.hold.release()

            with trio.fail_after(3):
                async with trio.open_nursery() as nursery:
                    for number in range(60):
                        nursery.start_soon(reader, number)
            assert right == [True] * 60

    run(test)


def test_a_request_of_several_parts_takes_none_before_its_budget_has_room() -> None:
    async def test() -> None:
        async with cached(source(), slots=8) as cache, trio.open_nursery() as nursery:
            done = trio.Event()

            async def reader() -> None:
                for part in await view_of(cache).locate(BLOCK // 2, BLOCK):
                    part.hold.release()
                done.set()

            async with cache.gathering.hold(cache.pool.slots):
                nursery.start_soon(reader)
                await trio.testing.wait_all_tasks_blocked()
                assert not done.is_set()
                assert [block.buffer.holders for block in cache.memory._partly.values()] == [1, 1]
            with trio.fail_after(2):
                await done.wait()

    run(test)
