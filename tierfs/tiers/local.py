"""The local tiers: hot on a tmpfs or DAX directory, warm on one or several directories. Called by the block cache.

    offer ─► placement (policy) ─► filling.py ─► resident          reads: reading.py
                 └ victims ─► removing.py ─► space freed      places of bytes: lending.py
    per device two tasks write, one watches its health, one removes and saves

All state belongs to the trio thread. What must hold: capacity is never exceeded by what is allocated and queued; an
object somebody has pinned is not evicted; removing goes residency first, then the file; a read that races an eviction
ends on the old file.
"""

import errno
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import trio

from tierfs.blocks.errors import TierFailed
from tierfs.blocks.ids import BlockDigest, ObjectKey
from tierfs.blocks.spans import Span, block_count, block_length
from tierfs.policy.watermarks import Watermarks
from tierfs.tiers.device import READ_TICKS, Device, Loaded, Write, choose, describe
from tierfs.tiers.filling import Filler, Space
from tierfs.tiers.index import Entry, Index
from tierfs.tiers.interface import Checked, Lease, Lender, LentFile, ObjectFacts, Offer, Part, TierStatistics
from tierfs.tiers.lending import Lending
from tierfs.tiers.objects import PAGE_BYTES
from tierfs.tiers.persistence import Wanted
from tierfs.tiers.placement import Placement
from tierfs.tiers.reading import Reader
from tierfs.tiers.removing import Removals
from tierfs.tiers.residency import NO_STAMP
from tierfs.tiers.watching import Watching

_log = logging.getLogger(__name__)

_Found = TypeVar("_Found")  # bytes, or their place

_OPEN_OBJECTS = 256
_OBJECT_BLOCKS_MAX = 1 << 26  # what the index keeps of one object stays below 1.2 GiB, whatever a source claims
_TICK_S = 1.0  # a keeper looks by itself this often
_SAVE_S = 5.0
_STOP_S = 4.0  # for everything that is saved at the end
_EVICT_S = 30.0
_LARGEST_PART = 0.97  # of the whole file system; the rest is what it keeps for itself
_AUTOMATIC_PART = 0.9  # of what the file systems have, where no capacity is configured


class DirectoryTier:
    """LocalTier over directories; see the head of the file.

    ``paths``: one per device, each owned by this daemon while ``run`` is running. ``capacity_bytes`` None: 90 % of what
    their file systems have free or used by us. Objects of another ``block_bytes`` are evicted when found.
    ``write_queue_bytes`` bounds what is accepted and not written yet.
    ``mapped``: read through mappings (tmpfs, DAX); on a tmpfs nothing is persisted. ``clock`` gives seconds for heat;
    it must go on across restarts. ``probe_s``: how often a device is looked at; doubled while it stays out of service.
    ``residency``: see persistence.py.
    ``starts_without``: run although no directory can be used. Each is tried again; misses come from below meanwhile.
    """

    def __init__(
        self,
        name: str,
        paths: Sequence[Path],
        *,
        block_bytes: int,
        capacity_bytes: int | None,
        high_watermark: float = 0.95,
        low_watermark: float = 0.90,
        write_queue_bytes: int = 256 << 20,
        mapped: bool,
        clock: Callable[[], float] = time.time,
        probe_s: float = 2.0,
        open_objects: int = _OPEN_OBJECTS,
        residency: Wanted = "asked",
        starts_without: bool = False,
    ) -> None:
        assert paths
        self.name = name
        self.mapped = mapped
        self._block_bytes = block_bytes
        self._capacity_bytes = capacity_bytes
        self._watermarks = Watermarks(capacity_bytes or 0, high_watermark, low_watermark)
        self._write_queue_bytes = write_queue_bytes
        self._clock = clock
        self._statistics = TierStatistics(name, capacity_bytes or 0)
        self._devices = [
            Device(
                Path(path), mapped=mapped, probe_s=probe_s, block_bytes=block_bytes, capacity_bytes=capacity_bytes,
                residency=residency,
            )
            for path in paths
        ]  # fmt: skip
        self._starts_without = starts_without
        self._index = Index()
        self._space = Space()
        self._placement = Placement()
        self._running = False
        self._removals = Removals(
            index=self._index, space=self._space, open_objects=open_objects, on_remove=self._placement.room_changed
        )
        self._reader = Reader(
            descriptors=self._removals.descriptors, statistics=self._statistics, mapped=mapped,
            remove=self._removals.remove,
        )  # fmt: skip
        self._watching = Watching(index=self._index, reader=self._reader, statistics=self._statistics)
        self._lending = Lending(
            descriptors=self._removals.descriptors, reader=self._reader, watching=self._watching,
            statistics=self._statistics,
        )  # fmt: skip
        self._filler = Filler(
            descriptors=self._removals.descriptors, space=self._space, statistics=self._statistics, mapped=mapped,
            on_settled=self._settled, on_full=self._full,
        )  # fmt: skip

    @property
    def lender(self) -> Lender | None:
        """Who reads our files on our behalf; None (direct mode) where nobody does. To be set before the first read."""
        return self._removals.descriptors.lender

    @lender.setter
    def lender(self, lender: Lender | None) -> None:
        self._removals.descriptors.lender = lender

    def statistics(self) -> TierStatistics:
        """Counters and state. ``hit_blocks`` counts whole blocks, and spans that begin a block."""
        out = [device for device in self._devices if not device.writable]
        lost = all(not device.readable for device in self._devices)
        devices: list[dict[str, object]] = [
            {
                "path": str(device.root),
                "state": device.state,
                "reason": device.reason,
                "medium": device.store.medium,
                "residency": device.residency_kind,
                "residency_reason": device.residency_reason,
                "direct": device.store.direct,
                "free_bytes": device.free_bytes,
                "used_bytes": sum(entry.allocated_bytes for entry in self._index if entry.device is device),
                "written_bytes_per_s": int(device.written_bytes_per_s),
            }
            for device in self._devices
        ]
        return replace(
            self._statistics,
            high_bytes=self._watermarks.high_bytes,
            used_bytes=self._space.used_bytes,
            dying_bytes=self._space.dying_bytes,
            objects=len(self._index),
            state="failed" if lost or not self._running else "degraded" if out else "ok",
            reason="; ".join(f"{device.root}: {device.reason}" for device in out),
            kind=self._devices[0].store.medium,
            medium=self._devices[0].medium,
            residency=self._devices[0].residency_kind,
            residency_reason=self._devices[0].residency_reason,
            devices=devices,
        )

    async def run(self, *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """See LocalTier.run. Raises TierFailed when a directory belongs to another process or a newer version, or when
        none of the directories can be used (unless ``starts_without``); one that fails is left out and tried again."""
        try:
            await self._open()
            async with trio.open_nursery() as nursery:
                self._running = True
                for device in self._devices:
                    nursery.start_soon(self._filler.run, device)
                    nursery.start_soon(self._filler.run, device)
                    nursery.start_soon(self._watch, device)
                    nursery.start_soon(self._time, device)
                    nursery.start_soon(self._keep, device)
                nursery.start_soon(self._removals.close_idle)
                nursery.start_soon(self._removals.dying.run)
                nursery.start_soon(self._watching.run)
                task_status.started()
        finally:
            self._running = False
            with trio.CancelScope(shield=True):
                await self._stop()

    def resident(self, key: ObjectKey, block: int) -> bool:
        """See LocalTier."""
        entry = self._readable(key)
        return entry is not None and entry.has(block)

    def resident_bytes(self, key: ObjectKey) -> int:
        """See LocalTier."""
        entry = self._readable(key)
        return entry.resident_bytes if entry is not None else 0

    def digest(self, key: ObjectKey, block: int) -> BlockDigest | None:
        """See LocalTier."""
        entry = self._index.get(key)
        return entry.digest(block) if entry is not None and entry.has(block) else None

    def read_nowait(self, key: ObjectKey, span: Span) -> memoryview | None:
        """See LocalTier. The view of a warm tier stays good for as long as it is referenced."""
        entry = self._readable(key)
        found = self._reader.span_nowait(entry, span) if entry is not None else None
        return self._count_read(found, span.length_bytes)

    async def read_soon(self, key: ObjectKey, span: Span) -> memoryview | None:
        """See LocalTier."""
        entry = self._readable(key)
        found = None if entry is None else await self._reader.span_soon(entry, span)
        return self._count_read(found, span.length_bytes)

    async def read_span(self, key: ObjectKey, span: Span) -> bytes | bytearray | memoryview | None:
        """See LocalTier."""
        entry = self._readable(key)
        found = await self._reader.span(entry, span) if entry is not None else None
        return self._count_read(found, span.length_bytes)

    async def read_block(self, key: ObjectKey, block: int, buffer: memoryview) -> bool:
        """See LocalTier."""
        entry = self._readable(key)
        found = await self._reader.block(entry, block, buffer) if entry is not None else False
        if found:
            self._statistics.read_bytes += len(buffer)
        return found

    async def check_block(self, key: ObjectKey, block: int, buffer: memoryview) -> Checked:
        """See LocalTier."""
        entry = self._index.get(key)
        if not self._running or entry is None or not entry.has(block):
            return Checked.GONE
        statistics = self._statistics
        bad, evicted = statistics.corrupt_blocks + statistics.failed_reads, statistics.evicted_blocks
        hits = statistics.hit_blocks
        if await self._reader.block(entry, block, buffer):
            statistics.hit_blocks -= statistics.hit_blocks > hits
            return Checked.GOOD
        if entry.has(block):
            return Checked.UNREAD
        if statistics.corrupt_blocks + statistics.failed_reads > bad or (
            entry.device.readable and statistics.evicted_blocks == evicted
        ):
            return Checked.BAD  # the latter: its file was cut short, or taken away
        return Checked.GONE if entry.device.readable else Checked.UNREAD

    def objects(self) -> list[tuple[ObjectFacts, frozenset[ObjectKey]]]:
        """See LocalTier."""
        return [
            (
                ObjectFacts(entry.key, entry.size_bytes, entry.block_bytes, entry.path, entry.model, entry.model_bytes),
                frozenset((entry.key, entry.name, *entry.aliases)),
            )
            for entry in self._index
        ]

    def resize(
        self,
        *,
        capacity_bytes: int,
        high_watermark: float | None = None,
        low_watermark: float | None = None,
        write_queue_bytes: int | None = None,
    ) -> None:
        """Another capacity from now on; what is above it is evicted soon, but for what is in use. Never waits."""
        marks = self._watermarks
        self._capacity_bytes = capacity_bytes
        self._watermarks = Watermarks(capacity_bytes, high_watermark or marks.high, low_watermark or marks.low)
        self._write_queue_bytes = write_queue_bytes or self._write_queue_bytes
        self._measure_capacity()
        self._placement.room_changed()

    def offer(self, facts: ObjectFacts, block: int, digest: BlockDigest, lease: Lease) -> Offer:
        """See LocalTier."""
        statistics = self._statistics
        if not self._running:
            return Offer.FAILED
        key = self._index.canonical(facts.key)
        self._placement.learn_model(key, facts.model)
        entry = self._index.get(key)
        if entry is not None:
            if (entry.size_bytes, entry.block_bytes) != (facts.size_bytes, facts.block_bytes):
                if not self._placement.pinned(key):  # blocks of another size than the export has by now are of no use
                    self._removals.remove(entry)
                return self._bypassed()
            if entry.has(block) or block in entry.pending:
                return Offer.RESIDENT
            if block in entry.unwritable:
                return self._bypassed()
            if entry.handed_out:  # found incomplete when the device was opened: nothing may be added to it
                self._removals.remove(entry)
                return self._bypassed()
        elif block_count(facts.size_bytes, facts.block_bytes) > _OBJECT_BLOCKS_MAX:
            return self._bypassed()
        device = entry.device if entry is not None else choose(self._devices, facts.size_bytes)
        if device is None or not device.writable:
            statistics.failed_writes += 1
            return Offer.FAILED
        length_bytes = len(lease.view)
        assert length_bytes == block_length(facts.size_bytes, facts.block_bytes, block)
        if statistics.queued_bytes and statistics.queued_bytes + length_bytes > self._write_queue_bytes:
            statistics.skipped_blocks += 1
            return Offer.FULL
        cost_bytes = -(-length_bytes // PAGE_BYTES) * PAGE_BYTES
        if entry is not None and not entry.pending and entry.allocated_bytes - entry.resident_bytes >= cost_bytes:
            cost_bytes = 0  # a block that was dropped as bad: its space is still there, and counted
        name = entry.name if entry is not None else key
        if self._removals.leaving(device, name):
            return self._bypassed()
        if cost_bytes and not self._make_room(cost_bytes, facts.model, urgent=self._placement.kept(key)):
            return self._bypassed()
        if entry is None:
            entry = Entry(
                name=key, key=key, size_bytes=facts.size_bytes, block_bytes=facts.block_bytes, path=facts.path,
                model=facts.model, model_bytes=facts.model_bytes, device=device, last_use_s=self._clock(),
            )  # fmt: skip
            if facts.key != key:
                entry.aliases.add(facts.key)
            self._index.add(entry)
        self._filler.enqueue(Write(entry, block, digest, lease, length_bytes, cost_bytes))
        return Offer.ACCEPTED

    def alias(self, version: ObjectKey, content: ObjectKey) -> None:
        """See LocalTier. Of two objects the fuller one stays, pinned or not: both hold the same bytes."""
        stays, loser = self._index.alias(version, content)
        if version == content:
            return
        self._placement.alias(version, content)
        if loser is not None:
            self._removals.remove(loser)
        if stays is not None and stays.device.persistent:
            stays.device.keys.append((stays.name, stays.key, version))

    def retain(self, versions: Set[bytes]) -> None:
        """See LocalTier."""
        self._index.retain(versions, pinned=self._placement.pinned)

    def touch(self, key: ObjectKey) -> None:
        """See LocalTier. An open of content whose model is not known yet counts when its first block is offered."""
        key = self._index.canonical(key)
        entry = self._index.get(key)
        now_s = self._clock()
        if entry is not None:
            entry.last_use_s = now_s
            if entry.device.persistent:
                entry.device.used[entry.name] = now_s
        self._placement.touch(key, entry, now_s)
        for device in self._devices:
            device.heat_changed = True

    def pin(self, key: ObjectKey) -> None:
        """See LocalTier."""
        self._placement.pin(self._index.canonical(key))

    def unpin(self, key: ObjectKey) -> None:
        """See LocalTier."""
        self._placement.unpin(self._index.canonical(key))
        entry = self._index.get(key)
        if entry is not None:
            self._watching.closed(entry)

    def keep(self, key: ObjectKey) -> None:
        """See LocalTier."""
        self._placement.keep(self._index.canonical(key))

    def let_go(self, key: ObjectKey) -> None:
        """See LocalTier."""
        self._placement.let_go(self._index.canonical(key))

    def locate_nowait(self, key: ObjectKey, span: Span) -> Part | None:
        """See LocalTier."""
        entry = self._readable(key)
        found = self._lending.locate_nowait(entry, span) if entry is not None else None
        return self._count_read(found, span.length_bytes)

    async def locate(self, key: ObjectKey, span: Span) -> Part | None:
        """See LocalTier."""
        entry = self._readable(key)
        found = await self._lending.locate(entry, span) if entry is not None else None
        return self._count_read(found, span.length_bytes)

    async def whole(self, key: ObjectKey) -> LentFile | None:
        """See LocalTier."""
        entry = self._readable(key)
        return await self._lending.whole(entry) if entry is not None else None

    async def failed(self, lent: LentFile, offset_bytes: int, error_number: int) -> None:
        """See LocalTier. What was taken back already is not known any more, and nothing happens."""
        if error_number != errno.EINPROGRESS:
            await self._lending.failed(lent, offset_bytes, error_number)
            return
        device = self._lending.device(lent)
        if device is not None and device.stall():
            self._set_aside(device)

    async def evict(self, key: ObjectKey) -> int:
        """See LocalTier. 0 where nothing is here, or somebody has it pinned. Raises TierFailed when the device does not
        let go of it in time. The space of an object that somebody maps follows later: ``dying_bytes`` until then.
        Cancellation: it goes all the same."""
        entry = self._index.get(key)
        if not self._running or entry is None or self._placement.pinned(entry.key):
            return 0
        freed_bytes = entry.allocated_bytes
        self._evict(entry)
        gone = self._removals.gone(entry)
        with trio.move_on_after(_EVICT_S):
            await gone.wait()
            return freed_bytes
        raise TierFailed(f"{entry.device.root} did not remove object {entry.name.hex()}: {entry.device.reason}")

    async def flush(self) -> None:
        """See LocalTier."""
        await self._filler.flush()

    @contextmanager
    def waiting(self, key: ObjectKey, event: trio.Event) -> Iterator[None]:
        """See LocalTier."""
        entry = self._index.get(key)
        if entry is None:
            yield
            return
        with entry.device.waiting(event):
            yield

    def _readable(self, key: ObjectKey) -> Entry | None:
        """The entry, if it can be read now."""
        entry = self._index.get(key)
        return entry if self._running and entry is not None and entry.device.readable else None

    def _count_read(self, found: _Found | None, length_bytes: int) -> _Found | None:
        if found is not None:
            self._statistics.read_bytes += length_bytes
        return found

    # -- room

    def _bypassed(self) -> Offer:
        self._statistics.bypassed_blocks += 1
        return Offer.BYPASSED

    def _make_room(self, cost_bytes: int, model: bytes | None, *, urgent: bool = False) -> bool:
        """Room under the high mark for a block of that model; without a model: down to the marks again."""
        victims = self._placement.victims(
            self._index,
            self._watermarks,
            used_bytes=self._space.used_bytes - self._space.leaving_bytes,
            cost_bytes=cost_bytes,
            model=model,
            mapped=self._removals.dying.mapped_models,
            now_s=self._clock(),
            urgent=urgent,
        )
        for entry in victims or ():
            self._evict(entry)
        return victims is not None

    def _evict(self, entry: Entry) -> None:
        self._statistics.evicted_blocks += entry.resident_blocks
        self._removals.remove(entry)

    def _full(self, device: Device, model: bytes, short_bytes: int) -> None:
        """The device has less space than its capacity says (others use it too): its colder objects give way."""
        victims = self._placement.victims(
            [entry for entry in self._index if entry.device is device],
            replace(self._watermarks, capacity_bytes=0),  # there is no room at all: all that is short must be freed
            used_bytes=0,
            cost_bytes=short_bytes,
            model=model,
            mapped=self._removals.dying.mapped_models,
            now_s=self._clock(),
        )
        for entry in victims or ():
            self._evict(entry)

    def _settled(self, entries: Iterable[Entry]) -> None:
        """A batch is over: an object that got no block after all goes, and one that waited for the batch may go now."""
        for entry in entries:
            if not entry.resident_blocks and not entry.pending and entry.device.present:
                self._removals.remove(entry)
            entry.device.reclaim.set()

    # -- keeping

    async def _keep(self, device: Device) -> None:
        """Remove what is leaving this device, and save what may be saved late."""
        saved_s = trio.current_time()
        while True:
            with trio.move_on_after(_TICK_S):
                await device.reclaim.wait()
            device.reclaim = trio.Event()
            save = trio.current_time() - saved_s >= _SAVE_S
            if save:
                saved_s = trio.current_time()
            try:
                await self._keep_once(device, save=save)
            except Exception as error:  # a bug must not take the mount with it
                _log.exception("keeping_ended_by_bug device=%s", device.root)
                device.fault(error)

    async def _keep_once(self, device: Device, *, save: bool) -> None:
        # An incoming block makes its room by itself. What is there already gives way to nothing but a smaller
        # capacity: a model that ends a few metadata blocks above the high mark would be evicted for nothing.
        if self._space.used_bytes - self._space.leaving_bytes > self._watermarks.capacity_bytes:
            self._make_room(0, None)
        await self._removals.finish(device)
        if save:
            self._placement.heats.forget_cold(self._clock(), {entry.model for entry in self._index})
            await self._save(device)

    async def _save(self, device: Device, *, abandon: bool = False) -> None:
        async with device.lock:
            residency = device.residency()
            if residency is None or not device.writable:
                return
            late = (device.verified, device.unverified, device.keys, device.used, device.stamps, device.heat_changed)
            if not any(late):
                return
            verified, device.verified = device.verified, []
            unverified, device.unverified = device.unverified, set()
            keys, device.keys = device.keys, []
            used, device.used = [*device.used.items()], {}
            stamps, device.stamps = [*device.stamps.items()], {}
            device.heat_changed = False
            models = self._placement.heats.items()
            try:
                await device.blocking(
                    lambda: residency.save(
                        unverified=unverified, verified=verified, keys=keys, used=used, stamps=stamps, models=models
                    ),
                    abandon=abandon,
                )
            except (OSError, sqlite3.Error) as error:
                # What else is lost costs time. This must be saved before any later stamp of those files is, or the next
                # run would trust blocks that somebody else wrote to.
                device.unverified |= unverified
                device.keys[:0] = keys
                device.fault(error)

    # -- devices: opening, health, closing

    async def _open(self) -> None:
        failures: dict[Device, Exception] = {}
        refusals: list[TierFailed] = []

        async def open_one(device: Device) -> None:
            try:
                self._adopt(device, await device.blocking(device.open))
            except TierFailed as error:
                refusals.append(error)
            except (OSError, sqlite3.Error) as error:
                failures[device] = error

        async with trio.open_nursery() as nursery:
            for device in self._devices:
                nursery.start_soon(open_one, device)
        if refusals:
            raise refusals[0]
        for device, error in failures.items():
            device.state, device.reason = "lost", describe(error)
            _log.error("tier_device_cannot_be_opened path=%s reason=%r", device.root, device.reason)
        if len(failures) == len(self._devices) and not self._starts_without:
            device, error = next(iter(failures.items()))
            name = self._statistics.name
            raise TierFailed(f"{name} tier cannot use {device.root}: {describe(error)}") from error

    def _adopt(self, device: Device, loaded: Loaded) -> None:
        for model, heat in loaded.stored.models:
            self._placement.heats.restore(model, heat)
        for leaf, allocated in loaded.dying:
            self._removals.dying.add(device, leaf, allocated, leaving=False)
        outdated = 0
        for stored, allocated in loaded.objects:
            entry = Entry(
                name=stored.name, key=stored.key, size_bytes=stored.size_bytes, block_bytes=stored.block_bytes,
                path=stored.path, model=stored.model, model_bytes=stored.model_bytes, device=device,
                last_use_s=stored.last_use_s,
            )  # fmt: skip
            entry.aliases.update(stored.aliases)
            entry.handed_out = entry.handed_out_saved = stored.handed_out
            for block, digest in stored.blocks:
                entry.fill(block, digest)
            if stored.stamp != NO_STAMP:  # nobody has touched the file since we wrote it
                entry.stamp = stored.stamp
                for block in stored.verified:
                    entry.verified[block] = 1
            elif stored.verified:
                device.unverify(entry.name)
            self._space.set_allocated(entry, allocated)
            if stored.block_bytes != self._block_bytes:
                self._removals.remove(entry)
                outdated += 1
                continue
            loser = self._index.add(entry)
            for alias in (entry.name, *entry.aliases):  # a pin under the version id is one of the content
                if alias != entry.key:
                    self._placement.alias(alias, entry.key)
            if loser is not None:
                self._removals.remove(loser)
            if entry.key != stored.key:
                device.keys.append((entry.name, entry.key, stored.key))
        if outdated:
            _log.warning("other_block_size path=%s evicted_objects=%d: the export has another block size than before",
                         device.root, outdated)  # fmt: skip
        device.recovered()
        self._measure_capacity()

    def _measure_capacity(self) -> None:
        """What is configured, but never more than the file systems can hold; two paths may be on one."""
        stores = {one.device_number: one for one in self._devices if one.present}
        if self._capacity_bytes is None:
            free_bytes = sum(one.free_bytes for one in stores.values())
            capacity_bytes = int(_AUTOMATIC_PART * (free_bytes + self._space.allocated_bytes + self._space.dying_bytes))
        else:
            largest_bytes = sum(one.size_bytes for one in stores.values())
            capacity_bytes = min(self._capacity_bytes, int(_LARGEST_PART * largest_bytes))
        self._watermarks = replace(self._watermarks, capacity_bytes=capacity_bytes)
        self._statistics.capacity_bytes = capacity_bytes

    async def _time(self, device: Device) -> None:
        while True:
            await trio.sleep(_TICK_S)
            if device.tick():
                self._set_aside(device)

    def _set_aside(self, device: Device) -> None:
        """It does not answer: what waits to be written there would wait with its buffers."""
        self._statistics.failed_writes += self._filler.drop_queue(device)

    async def _watch(self, device: Device) -> None:
        while True:
            with trio.move_on_after(device.next_probe_s()):
                await device.attention.wait()
            device.attention = trio.Event()
            try:
                if device.state == "stalled":
                    await self._probe_stalled(device)
                elif device.state == "degraded":
                    await device.blocking(device.probe)
                    device.recovered()
                elif device.state == "ok" and not await device.blocking(device.look):
                    raise FileNotFoundError(errno.ENOENT, "the tier directory went away", str(device.root))
            except FileNotFoundError as error:
                self._lose(device, error)
            except (OSError, TierFailed) as error:
                device.fault(error)
            if device.state == "lost":
                await self._reopen(device)

    async def _probe_stalled(self, device: Device) -> None:
        """Waits until the device answers, however long that takes; in service once it does so in time."""
        try:
            took_s = await device.blocking(device.probe)
        except FileNotFoundError:
            raise
        except (OSError, TierFailed) as error:
            device.answers(error)
            return
        if took_s < READ_TICKS * _TICK_S:
            device.recovered()
        else:
            device.attention.set()

    def _lose(self, device: Device, error: Exception) -> None:
        """The directory is gone: its objects, and nothing else, are misses."""
        device.fault(error, lost=True)
        self._statistics.failed_writes += self._filler.drop_queue(device)
        self._removals.lose(device, [entry for entry in self._index if entry.device is device])
        device.verified, device.keys, device.used = [], [], {}

    async def _reopen(self, device: Device) -> None:
        async with device.lock:
            try:
                await device.blocking(device.close, False)
            except (OSError, sqlite3.Error) as error:
                _log.warning("lost_tier_device_not_closed_cleanly path=%s reason=%r", device.root, describe(error))
            try:
                loaded = await device.blocking(device.open)
            except (OSError, sqlite3.Error, TierFailed) as error:
                device.reason = describe(error)
                return
        self._adopt(device, loaded)

    async def _stop(self) -> None:
        async def close_one(device: Device) -> None:
            self._filler.drop_queue(device)
            await self._save(device, abandon=True)
            try:
                await device.blocking(device.close, device.writable, abandon=True)
            except (OSError, sqlite3.Error) as error:
                _log.error("tier_device_not_closed_cleanly path=%s reason=%r", device.root, describe(error))

        with trio.move_on_after(_STOP_S) as scope:
            async with trio.open_nursery() as nursery:
                for device in self._devices:
                    nursery.start_soon(close_one, device)
        if scope.cancelled_caught:
            _log.error("tier_stopped_without_a_clean_mark tier=%s reason='no answer'", self._statistics.name)
        self._removals.stop()
