"""Whole models go from warm to hot by being opened, though nobody's reads pass through the daemon."""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.local_tiers import run, until
from tierfs.blocks.ids import ObjectKey
from tierfs.cache.block_cache import BlockCache, FileFacts, blocks_of
from tierfs.cache.buffers import BufferPool
from tierfs.cache.promoter import Promoter
from tierfs.policy.admission import Mode
from tierfs.testing.sources import MemorySource, version_of
from tierfs.tiers.local import DirectoryTier

BLOCK = 64 << 10


class Models:
    """Two models of two files, a source that has them, and what an open of one does."""

    def __init__(self) -> None:
        rng = random.Random(3)
        self.data = {b"%s/%d.bin" % (model, n): rng.randbytes(4 * BLOCK + n) for model in (b"a", b"b") for n in (1, 2)}
        self.source = MemorySource(self.data, block_bytes=BLOCK)
        self.files = [
            FileFacts(version=version_of(path, data), size_bytes=len(data), path=path, model=path[:1], model_bytes=0)
            for path, data in self.data.items()
        ]

    def of(self, model: bytes) -> list[FileFacts]:
        return [file for file in self.files if file.model == model]


@asynccontextmanager
async def cached(
    models: Models, hot: Path, warm: Path, *, hot_bytes: int = 64 << 20, admission: Mode = "second"
) -> AsyncIterator[tuple[BlockCache, Promoter]]:
    tiers = [
        DirectoryTier("hot", [hot], block_bytes=BLOCK, capacity_bytes=hot_bytes, mapped=False),
        DirectoryTier("warm", [warm], block_bytes=BLOCK, capacity_bytes=64 << 20, mapped=False),
    ]
    pool = BufferPool(limit_bytes=16 * BLOCK, block_bytes=BLOCK)
    cache = BlockCache(
        source=models.source, tiers=tiers, pool=pool, block_bytes=BLOCK, source_timeout_s=5, hot_admission=admission
    )
    promoter = Promoter(cache, files_of=models.of, quiet_s=0.05)
    async with trio.open_nursery() as nursery:
        for tier in tiers:
            await nursery.start(tier.run)
        await nursery.start(lambda task_status: cache.run(task_status=task_status))
        await nursery.start(lambda task_status: promoter.run(task_status=task_status))
        yield cache, promoter
        nursery.cancel_scope.cancel()


async def load(cache: BlockCache, promoter: Promoter, file: FileFacts, *, blocks: int = 99) -> None:
    """One load of a file by a reader of the daemon."""
    cache.opened(file.version)
    promoter.opened(file)
    for block in blocks_of(file, cache.block_bytes)[:blocks]:
        await cache.load(file, block)
        await cache.tiers[1].flush()
    cache.memory.clear()
    cache.closed(file.version)


async def open_again(cache: BlockCache, promoter: Promoter, file: FileFacts) -> None:
    """One open in passthrough: nobody asks for a byte."""
    cache._hot_admission.opened(cache.key(file.version), trio.current_time() + 60)  # another load, not the same one
    promoter.opened(file)


def hot_bytes(cache: BlockCache, files: list[FileFacts]) -> list[int]:
    return [cache.tiers[0].resident_bytes(ObjectKey(file.version)) for file in files]


def test_a_model_that_is_opened_again_becomes_hot_whole(tmp_path: Path) -> None:
    async def test() -> None:
        models = Models()
        async with cached(models, tmp_path / "hot", tmp_path / "warm") as (cache, promoter):
            for file in models.files:
                await load(cache, promoter, file)
            assert hot_bytes(cache, models.files) == [0, 0, 0, 0]
            fetched = len(models.source.requests)
            await open_again(cache, promoter, models.of(b"a")[0])  # one file of it tells for the model
            await until(lambda: promoter.statistics().promoted_models == 1)
            assert hot_bytes(cache, models.of(b"a")) == [file.size_bytes for file in models.of(b"a")]
            assert hot_bytes(cache, models.of(b"b")) == [0, 0]
            assert len(models.source.requests) == fetched
            for file in models.of(b"a"):
                for block in blocks_of(file, BLOCK):
                    kept = await cache.load(file, block)
                    start = block * BLOCK
                    assert bytes(kept.buffer.view[: kept.length_bytes]) == models.data[file.path][start : start + BLOCK]

    run(test)


@pytest.mark.parametrize("admission", ["pinned", "second"])
def test_what_the_admission_does_not_want_stays_where_it_is(tmp_path: Path, admission: Mode) -> None:
    async def test() -> None:
        models = Models()
        async with cached(models, tmp_path / "hot", tmp_path / "warm", admission=admission) as (cache, promoter):
            for file in models.files:
                await load(cache, promoter, file)
            if admission == "pinned":
                await open_again(cache, promoter, models.files[0])
            await trio.sleep(0.3)
            assert hot_bytes(cache, models.files) == [0, 0, 0, 0]
            assert promoter.statistics().waiting_models == 0

    run(test)


def test_a_file_that_is_not_all_warm_is_not_fetched_for_it(tmp_path: Path) -> None:
    async def test() -> None:
        models = Models()
        whole, part = models.of(b"a")
        async with cached(models, tmp_path / "hot", tmp_path / "warm") as (cache, promoter):
            await load(cache, promoter, whole)
            await load(cache, promoter, part, blocks=2)
            fetched = len(models.source.requests)
            await open_again(cache, promoter, whole)
            await until(lambda: promoter.statistics().promoted_models == 1)
            assert hot_bytes(cache, [whole, part]) == [whole.size_bytes, 0]
            assert len(models.source.requests) == fetched

    run(test)


def test_a_model_larger_than_the_hot_tier_is_not_begun(tmp_path: Path) -> None:
    async def test() -> None:
        models = Models()
        async with cached(models, tmp_path / "hot", tmp_path / "warm", hot_bytes=6 * BLOCK) as (cache, promoter):
            for file in models.of(b"a"):
                await load(cache, promoter, file)
            await open_again(cache, promoter, models.files[0])
            await until(lambda: promoter.statistics().bypassed_models == 1)
            assert hot_bytes(cache, models.of(b"a")) == [0, 0]

    run(test)


def test_a_model_for_which_there_is_no_room_is_given_up(tmp_path: Path) -> None:
    async def test() -> None:
        models = Models()
        async with cached(models, tmp_path / "hot", tmp_path / "warm", hot_bytes=14 * BLOCK) as (cache, promoter):
            for file in models.files:
                await load(cache, promoter, file)
            await open_again(cache, promoter, models.of(b"a")[0])
            await until(lambda: promoter.statistics().promoted_models == 1)
            for file in models.of(b"a"):  # in use: it does not give way
                cache.opened(file.version)
            await open_again(cache, promoter, models.of(b"b")[0])
            await until(lambda: promoter.statistics().bypassed_models == 1)
            assert hot_bytes(cache, models.of(b"a")) == [file.size_bytes for file in models.of(b"a")]

    run(test)


def test_a_promotion_that_was_cut_off_goes_on_with_the_next_daemon(tmp_path: Path) -> None:
    async def first() -> None:
        models = Models()
        async with cached(models, tmp_path / "hot", tmp_path / "warm") as (cache, promoter):
            for file in models.files:
                await load(cache, promoter, file)
            await open_again(cache, promoter, models.of(b"a")[0])
            await until(lambda: sum(hot_bytes(cache, models.of(b"a"))) > 0)

    async def second() -> None:
        models = Models()
        async with cached(models, tmp_path / "hot", tmp_path / "warm") as (cache, promoter):
            before = sum(hot_bytes(cache, models.of(b"a")))
            assert before > 0
            promoter.resume(models.files)
            await until(lambda: promoter.statistics().promoted_models == 1)
            assert hot_bytes(cache, models.of(b"a")) == [file.size_bytes for file in models.of(b"a")]
            lacked = sum(file.size_bytes for file in models.of(b"a")) - before
            assert promoter.statistics().promoted_bytes == lacked
            assert hot_bytes(cache, models.of(b"b")) == [0, 0]
            assert models.source.requests == []

    run(first)
    run(second)


def test_a_load_that_goes_on_is_waited_for_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models()
    pool = BufferPool(limit_bytes=16 * BLOCK, block_bytes=BLOCK)
    tiers = [
        DirectoryTier(name, [tmp_path / name], block_bytes=BLOCK, capacity_bytes=1 << 20, mapped=False)
        for name in ("hot", "warm")
    ]
    cache = BlockCache(source=models.source, tiers=tiers, pool=pool, block_bytes=BLOCK, source_timeout_s=5)
    promoter = Promoter(cache, files_of=models.of)
    lacks: Callable[[FileFacts], bool] = lambda file: True  # noqa: E731
    monkeypatch.setattr(promoter, "_lacks", lacks)

    async def test() -> None:
        due = []
        for second in range(100):
            promoter.opened(models.files[0])
            model, wait_s = promoter._next()
            if model is not None:
                due.append(second)
                break
            assert 0 < wait_s <= 5
            await trio.sleep(1)
        assert due == [60]

    clock = trio.testing.MockClock(autojump_threshold=0)
    trio.run(test, clock=clock)
