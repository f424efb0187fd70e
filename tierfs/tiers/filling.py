"""Write-behind: how accepted blocks become resident. Called by local.py, on the trio thread; threads only
write and sync.

    offer ─► device.queue ─► batch: open · write · sync · one transaction ─► resident
                                         └ lease released as soon as the bytes are written

Two batches of a device are under way at once, so that one writes while the other waits for its sync. What must hold:
a block is made resident only when its data is durable and its row is committed; whatever happens (an error, an
eviction, cancellation) each lease is released exactly once and each reservation given back.
"""

import errno
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import trio

from tierfs.tiers.descriptors import Descriptors
from tierfs.tiers.device import WRITE_THREADS, Device, Write
from tierfs.tiers.index import Entry
from tierfs.tiers.interface import TierStatistics
from tierfs.tiers.objects import ObjectStore, OpenObject, allocated_bytes, drop_cached, write_block
from tierfs.tiers.residency import StoredObject

_log = logging.getLogger(__name__)

# One sync and one transaction for this much: large enough that they cost little, small enough to be durable soon.
_BATCH_BYTES = 64 << 20
_BATCH_OBJECTS = 64  # bounds the descriptors a batch holds
_PART_BYTES = 1 << 20  # small blocks share a hop to a thread up to this size
# Some bytes of persistent memory are bad, and writing does not mend them. Kernels differ in how they say so.
_EHWPOISON = 133  # asm-generic/errno.h; the errno module of Python 3.11 does not name it
_BAD_MEMORY = frozenset((errno.EIO, errno.EFAULT, _EHWPOISON))
_ROOM_S = 5.0  # a block waits this long for evicted objects to give up their space, then it is dropped


@dataclass
class Space:
    """The bytes a tier takes. ``freed`` is set when some were given up."""

    allocated_bytes: int = 0  # on the devices, objects that are leaving included
    reserved_bytes: int = 0  # accepted, not measured on the device yet
    leaving_bytes: int = 0  # of what was evicted and will be given up any moment
    dying_bytes: int = 0  # of files that are no objects any more, but that somebody may map: see dying.py
    freed: trio.Event = field(default_factory=trio.Event)

    @property
    def used_bytes(self) -> int:
        """What capacity is compared with."""
        return self.allocated_bytes + self.reserved_bytes + self.dying_bytes

    def set_allocated(self, entry: Entry, allocated: int) -> None:
        """An object was measured."""
        if entry.gone:
            return
        change = allocated - entry.allocated_bytes
        entry.allocated_bytes = allocated
        self.allocated_bytes += change
        if entry.removing:
            self.leaving_bytes += change

    def give_up(self, entry: Entry) -> None:
        """An object that was leaving is gone."""
        self.allocated_bytes -= entry.allocated_bytes
        self.leaving_bytes -= entry.allocated_bytes
        entry.allocated_bytes = 0
        entry.gone = True
        self.freed.set()


class Filler:
    """The writers of one tier."""

    def __init__(
        self,
        *,
        descriptors: Descriptors,
        space: Space,
        statistics: TierStatistics,
        mapped: bool,
        on_settled: Callable[[Iterable[Entry]], None],
        on_full: Callable[[Device, bytes, int], None],
    ) -> None:
        self._descriptors = descriptors
        self._space = space
        self._statistics = statistics
        self._mapped = mapped
        self._unsettled = 0
        self._settled = trio.Event()
        self._on_settled = on_settled
        self._on_full = on_full

    def enqueue(self, write: Write) -> None:
        """Take over an accepted block and its lease."""
        assert not write.entry.handed_out, "a file that somebody may map is never written to"
        write.entry.pending.add(write.block)
        self._space.reserved_bytes += write.cost_bytes
        self._statistics.queued_bytes += write.length_bytes
        self._unsettled += 1
        write.entry.device.queue.append(write)
        write.entry.device.work.set()

    async def flush(self) -> None:
        """Wait until everything accepted is resident or dropped. Cancellation leaves nothing."""
        while self._unsettled:
            if self._settled.is_set():
                self._settled = trio.Event()
            await self._settled.wait()

    def drop_queue(self, device: Device) -> int:
        """Drop what waits for this device; how many blocks."""
        count = len(device.queue)
        while device.queue:
            self._settle(device.queue.popleft())
        return count

    async def run(self, device: Device) -> None:
        """Write batches for ever. On cancellation the batch under way is dropped after its threads are done."""
        while True:
            while not device.queue:
                if device.work.is_set():
                    device.work = trio.Event()
                await device.work.wait()
            batch = self._take(device)
            try:
                await self._write_batch(device, batch)
            except Exception as error:  # a bug in one batch must not take the mount with it
                _log.exception("write_ended_by_bug device=%s", device.root)
                device.fault(error)
            finally:
                for write in batch:
                    self._settle(write)
                self._on_settled({write.entry for write in batch})

    def _release(self, write: Write) -> None:
        lease, write.lease = write.lease, None
        if lease is not None:
            self._statistics.queued_bytes -= write.length_bytes
            lease.release()

    def _settle(self, write: Write) -> None:
        if write.settled:
            return
        write.settled = True
        self._release(write)
        write.entry.pending.discard(write.block)
        self._space.reserved_bytes -= write.cost_bytes
        self._unsettled -= 1
        if not self._unsettled:
            self._settled.set()

    @staticmethod
    def _take(device: Device) -> list[Write]:
        batch: list[Write] = []
        entries: set[Entry] = set()
        taken_bytes = 0
        while device.queue and taken_bytes < _BATCH_BYTES and len(entries) < _BATCH_OBJECTS:
            write = device.queue.popleft()
            batch.append(write)
            entries.add(write.entry)
            taken_bytes += write.length_bytes
        return batch

    async def _write_batch(self, device: Device, batch: list[Write]) -> None:
        if not await self._room():
            self._statistics.bypassed_blocks += len(batch)
            return
        # No checkpoint from here to `writing += 1`: an object is seen as leaving here, or kept until we are done.
        batch = [write for write in batch if not write.entry.removing]
        if not device.writable:
            self._statistics.failed_writes += len(batch)
            return
        if not batch:
            return
        entries = list(dict.fromkeys(write.entry for write in batch))
        files: dict[Entry, OpenObject] = {}
        for entry in entries:
            entry.writing += 1
            entry.batches += 1
        try:
            started_s = time.perf_counter()
            await self._open(device, entries, files)
            statuses = await device.writing(_status_all, list(files.values()))
            for entry, status in zip(files, statuses, strict=True):
                # Not when another batch has written since, be it over or not: those times are ours.
                if not entry.stamp_due:
                    if status is not None:
                        entry.compare((status.st_mtime_ns, status.st_ctime_ns))
                    entry.stamp_due = True
            await self._write(device, batch, files)
            written = [(files[w.entry], w.block * w.entry.block_bytes, w.length_bytes) for w in batch]
            ranges = [] if self._mapped else written
            await device.writing(_sync, device.store, list(files.values()), ranges)
            await self._commit(device, batch)
            device.wrote(sum(write.length_bytes for write in batch), time.perf_counter() - started_s)
        except (OSError, sqlite3.Error) as error:
            # Two blocks must fit before it is tried again: less would fail at once.
            short = isinstance(error, OSError) and error.errno == errno.ENOSPC
            short_bytes = 2 * max(write.length_bytes for write in batch) if short else 0
            self._statistics.failed_writes += len(batch) + self.drop_queue(device)
            device.fault(error, short_bytes=short_bytes)
            if short:
                self._on_full(device, batch[0].entry.model, short_bytes)
        finally:
            with trio.CancelScope(shield=True):
                left = await self._look(device, files)
            # No checkpoint from here to where the reservations are given back: see Filler.run.
            for entry in entries:
                entry.writing -= 1
                if entry in files:
                    self._measure(entry, left.get(entry), batch)
                    self._descriptors.give_back(files[entry])

    async def _room(self) -> bool:
        """Wait for evicted objects to give up their space, so that capacity is never exceeded on the device itself."""
        with trio.move_on_after(_ROOM_S):
            while self._space.used_bytes > self._statistics.capacity_bytes and self._space.leaving_bytes > 0:
                if self._space.freed.is_set():
                    self._space.freed = trio.Event()
                await self._space.freed.wait()
        return self._space.used_bytes <= self._statistics.capacity_bytes

    async def _open(self, device: Device, entries: Sequence[Entry], files: dict[Entry, OpenObject]) -> None:
        missing: list[Entry] = []
        for entry in entries:
            opened = self._descriptors.borrow(entry)
            if opened is not None and opened.read_only:  # from when the file system was
                self._descriptors.retire(entry)
                self._descriptors.give_back(opened)
                opened = None
            if opened is None:
                missing.append(entry)
            else:
                files[entry] = opened
        if missing:
            wanted = [(entry.name, entry.size_bytes) for entry in missing]
            fresh = await device.writing(_open_all, device.store, wanted)
            for entry, opened in zip(missing, fresh, strict=True):
                files[entry] = self._descriptors.add(entry, opened)

    async def _write(self, device: Device, batch: Sequence[Write], files: dict[Entry, OpenObject]) -> None:
        parts = _parts(batch)
        errors: list[OSError] = []

        async def work() -> None:
            for part in parts:
                if errors:
                    return
                jobs = []
                for write in part:
                    assert write.lease is not None
                    jobs.append((files[write.entry], write.block * write.entry.block_bytes, write.lease.view))
                try:
                    await device.writing(_write_part, jobs)
                except OSError as error:
                    errors.append(error)
                    if device.store.synchronous and error.errno in _BAD_MEMORY:
                        for write in part:
                            write.entry.unwritable.add(write.block)
                    return
                jobs.clear()  # the views must not outlive the leases
                for write in part:
                    self._release(write)

        async with trio.open_nursery() as nursery:
            for _ in range(WRITE_THREADS):
                nursery.start_soon(work)
        if errors:
            raise errors[0]

    async def _commit(self, device: Device, batch: Sequence[Write]) -> None:
        async with device.lock:
            # Looked at under the lock: what an eviction has removed from the database must not be written again.
            alive = [write for write in batch if not write.entry.removing]
            rows: dict[Entry, StoredObject] = {}
            for write in alive:
                entry = write.entry
                if entry not in rows:
                    rows[entry] = StoredObject(
                        entry.name, entry.key, entry.size_bytes, entry.block_bytes, entry.path, entry.model,
                        entry.model_bytes, entry.last_use_s, aliases=list(entry.aliases),
                    )  # fmt: skip
                rows[entry].blocks.append((write.block, write.digest))
            refused = await device.blocking(device.commit, list(rows.values())) if rows else ()
        if refused:  # its residency can hold no more objects: colder ones give way, and these are offered again
            self._statistics.bypassed_blocks += sum(write.entry.name in refused for write in alive)
            self._on_full(device, alive[0].entry.model, 1)
        for write in alive:
            if not write.entry.removing and write.entry.name not in refused:
                write.entry.fill(write.block, write.digest)
                write.entry.verified[write.block] = 1  # as durable as a local file: a whole-block read compares again
                self._statistics.written_blocks += 1
                self._statistics.written_bytes += write.length_bytes

    async def _look(self, device: Device, files: dict[Entry, OpenObject]) -> dict[Entry, os.stat_result | None]:
        """How this batch leaves the objects that no other batch writes to; None where that cannot be had."""
        looked: dict[Entry, tuple[int, os.stat_result | None]] = {}
        while True:
            due = [e for e in files if e.writing == 1 and (e not in looked or looked[e][0] != e.batches)]
            if not due:
                return {entry: status for entry, (_, status) in looked.items()}
            batches = [entry.batches for entry in due]  # another that comes and goes meanwhile leaves it to us
            opened = [files[entry] for entry in due]
            statuses = await device.writing(_status_all, opened)
            looked.update(zip(due, zip(batches, statuses, strict=True), strict=True))

    def _measure(self, entry: Entry, status: os.stat_result | None, batch: Sequence[Write]) -> None:
        if entry.writing:
            # What another batch has written is on the device already, and reserved still: only ours is counted.
            ours = sum(w.cost_bytes for w in batch if w.entry is entry and entry.has(w.block))
            self._space.set_allocated(entry, entry.allocated_bytes + ours)
            return
        if status is None:
            return  # the next read finds out and tells
        self._space.set_allocated(entry, allocated_bytes(status))
        entry.stamp = (status.st_mtime_ns, status.st_ctime_ns)
        entry.stamp_due = False
        if entry.device.persistent:
            entry.device.stamps[entry.name] = entry.stamp


def _parts(batch: Sequence[Write]) -> Iterator[list[Write]]:
    part: list[Write] = []
    size_bytes = 0
    for write in batch:
        part.append(write)
        size_bytes += write.length_bytes
        if size_bytes >= _PART_BYTES:
            yield part
            part, size_bytes = [], 0
    if part:
        yield part


def _open_all(store: ObjectStore, wanted: Sequence[tuple[bytes, int]]) -> list[OpenObject]:
    opened: list[OpenObject] = []
    try:
        for name, size_bytes in wanted:
            opened.append(store.open_object(name, size_bytes, create=True))
    except BaseException:
        for one in opened:
            one.close()
        raise
    return opened


def _status_all(files: Sequence[OpenObject]) -> list[os.stat_result | None]:
    statuses: list[os.stat_result | None] = []
    for opened in files:
        try:
            statuses.append(os.fstat(opened.fd))
        except OSError:
            statuses.append(None)
    return statuses


def _write_part(jobs: Sequence[tuple[OpenObject, int, memoryview]]) -> None:
    for opened, offset_bytes, data in jobs:
        write_block(opened, offset_bytes, data)


def _sync(store: ObjectStore, files: Sequence[OpenObject], ranges: Sequence[tuple[OpenObject, int, int]]) -> None:
    store.sync_written(files)
    for opened, offset_bytes, length_bytes in ranges:
        drop_cached(opened, offset_bytes, length_bytes)
