"""One directory of a local tier on one device: its objects, its residency, its write queue and its health.

Called by local.py on the trio thread. The blocking half (``open``, ``remove`` …) runs in threads, one call at a time
under ``lock``, and touches the store and the database only, never the index.

    ok ──write error, full──► degraded (reads go on, writes pause) ──probe succeeds──► ok
     ├──no answer in time───► stalled (neither)                   ──answers in time─► ok
     └──directory gone──────► lost (nothing of it is read)        ──opens again─────► ok, its objects are loaded
"""

import collections
import errno
import logging
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import trio

from tierfs.blocks.errors import TierFailed
from tierfs.blocks.ids import BlockDigest, ObjectKey
from tierfs.tiers.index import Entry
from tierfs.tiers.interface import Lease
from tierfs.tiers.objects import ObjectStore, OpenObject, allocated_bytes, is_object
from tierfs.tiers.persistence import PersistedResidency, Wanted, open_persistence
from tierfs.tiers.residency import NO_STAMP, Stored, StoredObject, boot_id, result_code

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

READ_THREADS = 8  # an NVMe device wants several requests at once; more than this only queue in the kernel
WRITE_THREADS = 4
# Longer than a disk's own recovery from a bad sector usually takes, and short enough that a reader need not give up.
READ_TICKS = 5  # a read without an answer for so many ticks means that the device is stalled
_WRITE_TICKS = 30  # a sync may wait for all that others have written; reads go on meanwhile
_SPEED_SHARE = 0.2  # of a new measurement in the moving average
_PROBE_MAX_S = 60.0
NOT_OPENED = "not opened yet"
# These say that the directory or its device is not there any more, rather than that one request failed.
GONE = frozenset((errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOTDIR))


@dataclass(eq=False)
class Write:
    """One accepted block on its way to the device."""

    entry: Entry
    block: int
    digest: BlockDigest
    lease: Lease | None
    length_bytes: int
    cost_bytes: int  # what it will take on the device
    settled: bool = False  # resident or dropped; the lease and the reservation are given back


@dataclass
class Loaded:
    """What a device held when it was opened: objects that are really there, each with its allocated bytes."""

    stored: Stored = field(default_factory=Stored)
    objects: list[tuple[StoredObject, int]] = field(default_factory=list)
    dying: list[tuple[str, int]] = field(default_factory=list)  # removed, but somebody maps them: name, allocated bytes


class Device:
    """See the head of the file. ``state`` is ok, degraded, stalled or lost.

    ``block_bytes`` and ``capacity_bytes`` (of the tier; None: all of the device) size what it must be able to record.
    """

    def __init__(
        self, root: Path, *, mapped: bool, probe_s: float, block_bytes: int, capacity_bytes: int | None,
        residency: Wanted = "asked",
    ) -> None:  # fmt: skip
        self.root = root
        self.store = ObjectStore(root, mapped=mapped)
        self.state = "lost"
        self.reason = NOT_OPENED
        self.queue: collections.deque[Write] = collections.deque()
        self.work = trio.Event()
        self.reclaim = trio.Event()
        self.attention = trio.Event()  # look at it now: something that should be there was not
        self.nowait = True  # whether the file system knows RWF_NOWAIT
        self.lock = trio.Lock()
        self.readers = trio.CapacityLimiter(READ_THREADS)
        self.writers = trio.CapacityLimiter(WRITE_THREADS)
        self.free_bytes = self.size_bytes = 0  # of the file system
        self.written_bytes_per_s = 0.0
        self.credit = 0.0  # see choose
        # Saved late, in one transaction for many: see local.py.
        self.verified: list[tuple[ObjectKey, int]] = []
        self.keys: list[tuple[ObjectKey, ObjectKey, ObjectKey]] = []
        self.used: dict[ObjectKey, float] = {}
        self.stamps: dict[ObjectKey, tuple[int, int]] = {}
        self.unverified: set[ObjectKey] = set()
        self.heat_changed = False
        self._mapped = mapped
        self.medium = self.residency_kind = self.residency_reason = ""  # for people, once it was opened
        self._block_bytes = block_bytes
        self._capacity_bytes = capacity_bytes
        self._wanted: Wanted = residency
        self._residency: PersistedResidency | None = None
        self._buried: dict[ObjectKey, str] = {}  # by a remove that then failed
        self._housekeeping = trio.CapacityLimiter(1)
        self._probe_s = probe_s
        self._backoff_s = probe_s
        # Calls that threads are in: for how many ticks, and how many are too many. The threads add and remove.
        self._calls: dict[object, list[int]] = {}
        self._waiting: set[trio.Event] = set()
        self.device_number: int | None = None  # of the file system: two paths may be on one
        self.full = False  # what put it out of service is a lack of space
        self._short_bytes = 0  # what must be free before writes are tried again

    @property
    def evictable(self) -> bool:
        """Whether evicting from it gives space: it can record what it removes."""
        return self.state == "ok" or (self.state == "degraded" and self.full)

    @property
    def writable(self) -> bool:
        """Whether blocks may be offered to it."""
        return self.state == "ok"

    @property
    def readable(self) -> bool:
        """Whether its objects can be read."""
        return self.state not in ("lost", "stalled")

    @property
    def present(self) -> bool:
        """Whether its objects are there, though perhaps not to be read just now."""
        return self.state != "lost"

    @property
    def persistent(self) -> bool:
        """Whether the next run finds what this one stored."""
        return self._residency is not None

    async def blocking(self, call: Callable[..., _Result], *args: object, abandon: bool = False) -> _Result:
        """Run a blocking call of this device's housekeeping in a thread of its own.

        Cancellation waits for it, unless ``abandon``: for the end of the run, when a device no longer answers.
        """
        return await trio.to_thread.run_sync(
            self._timed, _WRITE_TICKS, call, *args, limiter=self._housekeeping, abandon_on_cancel=abandon
        )

    async def reading(self, call: Callable[..., _Result], *args: object, abandon: bool = False) -> _Result:
        """Run a call that reads in one of the device's reader threads; it is timed, see ``tick``.

        Cancellation waits for it, unless ``abandon``: whoever must not wait leaves a task with it, see ``waiting``.
        """
        return await trio.to_thread.run_sync(
            self._timed, READ_TICKS, call, *args, limiter=self.readers, abandon_on_cancel=abandon
        )

    async def writing(self, call: Callable[..., _Result], *args: object) -> _Result:
        """Likewise a call that writes, in one of the writer threads."""
        return await trio.to_thread.run_sync(self._timed, _WRITE_TICKS, call, *args, limiter=self.writers)

    def _timed(self, ticks_max: int, call: Callable[..., _Result], *args: object) -> _Result:
        token = object()
        self._calls[token] = [0, ticks_max]
        try:
            return call(*args)
        finally:
            del self._calls[token]

    @contextmanager
    def waiting(self, event: trio.Event) -> Iterator[None]:
        """While inside, the event is set, too, when the device stalls."""
        self._waiting.add(event)
        try:
            yield
        finally:
            self._waiting.discard(event)

    def tick(self) -> bool:
        """A second has passed; whether the device was put out of service because a call has had no answer for too long.

        Counted, not measured: a process that was stopped has waited for nobody.
        """
        late = [False, False]
        for call in list(self._calls.values()):
            call[0] += 1
            if call[0] > call[1]:
                late[call[1] == READ_TICKS] = True
        writes, reads = late
        if reads and self.stall():
            return True
        if writes and self.writable:
            self.fault(OSError(errno.ETIMEDOUT, f"a write has had no answer for {_WRITE_TICKS} s"))
            return True
        return False

    def stall(self) -> bool:
        """A read has had no answer for ``READ_TICKS`` seconds, ours or the channel's; whether that is news."""
        if not self.readable:
            return False
        self._out("stalled", f"a read has had no answer for {READ_TICKS} s")
        for event in self._waiting:
            event.set()
        self.attention.set()
        return True

    # -- the blocking half: in a thread

    def open(self) -> Loaded:
        """Open the directory and its residency, and make the two agree. Raises TierFailed, OSError, sqlite3.Error."""
        self._check_same_device()
        store = ObjectStore(self.root, mapped=self._mapped)
        store.open()
        residency = None
        try:
            loaded = Loaded()
            size_bytes = store.size_bytes()
            found = open_persistence(
                self.root, mapped=self._mapped, medium=store.medium, wanted=self._wanted, boot=boot_id(),
                capacity_bytes=min(self._capacity_bytes or size_bytes, size_bytes), block_bytes=self._block_bytes,
            )  # fmt: skip
            residency, loaded.stored = found.residency, found.stored
            if found.medium == "pmem":
                store.medium, store.synchronous = "dax", True
            if residency is not None:
                store.fill_reserve()
            store.upgrade_format()
            loaded.dying = store.dying()
            self._reconcile(store, residency, loaded)
            free_bytes = store.free_bytes()
        except BaseException:
            if residency is not None:
                residency.close(clean=False)
            store.close()
            raise
        self.store, self._residency = store, residency
        self.free_bytes, self.size_bytes = free_bytes, size_bytes
        self.medium, self.residency_kind, self.residency_reason = found.medium, found.kind, found.reason
        self.nowait = store.nowait
        self._buried = {}  # they were found among the dying ones
        self.device_number = store.device_number()
        return loaded

    def _check_same_device(self) -> None:
        """A directory that comes back on another device is an unmounted mount point: leave it alone."""
        if self.device_number is None:
            return
        place = self.root
        while not place.exists():
            place = place.parent
        if place.stat().st_dev != self.device_number:
            raise TierFailed(f"tier directory {self.root} is on another device than before: mount its device again")

    def _reconcile(self, store: ObjectStore, residency: PersistedResidency | None, loaded: Loaded) -> None:
        known = {stored.name: stored for stored in loaded.stored.objects if stored.sound()}
        swept = 0
        sizes: dict[ObjectKey, int] = {}
        for name, status in list(store.scan()):
            stored = known.get(ObjectKey(name))
            if stored is not None and is_object(status, stored.size_bytes):
                if stored.stamp != (status.st_mtime_ns, status.st_ctime_ns):
                    stored.stamp = NO_STAMP
                loaded.objects.append((stored, allocated_bytes(status)))
                del known[stored.name]
            elif stored is None:
                self._sweep(store, ObjectKey(name), allocated_bytes(status), loaded)
                swept += 1
            else:
                sizes[stored.name] = allocated_bytes(status)
        sound = {stored.name for stored, _ in loaded.objects}
        gone = [stored.name for stored in loaded.stored.objects if stored.name not in sound]
        if gone and residency is not None:
            residency.remove_objects(gone)
        for name, allocated in sizes.items():  # of a wrong length, or something that is no file
            self._sweep(store, name, allocated, loaded)
        if swept or gone:
            _log.warning("tier_reconciled path=%s removed_objects=%d dropped_rows=%d", self.root, swept, len(gone))

    @staticmethod
    def _sweep(store: ObjectStore, name: ObjectKey, allocated: int, loaded: Loaded) -> None:
        leaf = store.sweep(name)
        if leaf is not None:
            loaded.dying.append((leaf, allocated))

    def hand_out(self, name: ObjectKey) -> None:
        """Remember that somebody may map this object's file."""
        if self._residency is not None:
            self._residency.hand_out(name)

    def commit(self, objects: Sequence[StoredObject]) -> Collection[ObjectKey]:
        """Make durable blocks resident for the next run; the names of those for which it has no room."""
        return self._residency.commit(objects) if self._residency is not None else ()

    def remove(self, names: Sequence[ObjectKey], handed_out: Collection[ObjectKey] = ()) -> dict[ObjectKey, str]:
        """Residency first, then the files. Those handed out are moved to the dying ones: returns their names there."""
        self.forget(names)
        for name in names:
            if name not in handed_out:
                self.store.unlink(name)
            elif name not in self._buried:
                self._bury(name)
        if self._residency is not None:
            self.store.fill_reserve()
        buried, self._buried = self._buried, {}
        return buried

    def _bury(self, name: ObjectKey) -> None:
        try:
            leaf = self.store.bury(name)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self.store.free_reserve()  # the folder had to grow
            leaf = self.store.bury(name)
        if leaf is not None:
            self._buried[name] = leaf

    def forget(self, names: Sequence[ObjectKey]) -> None:
        """Durably forget these objects; their files stay."""
        residency = self._residency
        if residency is None:
            return
        try:
            residency.remove_objects(names)
        except sqlite3.OperationalError as error:
            if result_code(error) != sqlite3.SQLITE_FULL:
                raise
            # Nothing could ever be evicted from a full device if evicting took space: hence the reserve.
            self.store.free_reserve()
            residency.remove_objects(names)

    def remove_blocks(self, dropped: dict[ObjectKey, list[int]]) -> None:
        """Durably forget some blocks."""
        if self._residency is not None:
            for name, blocks in dropped.items():
                self._residency.remove_blocks(name, blocks)

    def residency(self) -> PersistedResidency | None:
        """The database, None where nothing is persisted."""
        return self._residency

    def probe(self) -> float:
        """How many seconds it took to write and sync a little. Raises OSError or TierFailed unless the directory is
        there and takes writes."""
        started_s = time.monotonic()
        if not self.store.present():
            raise FileNotFoundError(errno.ENOENT, "the tier directory went away", str(self.root))
        self.store.check_writable()
        self.free_bytes = self.store.free_bytes()
        if self.free_bytes < self._short_bytes:
            raise OSError(errno.ENOSPC, "no space left on the device", str(self.root))
        return time.monotonic() - started_s

    def look(self) -> bool:
        """Refresh the free space; False when the directory is gone."""
        if not self.store.present():
            return False
        self.free_bytes, self.size_bytes = self.store.free_bytes(), self.store.size_bytes()
        return True

    def close(self, clean: bool) -> None:
        """Close the database (with the clean-stop mark) and the directory."""
        residency, self._residency = self._residency, None
        try:
            if residency is not None:
                residency.close(clean=clean)
        finally:
            self.store.close()

    # -- on the trio thread

    def unverify(self, name: ObjectKey) -> None:
        """Somebody else wrote to that object's file: no block of it counts as verified, in the next run either."""
        self.unverified.add(name)
        self.verified = [(other, block) for other, block in self.verified if other != name]
        self.stamps.pop(name, None)

    def fault(self, error: Exception, *, lost: bool = False, short_bytes: int = 0) -> None:
        """Writes pause (and reads too when it is lost) until a probe succeeds.

        ``short_bytes`` is what a write had no room for.
        """
        self._short_bytes = max(self._short_bytes, short_bytes)
        self.full = is_full(error)
        if isinstance(error, OSError) and error.errno in GONE:
            self.attention.set()
        state = "lost" if lost else "degraded"
        if self.state == "ok" or (self.state in ("degraded", "stalled") and lost):
            self._out(state, describe(error))
        elif self.state == state == "degraded" and not isinstance(error, sqlite3.Error):
            self.reason = describe(error)  # a probe often knows more than what failed first; a database never does

    def answers(self, error: Exception) -> None:
        """A stalled device answers a probe again, with an error: its objects may be read."""
        self._out("degraded", describe(error))

    def _out(self, state: str, reason: str) -> None:
        self.state, self.reason = state, reason
        _log.error("tier_device_out_of_service path=%s state=%s reason=%r", self.root, state, reason)

    def recovered(self) -> None:
        """A probe succeeded. The back-off is kept until a real write has succeeded too."""
        if self.reason not in ("", NOT_OPENED):
            _log.warning("tier_device_in_service path=%s was=%r", self.root, self.reason)
        self.state, self.reason = "ok", ""

    def wrote(self, length_bytes: int, elapsed_s: float) -> None:
        """A batch became durable: feeds the speed, ends the back-off."""
        self._backoff_s, self._short_bytes = self._probe_s, 0
        if length_bytes >= 1 << 20 and elapsed_s > 0:
            speed = length_bytes / elapsed_s
            old = self.written_bytes_per_s
            self.written_bytes_per_s = speed if old == 0 else old + _SPEED_SHARE * (speed - old)

    def next_probe_s(self) -> float:
        """How long to wait before the next probe; doubles each time while the device stays out of service."""
        if self.state in ("ok", "stalled"):  # the probe of a stalled device itself waits until it answers
            return self._probe_s
        wait_s = self._backoff_s
        self._backoff_s = min(_PROBE_MAX_S, self._backoff_s * 2)
        return wait_s


def choose(devices: Sequence[Device], needed_bytes: int) -> Device | None:
    """The device for a new object: in turn, in proportion to free space times measured speed (smooth round robin)."""
    usable = [device for device in devices if device.writable]
    # An object larger than what is free is started all the same where there is nothing better: most of it may fit.
    usable = [device for device in usable if device.free_bytes >= needed_bytes] or usable
    if not usable:
        return None
    known = [device.written_bytes_per_s for device in usable if device.written_bytes_per_s > 0]
    usual = sum(known) / len(known) if known else 1.0
    weights = [max(1.0, device.free_bytes * (device.written_bytes_per_s or usual)) for device in usable]
    total = sum(weights)
    for device, weight in zip(usable, weights, strict=True):
        device.credit += weight / total
    chosen = max(usable, key=lambda device: device.credit)
    chosen.credit -= 1.0
    return chosen


def is_full(error: Exception) -> bool:
    """Whether there was no space left, be it for a block or for the database."""
    if isinstance(error, sqlite3.Error):
        return result_code(error) == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno == errno.ENOSPC


def describe(error: Exception) -> str:
    """The reason for a person."""
    if is_full(error):
        return "no space left on the device"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, sqlite3.Error):
        return f"residency: {error}"
    if isinstance(error, TierFailed):
        return str(error)
    return repr(error)


def close_all(files: Sequence[OpenObject]) -> None:
    """Close descriptors in a thread: the last one of an unlinked object frees its space, which takes its time."""
    for opened in files:
        opened.close()
