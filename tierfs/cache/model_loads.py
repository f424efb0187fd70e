"""Loads of models as readers see them: how far each is, and a record of it for `tierfs report`.

fuse/operations.py tells of each read, the block cache of each block or span that was taken from the source or a tier.

    a read of a file ─► its model's load begins, unless one is under way
    quiet for 10 s; or for 2 s once as many bytes of each file were read as it has ─► the load is over, and kept
    blocks that come though nobody reads (warm, pin) ─► followed as ``bringing`` while they come, and not kept

What must hold: a read costs a few microseconds more; a load has bounded memory, and there are at most a few; nothing
waits for the disk that records are written to. Times come in as arguments (monotonic seconds).
"""

import heapq
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Literal

import trio

from tierfs.cache.block_cache import FileFacts
from tierfs.catalog.load_store import FileLoad, LoadRecord, LoadStore, Slice, Stall, decode, encode

_QUIET_S = 10.0
_QUIET_COMPLETE_S = 2.0
_LOADS_MAX = 32  # at once; one more ends the one that was quiet longest
_FILES_MAX = 2048  # followed one by one
_FILES_KEPT = 64
_SLICES_MAX = 256  # then two become one
_SLICE_S = 0.25
_STALLS_KEPT = 16
_STALL_S = 0.1
_RATE_S = 10.0  # what a rate is measured over
_TICK_S = 1.0
_KEEP_S = 10.0  # how often a load that goes on is written
_LAST_WORD_S = 1.0

End = Literal["complete", "quiet", "stopped"]


class ModelLoad:
    """One load under way. ``reading``: somebody reads; else blocks are only brought."""

    def __init__(self, file: FileFacts, *, number: int, mountpoint: str, now_s: float, started_s: float) -> None:
        self.model = file.model
        self.reading = False
        self.running = 0  # reads that are not answered yet
        self.began_s = self.last_s = now_s
        self.record = LoadRecord(
            number=number, mountpoint=mountpoint, path=_text(file.model), bytes=file.model_bytes, started_s=started_s,
            read_sizes={}, places={}, slice_s=_SLICE_S, slices=[], stalls=[], files=[],
        )  # fmt: skip
        self._files: dict[bytes, FileLoad] = {}
        self._stalls: list[tuple[float, int, Stall]] = []  # a heap, the shortest first
        self._marks: deque[tuple[float, int]] = deque([(now_s, 0)], maxlen=int(_RATE_S / _TICK_S) + 1)
        self.written_s = now_s

    @property
    def complete(self) -> bool:
        """As many bytes were read of each file as it has."""
        return self.record.covered_bytes >= self.record.bytes > 0

    @property
    def done_bytes(self) -> int:
        """What counts for the rate: read, or brought where nobody reads."""
        return self.record.covered_bytes if self.reading else self.record.source_bytes

    def rate(self, now_s: float) -> float:
        """Bytes a second, over the last seconds."""
        since_s, since_bytes = self._marks[0]
        return (self.done_bytes - since_bytes) / max(now_s - since_s, 0.001)

    def mark(self, now_s: float) -> None:
        """Called about once a second, for the rate."""
        self._marks.append((now_s, self.done_bytes))

    def read(
        self, file: FileFacts, offset_bytes: int, length_bytes: int, place: str, began_s: float, now_s: float
    ) -> None:
        """A read was answered."""
        record = self.record
        record.reads += 1
        record.read_bytes += length_bytes
        record.places[place] = record.places.get(place, 0) + 1
        size = str(1 << max(0, length_bytes - 1).bit_length())
        record.read_sizes[size] = record.read_sizes.get(size, 0) + 1
        one = self._file(file, began_s)
        if one is not None:
            record.covered_bytes += min(one.bytes, one.read_bytes + length_bytes) - min(one.bytes, one.read_bytes)
            one.read_bytes += length_bytes
            one.reads += 1
            one.wait_s += now_s - began_s
            one.last_s = now_s - self.began_s
        self._slice(now_s).read_bytes += length_bytes
        self._waited(file, offset_bytes, place, began_s, now_s)

    def failed(self, file: FileFacts, offset_bytes: int, began_s: float, now_s: float) -> None:
        """A read was answered with an error."""
        self.record.failed_reads += 1
        self._file(file, began_s)
        self._waited(file, offset_bytes, "error", began_s, now_s)

    def brought(self, place: str, length_bytes: int, now_s: float) -> None:
        """Bytes were taken from the source or a tier."""
        record, slice_ = self.record, self._slice(now_s)
        if place == "source":
            record.source_bytes += length_bytes
            slice_.source_bytes += length_bytes
        elif place == "hot":
            record.hot_bytes += length_bytes
            slice_.hot_bytes += length_bytes
        else:
            record.warm_bytes += length_bytes
            slice_.warm_bytes += length_bytes
        self.last_s = now_s

    def snapshot(self, now_s: float, end: End | Literal[""] = "") -> LoadRecord:
        """The record as it is kept."""
        record = self.record
        record.end = end
        record.duration_s = max(0.0, (self.last_s if end else now_s) - self.began_s)
        record.stalls = [stall for _, _, stall in sorted(self._stalls, reverse=True)]
        record.file_count = len(self._files)
        record.files = heapq.nlargest(_FILES_KEPT, self._files.values(), key=lambda one: one.wait_s)
        return record

    def _file(self, file: FileFacts, began_s: float) -> FileLoad | None:
        one = self._files.get(file.version)
        if one is None and len(self._files) < _FILES_MAX:
            first_s = max(0.0, began_s - self.began_s)
            one = self._files[file.version] = FileLoad(
                _text(file.path), file.size_bytes, first_s=first_s, last_s=first_s
            )
        return one

    def _waited(self, file: FileFacts, offset_bytes: int, place: str, began_s: float, now_s: float) -> None:
        self.last_s = now_s
        seconds = now_s - began_s
        if seconds < _STALL_S:
            return
        self.record.stalled_reads += 1
        self.record.stalled_s += seconds
        if len(self._stalls) == _STALLS_KEPT and self._stalls[0][0] >= seconds:
            return
        stall = Stall(max(0.0, began_s - self.began_s), seconds, _text(file.path), offset_bytes, place)
        entry = (seconds, self.record.stalled_reads, stall)
        (heapq.heappush if len(self._stalls) < _STALLS_KEPT else heapq.heapreplace)(self._stalls, entry)

    def _slice(self, now_s: float) -> Slice:
        record = self.record
        position = int(max(0.0, now_s - self.began_s) / record.slice_s)
        while position >= _SLICES_MAX:
            pairs = [record.slices[at : at + 2] for at in range(0, len(record.slices), 2)]
            record.slices = [_sum(pair) for pair in pairs]
            record.slice_s *= 2
            position //= 2
        while len(record.slices) <= position:
            record.slices.append(Slice())
        return record.slices[position]


class ModelLoads:
    """All loads under way in one mount; ``run()`` ends and keeps them."""

    def __init__(self, store: LoadStore | None = None, *, mountpoint: str = "") -> None:
        self._store = store
        self._mountpoint = _text(mountpoint.encode(errors="surrogateescape"))
        self._loads: OrderedDict[bytes, ModelLoad] = OrderedDict()
        self._number = 0
        self._unwritten: OrderedDict[int, bytes] = OrderedDict()
        self._handed_out: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # before a load: how often, the last

    async def run(self, *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Then what is under way is kept, if the disk takes it within a second."""
        limiter = trio.CapacityLimiter(1)
        if self._store is not None:
            newest = await trio.to_thread.run_sync(self._store.newest_number, limiter=limiter, abandon_on_cancel=True)
            self._renumber(newest)
        task_status.started()
        try:
            while True:
                await trio.sleep(_TICK_S)
                self.tick(time.monotonic())
                await self._write(limiter)
        finally:
            now_s = time.monotonic()
            for load in list(self._loads.values()):
                self._end(load, now_s, "stopped")
            with trio.CancelScope(shield=True), trio.move_on_after(_LAST_WORD_S):
                await self._write(trio.CapacityLimiter(1))

    def read_begins(self, file: FileFacts, now_s: float) -> ModelLoad:
        """A read of that file has come; the load it belongs to. One call of read_ends or read_failed follows."""
        load = self._loads.get(file.model)
        if load is None or not load.reading:  # what was brought before belongs to no reader
            load = self._begin(file, now_s)
            load.reading = True
            count, last_s = self._handed_out.pop(file.model, (0, now_s))
            load.record.passthrough_opens = count if now_s - last_s < _QUIET_S else 0
        load.running += 1
        return load

    @staticmethod
    def read_ends(
        load: ModelLoad, file: FileFacts, offset_bytes: int, length_bytes: int, place: str, began_s: float, now_s: float
    ) -> None:
        """It was answered."""
        load.running -= 1
        load.read(file, offset_bytes, length_bytes, place, began_s, now_s)

    @staticmethod
    def read_failed(load: ModelLoad, file: FileFacts, offset_bytes: int, began_s: float, now_s: float) -> None:
        """It was answered with an error, or cancelled."""
        load.running -= 1
        load.failed(file, offset_bytes, began_s, now_s)

    def brought(self, file: FileFacts, place: str, length_bytes: int) -> None:
        """Bytes were taken from the source or a tier. Of a tier without a reader: a promotion, and no load."""
        load = self._loads.get(file.model)
        now_s = time.monotonic()
        if load is None:
            if place != "source":
                return
            load = self._begin(file, now_s)
        load.brought(place, length_bytes, now_s)

    def handed_out(self, file: FileFacts, now_s: float) -> None:
        """A file was opened that the kernel reads by itself: its bytes are seen nowhere here.

        It belongs to the load that goes on, or to one that begins soon: many open all files before they read one.
        """
        load = self._loads.get(file.model)
        if load is not None and load.reading:
            load.record.passthrough_opens += 1
            return
        count, last_s = self._handed_out.pop(file.model, (0, now_s))
        self._handed_out[file.model] = (1 + (count if now_s - last_s < _QUIET_S else 0), now_s)
        if len(self._handed_out) > _LOADS_MAX:
            self._handed_out.popitem(last=False)

    def under_way(self) -> Iterator[ModelLoad]:
        """Those that go on, the oldest first."""
        yield from list(self._loads.values())

    def tick(self, now_s: float) -> None:
        """About once a second: end what is quiet, and prepare what is to be written."""
        for load in list(self._loads.values()):
            load.mark(now_s)
            quiet_s = now_s - load.last_s
            if load.running == 0 and quiet_s >= (_QUIET_COMPLETE_S if load.complete else _QUIET_S):
                self._end(load, now_s, "complete" if load.complete else "quiet")
            elif load.reading and now_s - load.written_s >= _KEEP_S:
                load.written_s = now_s
                self._queue(load.snapshot(now_s))

    def kept(self) -> list[LoadRecord]:
        """Blocking, in a thread: what is on the disk, the newest first."""
        return [] if self._store is None else self._store.load()

    def newest(self, now_s: float) -> list[LoadRecord]:
        """What the disk does not have yet, or not in its newest form: those that end just now, and those that go on."""
        going_on = [load.snapshot(now_s) for load in self._loads.values() if load.reading]
        return [*map(decode, self._unwritten.values()), *going_on]

    def _begin(self, file: FileFacts, now_s: float) -> ModelLoad:
        if len(self._loads) >= _LOADS_MAX:
            self._end(min(self._loads.values(), key=lambda load: load.last_s), now_s, "stopped")
        self._number += 1
        load = ModelLoad(file, number=self._number, mountpoint=self._mountpoint, now_s=now_s, started_s=time.time())
        self._loads[file.model] = load
        return load

    def _renumber(self, newest: int) -> None:
        self._number += newest
        for load in self._loads.values():
            load.record.number += newest

    def _end(self, load: ModelLoad, now_s: float, end: End) -> None:
        if self._loads.get(load.model) is load:
            del self._loads[load.model]
        if load.reading:
            self._queue(load.snapshot(now_s, end))

    def _queue(self, record: LoadRecord) -> None:
        if self._store is not None:
            self._unwritten[record.number] = encode(record)
            if len(self._unwritten) > _LOADS_MAX:  # the disk does not answer
                self._unwritten.popitem(last=False)

    async def _write(self, limiter: trio.CapacityLimiter) -> None:
        store = self._store
        while self._unwritten and store is not None:
            number, data = next(iter(self._unwritten.items()))
            await trio.to_thread.run_sync(store.replace, number, data, limiter=limiter, abandon_on_cancel=True)
            if self._unwritten.get(number) is data:
                del self._unwritten[number]


def _sum(slices: list[Slice]) -> Slice:
    return Slice(
        sum(one.read_bytes for one in slices), sum(one.source_bytes for one in slices),
        sum(one.hot_bytes for one in slices), sum(one.warm_bytes for one in slices),
    )  # fmt: skip


def _text(path: bytes) -> str:
    return path.decode(errors="backslashreplace")
