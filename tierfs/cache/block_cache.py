"""The block cache: one read of one span, from the nearest place that has it.

Called by file views (demand), by the prefetcher and by the mover. Below it: the buffer pool, the local tiers in order
of nearness, one source.

    read(span) ── in memory ──────────────────────────────────────────────────► reply
        │ no
        ├─ resident in a tier, answerable at once (mapped, or page cache) ─────► reply
        ├─ resident in a tier, a lone small span of a verified block:
        │                          asked for and looked for a few times, else pread in a thread ─► reply
        └─ join the load of the block:  tier.read_block, nearest first, else the source
                                        digest checked, put into memory, offered to the tiers that want it

What must hold:
- One load per block however many wait. A load belongs to the cache's nursery, not to a reader.
- Nothing is put into memory or offered to a tier before its digest was compared.
- While the source is away, its loads hold no buffer and no slot during back-off, and never more than a quarter of the
  pool, so what is resident goes on being served.
- Each reader has its own deadline; a load goes on as long as one reader waits. Readers of one page queue up in the
  kernel, and each asks again when the one before it has failed: those get the same error at once, else the tenth of
  them would wait ten deadlines.
"""

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import trio

from tierfs.blocks.errors import (
    CorruptBlock,
    NoBuffer,
    SourceRefused,
    SourceTimeout,
    SourceUnavailable,
    TierFailed,
    TierfsError,
)
from tierfs.blocks.ids import ContentId, ObjectKey, VersionId, digest_block
from tierfs.blocks.spans import Span, block_length, whole_block
from tierfs.cache.buffers import BlockLease, Buffer, BufferPool, PartBudget
from tierfs.cache.inflight import Load, Slots
from tierfs.cache.latency import came_from
from tierfs.cache.memory import BlockKey, BlockMemory, MemoryBlock
from tierfs.policy.admission import HotAdmission, Mode
from tierfs.tiers.interface import LentFile, LocalTier, ObjectFacts, Offer, Part, Source

log = logging.getLogger(__name__)

_Found = TypeVar("_Found")  # bytes, or their place

_CORRUPT_TRIES = 3  # a block the source sends wrong this often in a row is given up for this load
_BACKOFF_FIRST_S = 0.05
_BACKOFF_LIMIT_S = 2.0
_SAME_OUTAGE_S = 1.0
_TIMED_OUT_MAX = 10_000
_SOURCE_LOADS = 32  # fetches at once: bandwidth x delay of a fast, far source (128 MiB of 4 MiB blocks)
_WHOLE_S = 5.0  # an open waits no longer for the tiers to hand out an object; it works without, too
_LOCAL_LOADS = 8  # whole-block reads from local tiers at once; NVMe is saturated by fewer


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What the cache must know of a file: one version, as the catalog has it."""

    version: VersionId
    size_bytes: int
    path: bytes
    model: bytes
    model_bytes: int

    @property
    def name(self) -> str:
        """The path for people."""
        return self.path.decode("utf-8", "backslashreplace")


@dataclass
class CacheStatistics:
    """Counters since the start of the daemon."""

    memory_hit_blocks: int = 0
    source_blocks: int = 0
    source_bytes: int = 0
    source_retries: int = 0
    corrupt_blocks: int = 0  # from the source
    failed_loads: int = 0
    late_handouts: int = 0  # opens that no tier gave a whole object in time
    tier_bytes: int = 0  # loaded from local tiers as whole blocks


class Busy:
    """How long at least one of many overlapping things was under way: bytes over this is their common rate."""

    def __init__(self) -> None:
        self._running = 0
        self._since_s = 0.0
        self.total_s = 0.0

    def __enter__(self) -> None:
        if self._running == 0:
            self._since_s = trio.current_time()
        self._running += 1

    def __exit__(self, *exception: object) -> None:
        self._running -= 1
        if self._running == 0:
            self.total_s += trio.current_time() - self._since_s


class BlockCache:
    """See the head of this file. Build it, then keep ``run()`` running for as long as anybody reads."""

    def __init__(
        self,
        *,
        source: Source,
        tiers: Sequence[LocalTier],
        pool: BufferPool,
        block_bytes: int,
        source_timeout_s: float,
        hot_admission: Mode = "first",
    ) -> None:
        self.block_bytes = block_bytes
        self.tiers = tuple(tiers)
        self.source = source
        self.pool = pool
        self.memory = BlockMemory()
        self.statistics = CacheStatistics()
        self._timeout_s = source_timeout_s
        self._hot_admission = HotAdmission(hot_admission)
        self._contents: dict[VersionId, ContentId] = {}
        self._loads: dict[BlockKey, Load] = {}
        self._timed_out: dict[BlockKey, float] = {}  # when a reader last waited for it in vain
        self._source_slots = Slots(max(2, min(_SOURCE_LOADS, pool.slots // 4)))
        self._local_slots = Slots(max(2, min(_LOCAL_LOADS, pool.slots // 4)))
        self._leased = 0  # buffers that tiers have yet to write from
        self._leased_max = max(2, pool.slots // 4)
        # Loads under way hold up to half of the buffers: what waits for one must never hold them all.
        self.gathering = PartBudget(pool.slots // 2)
        self._source_busy = Busy()
        self._tier_busy = {tier.name: Busy() for tier in self.tiers}
        self._tier_bytes = {tier.name: 0 for tier in self.tiers}
        self.is_pinned: Callable[[VersionId], bool] = lambda version: False  # see fs/pins.py
        self._nursery: trio.Nursery | None = None
        # The prefetcher listens: a load ended; a prefetched block was read; a sequential reader has to wait.
        self.on_room: Callable[[], None] = lambda: None
        self.on_prefetched_read: Callable[[], None] = lambda: None
        self.on_wait: Callable[[], None] = lambda: None
        # See model_loads.py: so many bytes of a file were taken from the source or the tier of that name.
        self.on_brought: Callable[[FileFacts, str, int], None] = lambda file, place, length_bytes: None
        pool.reclaim = self.memory.reclaim
        pool.recycle = self.memory.recycle

    async def run(self, *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Own the loads. Cancelling it cancels them all; their waiters get SourceUnavailable."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None
                for load in self._loads.values():
                    load.error = load.error or SourceUnavailable("the daemon is stopping")
                    load.done.set()

    def key(self, version: VersionId) -> ObjectKey:
        """The key under which this version's blocks are known now."""
        return ObjectKey(self._contents.get(version, version))

    def learn(self, contents: Mapping[VersionId, ContentId]) -> None:
        """Content ids became known. Blocks in memory under the version's key are renamed, tiers told."""
        news = {
            ObjectKey(version): ObjectKey(content)
            for version, content in contents.items()
            if self._contents.get(version) != content
        }
        for version, content in news.items():
            for tier in self.tiers:
                tier.alias(version, content)
        self.memory.rename(news)
        self._rename_loads(news)
        self._contents.update(contents)

    def _rename_loads(self, keys: Mapping[ObjectKey, ObjectKey]) -> None:
        """Who comes from now on joins the load under its new key. Where both are under way, both end by themselves."""
        for key in [key for key in self._loads if key[0] in keys]:
            renamed = (keys[key[0]], key[1])
            if renamed not in self._loads:
                load = self._loads.pop(key)
                load.key = renamed
                self._loads[renamed] = load

    def retain(self, versions: Set[VersionId]) -> None:
        """Forget the content ids of all other versions: neither in the newest catalog nor open."""
        self._contents = {version: content for version, content in self._contents.items() if version in versions}
        for tier in self.tiers:
            tier.retain(versions)

    def opened(self, version: VersionId) -> None:
        """A file was opened: it counts for placement, and is not evicted until closed."""
        self._hot_admission.opened(self.key(version), trio.current_time())
        for tier in self.tiers:
            tier.touch(ObjectKey(version))
            tier.pin(ObjectKey(version))

    def hot_admits(self, version: VersionId) -> bool:
        """Whether that content may enter the hot tier by being read."""
        return self._hot_admission.admits(self.key(version), pinned=self.is_pinned(version))

    def configure(self, *, source_timeout_s: float, hot_admission: Mode) -> None:
        """Other settings for all waits that begin, and all blocks that come, from now on."""
        self._timeout_s = source_timeout_s
        self._hot_admission.mode = hot_admission

    def closed(self, version: VersionId) -> None:
        """The counterpart of opened()."""
        for tier in self.tiers:
            tier.unpin(ObjectKey(version))

    def facts(self, file: FileFacts) -> ObjectFacts:
        """The same file in the words of the tiers."""
        return ObjectFacts(
            key=self.key(file.version),
            size_bytes=file.size_bytes,
            block_bytes=self.block_bytes,
            path=file.path,
            model=file.model,
            model_bytes=file.model_bytes,
        )

    def read_nowait(self, file: FileFacts, span: Span) -> memoryview | None:
        """The span if memory or a tier has it at once. For an immediate reply: valid until the next checkpoint, and
        perhaps a view of mapped memory, which Python must not touch.
        """
        key = self.key(file.version)
        found = self._in_memory(file, key, span.block)
        if found is not None:
            self.statistics.memory_hit_blocks += 1
            return self._serve((key, span.block), found, span)
        tier = self._nearest(key, span.block)
        return self._noted(file, tier, span, tier.read_nowait(key, span)) if tier is not None else None

    async def read_soon(self, file: FileFacts, span: Span) -> memoryview | None:
        """The span, if the nearest tier's medium has it within some tens of microseconds; for a lone small span."""
        key = self.key(file.version)
        tier = self._nearest(key, span.block)
        return self._noted(file, tier, span, await tier.read_soon(key, span)) if tier is not None else None

    async def read(self, file: FileFacts, span: Span, *, sequential: bool) -> memoryview | bytes | bytearray:
        """Exactly that span, when read_nowait has none. Ordinary memory, valid until the next checkpoint.

        ``sequential``: the rest of the block will be wanted, too, so it is loaded whole.
        Raises SourceTimeout, StaleVersion, CorruptBlock, SourceRefused, NoBuffer. Cancelling the reader leaves the
        load running for the others.
        """
        return await self._find(file, span, sequential, self._read_span, self._serve)

    def locate_nowait(self, file: FileFacts, span: Span, *, sequential: bool) -> Part | None:
        """As locate(), if it need not wait: in memory, or in a tier's file that is open and lent already."""
        key = self.key(file.version)
        found = self._in_memory(file, key, span.block)
        if found is not None:
            self.statistics.memory_hit_blocks += 1
            return self._place((key, span.block), found, span)
        tier = self._nearest(key, span.block)
        if tier is None or (sequential and not tier.mapped):
            return None
        return self._noted(file, tier, span, tier.locate_nowait(key, span))

    async def bring(self, file: FileFacts, span: Span, *, sequential: bool) -> None:
        """Wait until locate() need not wait for a load of that block, and hold nothing. Raises as the reads do."""
        key = self.key(file.version)
        if (key, span.block) in self.memory:
            return
        tier = self._nearest(key, span.block)
        if tier is None or (sequential and not tier.mapped):
            if sequential:
                self.on_wait()
            await self._wait(file, key, span.block)

    async def locate(self, file: FileFacts, span: Span, *, sequential: bool) -> Part:
        """Where that span lies: in the pool, or in a tier's file. The caller releases the part's hold once.

        Decides, waits and raises as read() does. Cancelling the reader leaves the load running for the others.
        """
        return await self._find(file, span, sequential, self._locate, self._place)

    async def _find(
        self,
        file: FileFacts,
        span: Span,
        sequential: bool,
        in_tier: Callable[[LocalTier, ObjectKey, Span], Awaitable[_Found | None]],
        in_memory: Callable[[BlockKey, MemoryBlock, Span], _Found],
    ) -> _Found:
        """From memory, a tier that has it, or a load, in the one order there is; the two callables say as what."""
        key = self.key(file.version)
        found = self._in_memory(file, key, span.block)
        if found is not None:
            return in_memory((key, span.block), found, span)
        tier = self._nearest(key, span.block)
        if tier is not None and (tier.mapped or not sequential):
            there = self._noted(file, tier, span, await in_tier(tier, key, span))
            if there is not None:
                return there
            key = self.key(file.version)  # look again: it may have become known, and loaded, meanwhile
            found = self._in_memory(file, key, span.block)
            if found is not None:
                return in_memory((key, span.block), found, span)
        if sequential:
            self.on_wait()
        block = await self._wait_held(file, key, span.block)
        try:
            self._check_length(file, span.block, block)
            return in_memory((key, span.block), block, span)
        finally:
            block.buffer.release()

    def _check_length(self, file: FileFacts, block: int, found: MemoryBlock) -> None:
        if found.length_bytes != block_length(file.size_bytes, self.block_bytes, block):
            raise SourceRefused(f"{file.name}: the source says that a file of another size has the same content")

    def _in_memory(self, file: FileFacts, key: ObjectKey, block: int) -> MemoryBlock | None:
        """That block of the file. One of another length is none: a source may say that files of different sizes have
        one content, in one catalog or one after the other."""
        found = self.memory.get((key, block))
        if found is not None and found.length_bytes != block_length(file.size_bytes, self.block_bytes, block):
            self.memory.drop((key, block))
            return None
        return found

    def _place(self, key: BlockKey, block: MemoryBlock, span: Span) -> Part:
        """As _serve, with a hold. No checkpoint between finding the block, or holding it, and here."""
        self._serve(key, block, span)
        block.buffer.hold()
        return Part(None, block.buffer.offset_bytes + span.start_bytes, span.length_bytes, block.buffer)

    async def _locate(self, tier: LocalTier, key: ObjectKey, span: Span) -> Part | None:
        """tier.locate, but a disk that does not answer holds a task of the cache, not the reader."""
        found: list[Part | None] = []
        gone = False

        async def locate() -> None:
            part = await tier.locate(key, span)
            if gone and part is not None:
                part.hold.release()
            else:
                found.append(part)

        try:
            await self._ask(tier, key, locate, what=f"tier={tier.name} block={span.block}")
        except BaseException:
            for part in found:
                if part is not None:
                    part.hold.release()
            raise
        finally:
            gone = True
        return found[0] if found else None

    async def whole(self, file: FileFacts) -> LentFile | None:
        """The file as one object that may be read without us, from the nearest tier that has all of it.

        None where there is none, or the tiers do not say so in time. Raises SourceUnavailable when stopping.
        """
        key = self.key(file.version)
        holders = [tier for tier in self.tiers if tier.resident_bytes(key) == file.size_bytes]
        if not holders:
            return None
        found: list[LentFile] = []

        async def ask() -> None:
            for tier in holders:
                lent = await tier.whole(key)
                if lent is not None:
                    found.append(lent)
                    return

        with trio.move_on_after(_WHOLE_S) as scope:
            await self._in_nursery(ask, what=f"whole path={file.path!r}")
        if scope.cancelled_caught:
            self.statistics.late_handouts += 1
            log.warning(
                "handout_late path=%r: no tier answered in %g s, opened through the daemon", file.path, _WHOLE_S
            )
        return found[0] if found else None

    async def failed(self, lent: LentFile | None, offset_bytes: int, error_number: int) -> None:
        """Reading a lent file failed there: its tier deals with it. None: it was the pool, which has no medium."""
        if lent is None:
            return
        for tier in self.tiers:
            await tier.failed(lent, offset_bytes, error_number)

    async def _ask(self, tier: LocalTier, key: ObjectKey, work: Callable[[], Awaitable[None]], *, what: str) -> None:
        """As _in_nursery, but leaves it running, too, where the tier's medium stops answering."""
        done = trio.Event()
        with tier.waiting(key, done):
            await self._in_nursery(work, what=what, done=done)

    async def _in_nursery(
        self, work: Callable[[], Awaitable[None]], *, what: str, done: trio.Event | None = None
    ) -> None:
        """Run it as a task of the cache and wait for it, or for ``done``; a cancelled reader leaves it running."""
        if self._nursery is None:
            raise SourceUnavailable("the daemon is stopping")
        over = trio.Event() if done is None else done

        async def run() -> None:
            try:
                await work()
            except Exception:  # a bug in one read must not take the mount with it
                log.exception("read_ended_by_bug %s", what)
            finally:
                over.set()

        self._nursery.start_soon(run)
        await over.wait()

    def _nearest(self, key: ObjectKey, block: int) -> LocalTier | None:
        """The nearest tier that has the block, unless it is on its way into memory."""
        if (key, block) in self._loads:
            return None
        for tier in self.tiers:
            if tier.resident(key, block):
                return tier
        return None

    async def _read_span(self, tier: LocalTier, key: ObjectKey, span: Span) -> memoryview | bytes | bytearray | None:
        """tier.read_span, but a disk that does not answer holds a task of the cache, not the reader."""
        found: list[memoryview | bytes | bytearray | None] = []

        async def read() -> None:
            found.append(await tier.read_span(key, span))

        await self._ask(tier, key, read, what=f"tier={tier.name} block={span.block}")
        return found[0] if found else None

    async def load(self, file: FileFacts, block: int) -> MemoryBlock:
        """That block in memory. Valid until the next checkpoint unless it was dropped just now. Raises like read()."""
        key = self.key(file.version)
        return self._in_memory(file, key, block) or await self._wait(file, key, block)

    async def load_into(self, tier: LocalTier, file: FileFacts, block: int) -> Offer:
        """That block in memory, and offered to one tier: for the mover. Raises like read()."""
        key = self.key(file.version)
        there = self._in_memory(file, key, block)
        if there is not None:
            return self.offer(file, block, there, tier)
        # Held until it is offered: between the end of its load and this task's turn it may have left memory again.
        found = await self._wait_held(file, key, block)
        try:
            self._check_length(file, block, found)
            return self.offer(file, block, found, tier)
        finally:
            found.buffer.release()

    def prefetch(self, file: FileFacts, block: int) -> bool:
        """Start loading a block nobody waits for; False when it is here, on its way, or needs no load (mapped)."""
        key = self.key(file.version)
        if (key, block) in self.memory or (key, block) in self._loads:
            return False
        for tier in self.tiers:
            if tier.resident(key, block):
                if tier.mapped:
                    return False
                break
        self._start(file, key, block, demand=False)
        return True

    @property
    def source_rate(self) -> float:
        """Bytes a second from the source while something was fetched; 0 while nothing was."""
        return self.statistics.source_bytes / self._source_busy.total_s if self._source_busy.total_s else 0.0

    def rate_of(self, tier: LocalTier) -> float:
        """Bytes a second from that tier while whole blocks were loaded from it, likewise."""
        busy_s = self._tier_busy[tier.name].total_s
        return self._tier_bytes[tier.name] / busy_s if busy_s else 0.0

    @property
    def loading(self) -> int:
        """Blocks on their way."""
        return len(self._loads)

    @property
    def prefetching(self) -> int:
        """Blocks on their way that nobody waits for yet."""
        return sum(not load.demand for load in self._loads.values())

    def _serve(self, key: BlockKey, block: MemoryBlock, span: Span) -> memoryview:
        was_unread = block.prefetched
        self.memory.served(key, block, span.length_bytes)
        if was_unread:
            self.on_prefetched_read()
        assert span.start_bytes + span.length_bytes <= block.length_bytes, "a span beyond the end of its block"
        return block.buffer.view[span.start_bytes : span.start_bytes + span.length_bytes]

    async def _wait(self, file: FileFacts, key: ObjectKey, block: int) -> MemoryBlock:
        """The block, valid until the next checkpoint."""
        found = await self._wait_held(file, key, block)
        found.buffer.release()
        return found

    async def _wait_held(self, file: FileFacts, key: ObjectKey, block: int) -> MemoryBlock:
        """The block, with a hold on its buffer that the caller releases: it may have been dropped from memory."""
        if trio.current_time() - self._timed_out.get((key, block), -math.inf) < _SAME_OUTAGE_S:
            # Whoever comes once the source is back finds it.
            (self._loads.get((key, block)) or self._start(file, key, block, demand=False)).hurry.set()
            raise SourceTimeout(f"block {block} of {file.name} has just failed for another reader")
        load = self._loads.get((key, block)) or self._start(file, key, block, demand=True)
        load.join()
        try:
            with trio.move_on_after(self._timeout_s):
                await load.done.wait()
        except BaseException:
            if load.block is not None:
                load.block.buffer.release()  # the hold that _run_load took for this waiter
            raise
        finally:
            load.leave()
        if load.block is not None:
            came_from(load.place)
            return load.block
        if load.error is not None:
            raise load.error
        if len(self._timed_out) > _TIMED_OUT_MAX:
            self._timed_out.clear()
        self._timed_out[(key, block)] = trio.current_time()
        late = SourceTimeout(
            f"block {block} of {file.name} did not arrive in {self._timeout_s:g} s"
            f" (source {self.source.statistics().state})"
        )
        _log_failure(file, block, late)
        raise late

    def _start(self, file: FileFacts, key: ObjectKey, block: int, *, demand: bool) -> Load:
        if self._nursery is None:
            raise SourceUnavailable("the daemon is stopping")
        load = Load((key, block), demand=demand)
        load.ticket = self._slots_for(key, block).queue(demand=demand)
        self._loads[(key, block)] = load
        self._nursery.start_soon(self._run_load, file, key, block, load)
        return load

    def _slots_for(self, key: ObjectKey, block: int) -> Slots:
        local = any(tier.resident(key, block) for tier in self.tiers)
        return self._local_slots if local else self._source_slots

    @asynccontextmanager
    async def _slot(self, slots: Slots, load: Load) -> AsyncIterator[None]:
        """A slot for the load: the one it was queued for when it started, or a new place in the queue."""
        ticket, load.ticket = load.ticket, None
        if ticket is not None and ticket.slots is not slots:
            ticket.give_back()
            ticket = None
        if ticket is None:
            ticket = slots.queue(demand=load.demand)
        load.ticket = ticket
        try:
            await ticket.granted.wait()
            yield
        finally:
            load.ticket = None
            ticket.give_back()

    async def _run_load(self, file: FileFacts, key: ObjectKey, block: int, load: Load) -> None:
        try:
            block_in_memory = await self._from_tiers(file, key, block, load)
            if block_in_memory is None:
                block_in_memory = await self._from_source(file, key, block, load)
            load.block = block_in_memory
        except TierfsError as error:
            load.error = error
            if load.waiters:
                self.statistics.failed_loads += 1
                _log_failure(file, block, error)
        except Exception as error:
            # A bug in one load must not take the mount with it.
            log.exception("load_ended_by_bug path=%r block=%d", file.path, block)
            load.error = TierFailed(f"block {block} of {file.name} could not be loaded: {error!r}")
        finally:
            del self._loads[load.key]
            if load.block is not None:
                # Each waiter gets a hold of its own: between here and the moment it runs, other tasks may look for
                # buffers to reclaim.
                for _ in range(load.waiters):
                    load.block.buffer.hold()
            load.done.set()
        self.on_room()

    async def _from_tiers(self, file: FileFacts, key: ObjectKey, block: int, load: Load) -> MemoryBlock | None:
        holders = [tier for tier in self.tiers if tier.resident(key, block)]
        if not holders:
            return None
        length = block_length(file.size_bytes, self.block_bytes, block)
        async with self._slot(self._local_slots, load):
            for tier in holders:
                buffer = await self.pool.acquire(timeout_s=self._timeout_s)
                try:
                    with self._tier_busy[tier.name]:
                        found = await self._fill(tier, key, block, buffer, length)
                    if found:
                        self.statistics.tier_bytes += length
                        self._tier_bytes[tier.name] += length
                        self.on_brought(file, tier.name, length)
                        load.place = tier.name
                        digest = tier.digest(key, block) or digest_block(buffer.view[:length])
                        return self._keep(file, key, block, load, buffer, length, digest)
                except BaseException:
                    buffer.release()
                    raise
                buffer.release()
        return None

    async def _fill(self, tier: LocalTier, key: ObjectKey, block: int, buffer: Buffer, length: int) -> bool:
        """tier.read_block; False, too, where its medium stops answering. The buffer then stays held by the thread that
        may yet write to it.
        """
        found = False
        buffer.hold()

        async def fill() -> None:
            nonlocal found
            try:
                found = await tier.read_block(key, block, buffer.view[:length])
            finally:
                buffer.release()

        try:
            await self._ask(tier, key, fill, what=f"tier={tier.name} block={block}")
        except SourceUnavailable:  # stopping: it was not started
            buffer.release()
            raise
        return found

    async def _from_source(self, file: FileFacts, key: ObjectKey, block: int, load: Load) -> MemoryBlock:
        span = whole_block(file.size_bytes, self.block_bytes, block)
        backoff_s = _BACKOFF_FIRST_S
        corrupt = 0
        while True:
            try:
                async with self._slot(self._source_slots, load):
                    buffer = await self.pool.acquire(timeout_s=self._timeout_s)
                    try:
                        view = buffer.view[: span.length_bytes]
                        with self._source_busy:
                            claimed = await self.source.read_into(file.version, span, view)
                        digest = digest_block(view)
                        if digest == claimed:
                            self.statistics.source_blocks += 1
                            self.statistics.source_bytes += span.length_bytes
                            self.on_brought(file, "source", span.length_bytes)
                            return self._keep(file, key, block, load, buffer, span.length_bytes, digest)
                    except BaseException:
                        buffer.release()
                        raise
                    buffer.release()
                corrupt += 1
                self.statistics.corrupt_blocks += 1
                log.warning(
                    "corrupt_block path=%r block=%d tier=cold peer=%s try=%d",
                    file.path,
                    block,
                    self.source.statistics().url,
                    corrupt,
                )
                if corrupt >= _CORRUPT_TRIES:
                    raise CorruptBlock(
                        f"block {block} of {file.name}: the source sent {corrupt} times bytes that do not match"
                        " their digest; check the storage and the network of the source"
                    )
            except (SourceUnavailable, NoBuffer) as error:
                if not load.waiters:
                    raise
                self.statistics.source_retries += 1
                log.debug("source_retry path=%r block=%d error=%s", file.path, block, error)
            load.hurry = trio.Event()
            with trio.move_on_after(backoff_s):
                await load.hurry.wait()
            backoff_s = min(backoff_s * 2, _BACKOFF_LIMIT_S)

    def _keep(
        self, file: FileFacts, key: ObjectKey, block: int, load: Load, buffer: Buffer, length: int, digest: bytes
    ) -> MemoryBlock:
        """Verified bytes: into memory, and offered to each tier that lacks them. No checkpoint in here."""
        kept = MemoryBlock(buffer, length, digest, prefetched=not load.demand)  # type: ignore[arg-type]
        # The content id may have been learnt since the load began.
        key = self.key(file.version)
        there = self.memory.get((key, block))
        if there is not None:  # two versions turned out to be one content while both were loading
            buffer.release()
            return there
        self.memory.add((key, block), kept)
        for tier in self.tiers:
            if tier.name != "hot" or self.hot_admits(file.version):
                self.offer(file, block, kept, tier)
        self.pool.notify()
        return kept

    def offer(self, file: FileFacts, block: int, kept: MemoryBlock, tier: LocalTier) -> Offer:
        """Offer a block in memory to one tier; never waits. The tier copies from the buffer under a lease."""
        facts = self.facts(file)
        if tier.resident(facts.key, block):
            return Offer.RESIDENT
        # A tier bounds the bytes that wait to be written; of small files each block holds a whole buffer all the same.
        if self._leased >= self._leased_max:
            return Offer.FULL
        self._leased += 1
        lease = BlockLease(kept.buffer, kept.length_bytes, on_release=self._lease_over)
        answer = tier.offer(facts, block, kept.digest, lease)
        if answer is not Offer.ACCEPTED:
            lease.release()
        return answer

    def _noted(self, file: FileFacts, tier: LocalTier, span: Span, found: _Found | None) -> _Found | None:
        """What a tier gave, if it did, counts as its bytes for the read that this task answers."""
        if found is not None:
            came_from(tier.name)
            self.on_brought(file, tier.name, span.length_bytes)
        return found

    def _lease_over(self) -> None:
        self._leased -= 1


def _log_failure(file: FileFacts, block: int, error: TierfsError) -> None:
    """Somebody who waits for a block gets an error."""
    log.warning("block_failed path=%r block=%d error=%s: %s", file.path, block, type(error).__name__, error)


def blocks_of(file: FileFacts, block_bytes: int) -> range:
    """The numbers of a file's blocks."""
    return range(math.ceil(file.size_bytes / block_bytes))
