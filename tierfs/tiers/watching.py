"""Watches the objects that were handed out whole: their readers meet a bad medium without telling us. Called by
local.py and lending.py, on the trio thread.

    handed out ─► looked at (a disk: failed_pages.py, DAX: bad_blocks.py): before it is handed out again, when a reader
                  has closed it, and every few seconds ─► a page cannot be read ─► reading.py drops it: the next open
                  goes below

What must hold: a look costs no more than its budget, and the medium nothing where nobody reads; no open waits for the
looks of others. A tmpfs is not watched: nothing tells of bad memory but the end of who touches it.
"""

import errno
import logging

import trio

from tierfs.tiers import bad_blocks, failed_pages
from tierfs.tiers.device import Device
from tierfs.tiers.failed_pages import Found
from tierfs.tiers.index import Entry, Index
from tierfs.tiers.interface import TierStatistics
from tierfs.tiers.objects import ObjectStore
from tierfs.tiers.reading import Reader

_log = logging.getLogger(__name__)

_EVERY_S = 5.0
_AT_ONCE = 256  # objects of one round; the others are next
_BUDGET_S = 0.2
_WAIT_S = 30.0
# A device that does not answer must not keep an open for longer, and a file of many gigabytes not for as long.
_OPEN_BUDGET_S, _OPEN_S = 0.05, 0.5


class Watching:
    """The looks of one tier."""

    def __init__(self, *, index: Index, reader: Reader, statistics: TierStatistics) -> None:
        self._index = index
        self._reader = reader
        self._statistics = statistics
        self._closed: list[Entry] = []
        self._some_closed = trio.Event()
        self._next = 0
        self._blind: set[Device] = set()  # of which the kernel does not tell

    def closed(self, entry: Entry) -> None:
        """A reader has closed an object: it may have done so for an error. Never waits."""
        if entry.handed_out and entry not in self._closed and len(self._closed) < _AT_ONCE:
            self._closed.append(entry)
            self._some_closed.set()

    async def sound(self, entry: Entry) -> bool:
        """Before the object is handed out: whether nothing tells that its medium is bad. What is bad is dropped, an
        object that was handed out before is removed.

        True, too, where the device does not answer in time.
        """
        if self._tells(entry):
            await self._look(entry, budget_s=_OPEN_BUDGET_S, wait_s=_OPEN_S)
        return not entry.removing

    async def run(self) -> None:
        """Look for ever; cancel to end."""
        all_at_s = trio.current_time() + _EVERY_S
        while True:
            with trio.move_on_at(all_at_s):
                await self._some_closed.wait()
            entries, self._closed, self._some_closed = self._closed, [], trio.Event()
            due = trio.current_time() >= all_at_s
            if due:
                entries += self._some()
            for entry in entries:
                if self._tells(entry):
                    await self._look(entry, budget_s=_BUDGET_S, wait_s=_WAIT_S)
            if due:
                all_at_s = trio.current_time() + _EVERY_S

    def _tells(self, entry: Entry) -> bool:
        device = entry.device
        # The list of bad blocks may tell before anybody reads; the page cache only afterwards.
        watched = (entry.handed_out or device.store.medium == "dax") and not entry.removing
        return watched and device not in self._blind and device.readable and device.store.medium != "tmpfs"

    def _some(self) -> list[Entry]:
        watched = [entry for entry in self._index if entry.handed_out]
        first = self._next if self._next < len(watched) else 0
        self._next = first + _AT_ONCE
        return watched[first : first + _AT_ONCE]

    async def _look(self, entry: Entry, *, budget_s: float, wait_s: float) -> None:
        device = entry.device
        found: Found | None = None
        try:
            with trio.move_on_after(wait_s):
                # The thread has a descriptor of its own: one that hangs in a dead device is left behind.
                found = await device.reading(
                    _open_and_look, device.store, entry.name, entry.size_bytes, entry.found_good, budget_s, abandon=True
                )
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP):
                if device not in self._blind:
                    _log.warning("media_errors_not_watched tier=%s device=%s reason=%r", self._statistics.name,
                                 device.root, error.strerror)  # fmt: skip
                self._blind.add(device)
            return  # else what a reader will meet, too: it has gone, or we lack something
        if found is None:
            return
        if entry.handed_out:  # else it may be written to again, elsewhere on the device
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
        if store.medium == "dax":
            return bad_blocks.look(opened.fd, known)
        return failed_pages.look(opened.fd, size_bytes, known, budget_s=budget_s)
    finally:
        opened.close()
