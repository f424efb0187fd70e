"""The block cache over a source in memory: one load per block, deadlines, priorities, nothing unverified."""

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.local_tiers import running as tier_running
from tests.local_tiers import warm
from tierfs.blocks.errors import CorruptBlock, SourceRefused, SourceTimeout, StaleVersion
from tierfs.blocks.ids import ContentId, ObjectKey, VersionId
from tierfs.blocks.spans import Span
from tierfs.cache.block_cache import BlockCache, FileFacts
from tierfs.cache.buffers import BufferPool
from tierfs.cache.memory import BlockMemory, MemoryBlock
from tierfs.cache.prefetcher import Prefetcher
from tierfs.testing.sources import MemorySource, version_of
from tierfs.tiers.interface import Offer

BLOCK = 64 << 10
DATA = random.Random(1).randbytes(10 * BLOCK + 77)
PATH = b"m/model.bin"
FILE = FileFacts(version=version_of(PATH, DATA), size_bytes=len(DATA), path=PATH, model=b"m", model_bytes=len(DATA))


@asynccontextmanager
async def running(source: MemorySource, *, slots: int = 16, timeout_s: float = 5.0) -> AsyncIterator[BlockCache]:
    pool = BufferPool(limit_bytes=slots * BLOCK, block_bytes=BLOCK)
    cache = BlockCache(source=source, tiers=[], pool=pool, block_bytes=BLOCK, source_timeout_s=timeout_s)
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: cache.run(task_status=task_status))
        yield cache
        nursery.cancel_scope.cancel()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(20):
            await test()

    trio.run(bounded)


def expected(span: Span) -> bytes:
    start = span.block * BLOCK + span.start_bytes
    return DATA[start : start + span.length_bytes]


def test_random_spans_are_the_right_bytes_with_a_pool_smaller_than_the_file() -> None:
    async def test() -> None:
        rng = random.Random(2)
        async with running(MemorySource({PATH: DATA}, block_bytes=BLOCK), slots=4) as cache:
            for _ in range(300):
                block = rng.randrange(11)
                length = BLOCK if block < 10 else 77
                start = rng.randrange(length)
                span = Span(block, start, rng.randint(1, length - start))
                assert bytes(await cache.read(FILE, span, sequential=rng.random() < 0.5)) == expected(span)

    run(test)


def test_many_waiters_cause_one_request_and_all_get_the_bytes() -> None:
    async def test() -> None:
        source = MemorySource({PATH: DATA}, block_bytes=BLOCK)
        source.gate = trio.Event()
        right: list[bool] = []

        async def reader() -> None:
            span = Span(3, 5, 1000)
            right.append(bytes(await cache.read(FILE, span, sequential=True)) == expected(span))

        async with running(source) as cache, trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(reader)
            await trio.testing.wait_all_tasks_blocked()
            source.gate.set()
        assert right == [True] * 50
        assert len(source.requests) == 1

    run(test)


def test_cancelled_reader_does_not_cancel_the_load() -> None:
    async def test() -> None:
        source = MemorySource({PATH: DATA}, block_bytes=BLOCK)
        source.gate = trio.Event()
        async with running(source) as cache, trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def leaving() -> None:
                with scope:
                    await cache.read(FILE, Span(0, 0, 10), sequential=True)

            async def staying() -> None:
                assert bytes(await cache.read(FILE, Span(0, 0, 10), sequential=True)) == DATA[:10]

            nursery.start_soon(leaving)
            nursery.start_soon(staying)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            source.gate.set()
        assert len(source.requests) == 1

    run(test)


def test_corrupt_answers_are_asked_for_again_and_never_served() -> None:
    async def test() -> None:
        source = MemorySource({PATH: DATA}, block_bytes=BLOCK)
        source.corrupt_next = 2
        async with running(source) as cache:
            assert bytes(await cache.read(FILE, Span(0, 0, BLOCK), sequential=True)) == DATA[:BLOCK]
            assert cache.statistics.corrupt_blocks == 2

    run(test)


def test_a_source_that_only_sends_wrong_bytes_is_an_error_and_heals() -> None:
    async def test() -> None:
        source = MemorySource({PATH: DATA}, block_bytes=BLOCK)
        source.corrupt_next = 1000
        async with running(source) as cache:
            with pytest.raises(CorruptBlock):
                await cache.read(FILE, Span(0, 0, 1), sequential=True)
            assert len(cache.memory) == 0
            source.corrupt_next = 0
            assert bytes(await cache.read(FILE, Span(0, 0, 1), sequential=True)) == DATA[:1]

    run(test)


def test_a_miss_is_retried_until_the_deadline_and_then_fails_that_reader_only() -> None:
    async def test() -> None:
        source = MemorySource({PATH: DATA}, block_bytes=BLOCK)
        async with running(source, timeout_s=0.4) as cache:
            await cache.read(FILE, Span(1, 0, 1), sequential=True)
            source.unavailable = True
            with pytest.raises(SourceTimeout):
                await cache.read(FILE, Span(0, 0, 1), sequential=True)
            # what is in memory goes on being served, and no buffer is held by the failed load
            assert bytes(await cache.read(FILE, Span(1, 0, 1), sequential=True)) == DATA[BLOCK : BLOCK + 1]
            source.unavailable = False
            # readers of the same page queue up in the kernel: the next one fails with the first, and brings the block
            with pytest.raises(SourceTimeout):
                await cache.read(FILE, Span(0, 0, 1), sequential=True)
            await trio.testing.wait_all_tasks_blocked()
            assert bytes(await cache.read(FILE, Span(0, 0, 1), sequential=True)) == DATA[:1]

    run(test)


def test_a_short_outage_is_only_time() -> None:
    async def test() -> None:
        source = MemorySource({PATH: DATA}, block_bytes=BLOCK)
        source.unavailable = True
        async with running(source) as cache, trio.open_nursery() as nursery:

            async def heal() -> None:
                while cache.statistics.source_retries < 2:
                    await trio.lowlevel.checkpoint()
                source.unavailable = False

            nursery.start_soon(heal)
            assert bytes(await cache.read(FILE, Span(0, 0, 9), sequential=True)) == DATA[:9]

    run(test)


def test_a_version_the_source_no_longer_has_is_stale() -> None:
    async def test() -> None:
        source = MemorySource({PATH: DATA}, block_bytes=BLOCK)
        async with running(source) as cache:
            source.publish({PATH: DATA[::-1]})
            with pytest.raises(StaleVersion):
                await cache.read(FILE, Span(0, 0, 1), sequential=True)

    run(test)


def test_demand_overtakes_queued_prefetches() -> None:
    async def test() -> None:
        source = MemorySource({PATH: DATA}, block_bytes=BLOCK)
        source.gate = trio.Event()
        async with running(source, slots=16) as cache, trio.open_nursery() as nursery:
            for block in range(8):
                cache.prefetch(FILE, block)
            await trio.testing.wait_all_tasks_blocked()
            started = len(source.requests)
            assert 0 < started < 8  # the rest waits for a slot

            async def demand() -> None:
                await cache.read(FILE, Span(10, 0, 1), sequential=True)

            nursery.start_soon(demand)
            await trio.testing.wait_all_tasks_blocked()
            assert source.requests[started][1] == 10
            source.gate.set()

    run(test)


def test_a_reader_that_joins_a_queued_prefetch_moves_it_forward() -> None:
    async def test() -> None:
        source = MemorySource({PATH: DATA}, block_bytes=BLOCK)
        source.gate = trio.Event()
        async with running(source, slots=16) as cache, trio.open_nursery() as nursery:
            for block in range(10):
                cache.prefetch(FILE, block)
            await trio.testing.wait_all_tasks_blocked()
            started = len(source.requests)

            async def demand() -> None:
                assert bytes(await cache.read(FILE, Span(9, 0, 5), sequential=True)) == DATA[9 * BLOCK : 9 * BLOCK + 5]

            nursery.start_soon(demand)
            await trio.testing.wait_all_tasks_blocked()
            source.gate.set()
            await trio.testing.wait_all_tasks_blocked()
            assert source.requests[started][1] == 9

    run(test)


def test_prefetch_takes_no_more_than_its_budget() -> None:
    async def test() -> None:
        source = MemorySource({PATH: DATA}, block_bytes=BLOCK)
        async with running(source, slots=8) as cache, trio.open_nursery() as nursery:
            prefetcher = Prefetcher(cache)
            await nursery.start(lambda task_status: prefetcher.run(task_status=task_status))
            assert prefetcher.plan(FILE, range(11)) is None
            await trio.testing.wait_all_tasks_blocked()
            assert cache.memory.prefetched_unread == 4  # half of the pool
            await cache.read(FILE, Span(0, 0, BLOCK), sequential=True)
            await trio.testing.wait_all_tasks_blocked()
            assert sorted(block for _, block in source.requests) == [0, 1, 2, 3, 4]
            prefetcher.forget(FILE)
            nursery.cancel_scope.cancel()

    run(test)


def test_a_full_queue_says_which_block_had_no_room() -> None:
    async def test() -> None:
        async with running(MemorySource({PATH: DATA}, block_bytes=BLOCK)) as cache:
            prefetcher = Prefetcher(cache)
            assert prefetcher.plan(FILE, range(0, 1000)) == 256
            assert prefetcher.dropped_blocks == 1000 - 256

    run(test)


def test_blocks_in_memory_stay_reachable_when_the_content_id_becomes_known() -> None:
    async def test() -> None:
        source = MemorySource({PATH: DATA}, block_bytes=BLOCK)
        async with running(source) as cache:
            await cache.read(FILE, Span(2, 0, 1), sequential=True)
            cache.learn({FILE.version: ContentId(b"c" * 16)})
            assert cache.key(FILE.version) == ObjectKey(b"c" * 16)
            await cache.read(FILE, Span(2, 0, 1), sequential=True)
            assert len(source.requests) == 1

    run(test)


def test_every_buffer_is_back_after_failures_and_cancellation() -> None:
    async def test() -> None:
        source = MemorySource({PATH: DATA}, block_bytes=BLOCK)
        source.gate = trio.Event()
        async with running(source, slots=8, timeout_s=0.2) as cache:
            for block in range(3):
                with pytest.raises(SourceTimeout):
                    await cache.read(FILE, Span(block, 0, 1), sequential=True)
            pool = cache.pool
        cache.memory.clear()
        assert pool.used_slots == 0

    run(test)


@pytest.mark.parametrize("at_once", [False, True])
def test_files_of_different_sizes_that_are_said_to_be_one_content_never_give_each_others_lengths(at_once: bool) -> None:
    """By a source that lies: a reader gets bytes of its own file, or an error."""
    small = FileFacts(version=version_of(b"s", DATA[:10]), size_bytes=10, path=b"s", model=b"s", model_bytes=10)

    async def test() -> None:
        source = MemorySource({PATH: DATA, b"s": DATA[:10]}, block_bytes=BLOCK)
        source.gate = trio.Event()
        ends: list[object] = []

        async def reader(file: FileFacts, length: int) -> None:
            try:
                ends.append(bytes(await cache.read(file, Span(0, 0, length), sequential=True)) == DATA[:length])
            except SourceRefused as error:
                ends.append(str(error))

        async with running(source) as cache:
            cache.learn({FILE.version: ContentId(b"c" * 16), small.version: ContentId(b"c" * 16)})
            if not at_once:
                source.gate.set()
                for file, length in ((small, 10), (FILE, BLOCK), (small, 10)):
                    await reader(file, length)
                assert ends == [True] * 3
                return
            async with trio.open_nursery() as nursery:
                nursery.start_soon(reader, small, 10)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(reader, FILE, BLOCK)
                await trio.testing.wait_all_tasks_blocked()
                source.gate.set()
            assert True in ends and any("another size" in str(end) for end in ends)

    run(test)


def test_two_versions_that_turn_out_to_be_one_content_while_loading_are_never_mixed_up() -> None:
    async def test() -> None:
        path, other = b"m/small.bin", b"m/other.bin"
        small, noise = bytes(1000), b"\x01" * 1000
        file = FileFacts(version_of(path, small), 1000, path, b"m", 0)
        foreign = FileFacts(version_of(other, noise), 1000, other, b"m", 0)
        for _ in range(30):
            source = MemorySource({path: small, other: noise}, block_bytes=BLOCK)
            source.gate = trio.Event()
            async with running(source, slots=4) as cache, trio.open_nursery() as nursery:

                async def read(cache: BlockCache = cache) -> None:
                    assert bytes(await cache.read(file, Span(0, 0, 1000), sequential=True)) == small

                nursery.start_soon(read)
                await trio.testing.wait_all_tasks_blocked()
                cache.learn({file.version: ContentId(b"c" * 16)})
                nursery.start_soon(read)
                await trio.testing.wait_all_tasks_blocked()
                source.gate.set()
                await trio.testing.wait_all_tasks_blocked()
                assert len(source.requests) == 1
                for _ in range(3):  # whoever takes the next buffers must not show through
                    await cache.read(foreign, Span(0, 0, 1000), sequential=True)
                    cache.memory.drop((cache.key(foreign.version), 0))
                assert bytes(await cache.read(file, Span(0, 0, 1000), sequential=True)) == small

    run(test)


def test_a_block_that_was_dropped_while_its_reader_was_on_the_way_stays_dropped() -> None:
    async def test() -> None:
        async with running(MemorySource({PATH: DATA}, block_bytes=BLOCK)) as cache:
            block = await cache.load(FILE, 0)
            key = (cache.key(FILE.version), 0)
            cache.memory.drop(key)
            cache.memory.served(key, block, BLOCK)
            assert key not in cache.memory
            assert cache.pool.used_slots == 0

    run(test)


def test_a_block_that_leaves_memory_before_the_mover_has_its_turn_is_offered_all_the_same(tmp_path: Path) -> None:
    """Two files turn out to be equal just then, and one block of the two is dropped."""

    async def test() -> None:
        source = MemorySource({PATH: DATA}, block_bytes=BLOCK)
        async with running(source) as cache, tier_running(warm(tmp_path)) as tier:
            cache.on_room = cache.memory.clear  # called between the end of the load and the turn of who waits for it
            assert await cache.load_into(tier, FILE, 3) is Offer.ACCEPTED
            await tier.flush()
            buffer = memoryview(bytearray(BLOCK))
            assert await tier.read_block(cache.key(FILE.version), 3, buffer)
            assert buffer == DATA[3 * BLOCK : 4 * BLOCK]
            assert cache.pool.used_slots == 0

    run(test)


def test_prefetch_keeps_to_its_rate_and_demand_does_not_wait_for_it() -> None:
    async def test() -> None:
        source = MemorySource({PATH: DATA}, block_bytes=BLOCK)
        async with running(source, slots=32) as cache, trio.open_nursery() as nursery:
            prefetcher = Prefetcher(cache, bytes_per_s=2 * BLOCK)
            await nursery.start(lambda task_status: prefetcher.run(task_status=task_status))
            prefetcher.plan(FILE, range(10))
            while len(source.requests) < 2:
                await trio.lowlevel.checkpoint()
            await cache.read(FILE, Span(9, 0, 1), sequential=True)
            asked = [block for _, block in source.requests]
            assert 9 in asked and len(asked) <= 4  # two, one that was begun, and the reader's
            while len(source.requests) < 5:  # half a second later
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

    run(test)


def test_learning_of_a_hundred_thousand_files_takes_one_pass_over_memory() -> None:
    memory = BlockMemory()
    pool = BufferPool(limit_bytes=64 << 12, block_bytes=1 << 12)

    async def test() -> None:
        for number in range(64):
            buffer = await pool.acquire(timeout_s=1)
            memory.add((ObjectKey(VersionId(b"%016d" % number)), 0), MemoryBlock(buffer, 1, b"", prefetched=False))  # type: ignore[arg-type]
        names = {ObjectKey(VersionId(b"%016d" % n)): ObjectKey(VersionId(b"c%015d" % n)) for n in range(32, 100_000)}
        began = time.perf_counter()
        memory.rename(names)
        assert time.perf_counter() - began < 0.1
        kept = [number for number in range(64) if (ObjectKey(VersionId(b"%016d" % number)), 0) in memory]
        renamed = [number for number in range(64) if (ObjectKey(VersionId(b"c%015d" % number)), 0) in memory]
        assert (kept, renamed) == (list(range(32)), list(range(32, 64)))

    trio.run(test)
