"""Watches the objects that were handed out whole: their readers meet a bad medium without telling us. Called by
local.py and lending.py, on the trio thread.

    handed out ─► looked at (failed_pages.py): before it is handed out again, when a reader has closed it,
                  and every few seconds ─► a page cannot be read ─► reading.py drops it: the next open goes below

What must hold: a look costs no more than its budget, and the medium nothing where nobody reads; no open waits for the
looks of others. What lies in memory itself (tmpfs, DAX) is not watched: it has no page cache that would tell.
"""

import errno
import logging

import trio

from tierfs.tiers.failed_pages import Found, look
from tierfs.tiers.index import Entry, Index
from tierfs.tiers.interface import TierStatistics
from tierfs.tiers.objects import ObjectStore
from tierfs.tiers.reading import Reader

_log = logging.getLogger(__name__)

_EVERY_S = 5.0
_AT_ONCE = 256  # objects of one round; the others are next
_BUDGET_S = 0.2
_OPEN_BUDGET_S = 0.05


class Watching:
    """The looks of one tier."""

    def __init__(self, *, index: Index, reader: Reader, statistics: TierStatistics) -> None:
        self._index = index
        self._reader = reader
        self._statistics = statistics
        self._closed: list[Entry] = []
        self._some_closed = trio.Event()
        self._next = 0
        self._blind = False  # the kernel does not tell
        self._limiter = trio.CapacityLimiter(1)
        self._openers = trio.CapacityLimiter(4)

    def closed(self, entry: Entry) -> None:
        """A reader has closed an object: it may have done so for an error. Never waits."""
        if entry.handed_out and entry not in self._closed and len(self._closed) < _AT_ONCE:
            self._closed.append(entry)
            self._some_closed.set()

    async def sound(self, entry: Entry) -> bool:
        """Before the object is handed out again: whether nothing tells that its medium is bad. A bad one is removed."""
        if self._tells(entry):
            await self._look(entry, self._openers, _OPEN_BUDGET_S)
        return not entry.removing

    async def run(self) -> None:
        """Look for ever; cancel to end."""
        while True:
            with trio.move_on_after(_EVERY_S) as waited:
                await self._some_closed.wait()
            if waited.cancelled_caught:
                entries = self._some()
            else:
                entries, self._closed, self._some_closed = self._closed, [], trio.Event()
            for entry in entries:
                if self._tells(entry):
                    await self._look(entry, self._limiter, _BUDGET_S)

    def _tells(self, entry: Entry) -> bool:
        device = entry.device
        watched = entry.handed_out and not entry.removing
        return watched and not self._blind and device.readable and device.store.medium == "directory"

    def _some(self) -> list[Entry]:
        watched = [entry for entry in self._index if entry.handed_out]
        first = self._next if self._next < len(watched) else 0
        self._next = first + _AT_ONCE
        return watched[first : first + _AT_ONCE]

    async def _look(self, entry: Entry, limiter: trio.CapacityLimiter, budget_s: float) -> None:
        try:
            # The thread has a descriptor of its own: one that hangs in a dead device is left behind.
            found = await trio.to_thread.run_sync(
                _open_and_look, entry.device.store, entry.name, entry.size_bytes, entry.found_good, budget_s,
                limiter=limiter, abandon_on_cancel=True,
            )  # fmt: skip
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP):
                self._blind = True
                _log.warning("media_errors_not_watched tier=%s reason=%r", self._statistics.name, error.strerror)
            return  # else what a reader will meet, too: it has gone, or we lack something
        entry.found_good = found.known
        block = found.offset_bytes // entry.block_bytes
        if found.error is None or not entry.has(block):
            return
        await self._reader.failed(entry, block, found.error)
        if entry.removing:
            self._statistics.media_errors += 1


def _open_and_look(store: ObjectStore, name: bytes, size_bytes: int, known: list[int], budget_s: float) -> Found:
    opened = store.open_object(name, size_bytes)
    try:
        return look(opened.fd, size_bytes, known, budget_s=budget_s)
    finally:
        opened.close()
