"""Promotions from warm to hot that end at any moment, and what must be true afterwards: by `kill -9`, on this machine
and in the test VM (tests/contract/test_promotion_crashes.py, tests/vm/test_promotions.py), or by a power cut
(tests/vm/promote_job.py). Cache, promoter and tiers are the real ones; the source is memory, and may not be asked.
"""

import logging
import mmap
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from tests.local_tiers import object_files, until
from tests.pmem_pools import killed_at_a_random_point
from tierfs.blocks.spans import block_length
from tierfs.cache.block_cache import BlockCache, FileFacts, blocks_of
from tierfs.cache.buffers import BufferPool
from tierfs.cache.promoter import Promoter
from tierfs.policy.admission import Mode
from tierfs.testing.sources import MemorySource, version_of
from tierfs.tiers.interface import LocalTier
from tierfs.tiers.local import DirectoryTier
from tierfs.tiers.objects import allocated_bytes
from tierfs.tiers.pmem.pool import Pool
from tierfs.tiers.pool_layout import HEADER_BYTES, LAYOUT_NAME, Layout

BLOCK = 64 << 10
MODELS = [b"m%d" % number for number in range(8)]
HOT_BYTES = 42 * BLOCK  # three models of the eight
IDLE_S = 60.0  # an emulated processor on a busy machine
NAMES = {"residency.pool", "format", "lock", "reserve", "objects", "dying"}
# What no crash may bring about. Files of no row are: data is durable before its row.
FORBIDDEN = ("dropped_slots", "residency_unreadable", "corrupt_block", "object_damaged", "out_of_service", "_by_bug")

CONTENT = {
    b"%s/%d.bin" % (model, part): random.Random(f"{model!r}{part}").randbytes(6 * BLOCK + 1013 * part + 7)
    for model in MODELS
    for part in range(2)
}
FILES = [
    FileFacts(version=version_of(path, data), size_bytes=len(data), path=path, model=path[:2], model_bytes=0)
    for path, data in CONTENT.items()
]


@dataclass(frozen=True)
class Place:
    """The directories of the two tiers. ``pretend``: hot is no DAX file system, and gets a pool all the same."""

    hot: Path
    warm: Path
    pretend: bool


@dataclass
class Seen:
    """What was found after crashes."""

    blocks: int = 0  # resident, each compared with the source
    begun: int = 0  # models that were partly hot
    resumed: int = 0  # of these, all hot when the next daemon was through
    swept: int = 0  # files that no transaction had made resident, gone at the next start
    seconds: list[float] = field(default_factory=list)  # opening, comparing, space, promoting, comparing, space

    def add(self, other: "Seen") -> None:
        """Sum them up."""
        self.blocks += other.blocks
        self.begun += other.begun
        self.resumed += other.resumed
        self.swept += other.swept


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def files_of(model: bytes) -> list[FileFacts]:
    """The files of a model."""
    return [file for file in FILES if file.model == model]


def _fast_clock() -> float:
    """A model cools in a third of a second, so that each one that comes finds one to push out."""
    return time.time() * 1e4


@asynccontextmanager
async def opened(
    place: Place, *, admission: Mode = "first"
) -> AsyncIterator[tuple[BlockCache, Promoter, DirectoryTier]]:
    """Both tiers, a cache over them, and a promoter that does not run yet."""
    hot = DirectoryTier(
        "hot", [place.hot], block_bytes=BLOCK, capacity_bytes=HOT_BYTES, mapped=True, clock=_fast_clock,
        residency="pool" if place.pretend else "asked",
    )  # fmt: skip
    warm = DirectoryTier(
        "warm", [place.warm], block_bytes=BLOCK, capacity_bytes=64 << 20, mapped=False, clock=_fast_clock
    )
    source = MemorySource(CONTENT, block_bytes=BLOCK)
    cache = BlockCache(
        source=source, tiers=[hot, warm], pool=BufferPool(limit_bytes=16 * BLOCK, block_bytes=BLOCK),
        block_bytes=BLOCK, source_timeout_s=30, hot_admission=admission,
    )  # fmt: skip
    promoter = Promoter(cache, files_of=files_of, quiet_s=0.0)
    async with trio.open_nursery() as nursery:
        for tier in (hot, warm):
            await nursery.start(tier.run)
        assert hot.statistics().residency == "libpmemobj pool", hot.statistics()
        await nursery.start(lambda task_status: cache.run(task_status=task_status))
        yield cache, promoter, hot
        nursery.cancel_scope.cancel()
    assert admission == "pinned" or source.requests == [], "a promotion asked the source"


async def prepare(place: Place) -> None:
    """Bring everything into warm, as earlier loads did."""
    async with opened(place, admission="pinned") as (cache, _, hot):
        for file in FILES:
            for block in blocks_of(file, BLOCK):
                await cache.load(file, block)
                await cache.tiers[1].flush()
            assert cache.tiers[1].resident_bytes(cache.key(file.version)) == file.size_bytes
        assert hot.statistics().objects == 0


async def promote_for_ever(place: Place, seed: int, begun: Callable[[bytes], object]) -> None:
    """Open models in random order, each pushing out colder ones, and evict some; ``begun`` is told of each."""
    point = random.Random(seed)
    async with opened(place) as (cache, promoter, hot), trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: promoter.run(task_status=task_status))
        while True:
            model = point.choice(MODELS)
            for file in files_of(model):
                cache.opened(file.version)
                promoter.opened(file)
                cache.closed(file.version)
            begun(model[1:])
            await _idle(promoter)
            if point.random() < 0.2:
                await hot.evict(cache.key(point.choice(FILES).version))


async def check(place: Place) -> Seen:
    """What the next daemon finds: only right bytes, no leak; and it goes on with what was begun."""
    seen, log = Seen(), _Log()
    start_s = time.monotonic()

    def lap() -> None:
        seen.seconds.append(round(time.monotonic() - start_s - sum(seen.seconds), 1))

    logger = logging.getLogger("tierfs")
    level = logger.level
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    try:
        async with opened(place) as (cache, promoter, hot):
            lap()
            for file in FILES:
                seen.blocks += await _compare(cache, hot, file)
            lap()
            await _space(place, hot)
            lap()
            begun = [model for model in MODELS if 0 < _hot_bytes(cache, hot, model) < _bytes_of(model)]
            async with trio.open_nursery() as nursery:
                await nursery.start(lambda task_status: promoter.run(task_status=task_status))
                promoter.resume(FILES)
                await _idle(promoter)
                nursery.cancel_scope.cancel()
            lap()
            seen.begun = len(begun)
            seen.resumed = sum(_hot_bytes(cache, hot, model) == _bytes_of(model) for model in begun)
            for file in FILES:
                await _compare(cache, hot, file)
            lap()
            await _space(place, hot)
            lap()
    finally:
        logger.removeHandler(log)
        logger.setLevel(level)
    for line in log.lines:
        assert not any(word in line for word in FORBIDDEN), line
        if line.startswith("tier_reconciled"):
            counts = dict(word.split("=") for word in line.split() if "=" in word)
            assert counts["dropped_rows"] == "0", f"a row without its file: {line}"
            seen.swept += int(counts["removed_objects"])
    return seen


async def empty(place: Place) -> None:
    """Evict everything: the pool has no slot in use then, and the directory no file."""
    async with opened(place) as (cache, _, hot):
        for file in FILES:
            await hot.evict(cache.key(file.version))
        await _space(place, hot)
        assert hot.statistics().used_bytes == 0
    assert slots_in_use(place.hot / "residency.pool") == (0, 0)


def slots_in_use(path: Path) -> tuple[int, int]:
    """How many slots of objects and records a pool that nobody has open has in use."""
    pool = Pool.open(path, LAYOUT_NAME)
    try:
        layout = Layout.from_header(pool.read(0, HEADER_BYTES), root_bytes=pool.root_bytes)
        objects, records = (
            int.from_bytes(pool.read(table.bits_offset, table.bits_bytes), "little").bit_count()
            for table in (layout.objects, layout.records)
        )
    finally:
        pool.close()
    return objects, records


def kill_and_check(place: Place, *, kills: int, longest_s: float, seed: int) -> Seen:
    """Kill a promoting process at so many random moments, up to ``longest_s`` after it began; what was found."""
    point = random.Random(seed)
    total = Seen()
    for number in range(kills):

        def work(tell: Callable[[bytes], object], number: int = number) -> None:
            trio.run(partial(promote_for_ever, place, seed + number, tell))

        killed_at_a_random_point(work, point, longest_s)
        total.add(trio.run(check, place))
    return total


def _bytes_of(model: bytes) -> int:
    return sum(file.size_bytes for file in files_of(model))


def _hot_bytes(cache: BlockCache, hot: LocalTier, model: bytes) -> int:
    return sum(hot.resident_bytes(cache.key(file.version)) for file in files_of(model))


async def _idle(promoter: Promoter) -> None:
    """Until nothing waits for it and nothing is under way."""
    with trio.fail_after(IDLE_S):
        await until(lambda: not promoter.statistics().waiting_models and not promoter.statistics().promoting)
    await trio.lowlevel.checkpoint()


async def _compare(cache: BlockCache, hot: LocalTier, file: FileFacts) -> int:
    """Every resident block of a file has the bytes of the source, read from the medium; how many there are."""
    count = 0
    for block in blocks_of(file, BLOCK):
        if hot.resident(cache.key(file.version), block):
            buffer = memoryview(mmap.mmap(-1, BLOCK))[: block_length(file.size_bytes, BLOCK, block)]
            assert await hot.read_block(cache.key(file.version), block, buffer), f"{file.path!r} {block}: unreadable"
            start = block * BLOCK
            assert buffer == CONTENT[file.path][start : start + len(buffer)], f"{file.path!r} {block}: wrong bytes"
            count += 1
    return count


async def _space(place: Place, hot: LocalTier) -> None:
    """What the tier says it takes is what its files take, once what it evicted has left; nothing else is there."""

    def taken() -> int:
        return sum(allocated_bytes(file.stat()) for file in object_files(place.hot))

    with trio.move_on_after(IDLE_S):
        await until(
            lambda: (hot.statistics().used_bytes, hot.statistics().objects) == (taken(), len(object_files(place.hot)))
        )
    statistics = hot.statistics()
    assert (statistics.used_bytes, statistics.objects) == (taken(), len(object_files(place.hot)))
    assert statistics.used_bytes <= HOT_BYTES
    assert (statistics.corrupt_blocks, statistics.failed_reads, statistics.failed_writes) == (0, 0, 0)
    assert statistics.state == "ok", statistics.reason
    assert os.listdir(place.hot / "dying") == []
    assert {path.name for path in place.hot.iterdir()} == NAMES
