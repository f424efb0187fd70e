"""Places instead of bytes: objects that the channel, or the kernel by itself, reads from. Called by local.py, on the
trio thread.

What must hold: a place is told under the same rules as bytes are returned (see reading.py); while one is held, the
object stays open, and lent; an object is lent once per time it is open; one that is handed out whole is marked before
anybody can map it.
"""

import logging
import os
import sqlite3

import trio

from tierfs.blocks.spans import Span
from tierfs.tiers.descriptors import Descriptors
from tierfs.tiers.device import Device
from tierfs.tiers.index import Entry
from tierfs.tiers.interface import Lender, LentFile, Part, TierStatistics
from tierfs.tiers.objects import OpenObject
from tierfs.tiers.reading import Reader
from tierfs.tiers.watching import Watching

_log = logging.getLogger(__name__)

_INCOMPLETE = "incomplete"
_REFUSED_S = 10.0  # so long the channel is not asked again for an object it refused


class ObjectHold:
    """Keeps an object open; implements ``interface.Hold``."""

    __slots__ = ("_descriptors", "_opened")

    def __init__(self, descriptors: Descriptors, opened: OpenObject) -> None:
        self._descriptors = descriptors
        self._opened: OpenObject | None = opened

    def release(self) -> None:
        """See Hold."""
        opened, self._opened = self._opened, None
        assert opened is not None, "a hold is released once"
        self._descriptors.give_back(opened)


class Lending:
    """What one tier lends. Nothing while there is no lender."""

    def __init__(
        self, *, descriptors: Descriptors, reader: Reader, watching: Watching, statistics: TierStatistics
    ) -> None:
        self._descriptors = descriptors
        self._reader = reader
        self._watching = watching
        self._statistics = statistics
        self._under_way: dict[OpenObject, trio.Event] = {}

    def locate_nowait(self, entry: Entry, span: Span) -> Part | None:
        """LocalTier.locate_nowait."""
        if self._descriptors.lender is None or not self._reader.usable(entry, span) or not self._reader.at_once(entry):
            return None
        opened = self._descriptors.borrow(entry)
        part = None
        try:
            if opened is not None:
                part = self._place(entry, opened, span)
        except OSError:
            pass  # the waiting one meets it again, and deals with it
        finally:
            if opened is not None and part is None:
                self._descriptors.give_back(opened)
        return part

    async def locate(self, entry: Entry, span: Span) -> Part | None:
        """LocalTier.locate."""
        if self._descriptors.lender is None or not self._reader.usable(entry, span):
            return None
        opened = await self._reader.open(entry)
        if opened is None:
            return None
        part = None
        try:
            if opened.lent is None:
                await self._lend(entry, opened)
            part = self._place(entry, opened, span, await self._reader.status(entry, opened))
            return part
        except OSError as error:
            await self._reader.failed(entry, span.block, error)
            return None
        finally:
            if part is None:
                self._descriptors.give_back(opened)

    def _place(self, entry: Entry, opened: OpenObject, span: Span, status: os.stat_result | None = None) -> Part | None:
        """The place of a span in an object that is open, and stays so. No checkpoint between here and the caller.

        Raises OSError.
        """
        lent = opened.lent
        if lent is None or not self._reader.untouched(entry, opened, status) or not self._reader.usable(entry, span):
            return None
        if span.start_bytes == 0:
            self._statistics.hit_blocks += 1
        offset_bytes = span.block * entry.block_bytes + span.start_bytes
        return Part(lent, offset_bytes, span.length_bytes, ObjectHold(self._descriptors, opened))

    async def whole(self, entry: Entry) -> LentFile | None:
        """LocalTier.whole. Of those that are all here and not handed out all the same, the reasons are counted."""
        if self._descriptors.lender is None:
            return None
        found = await self._whole(entry)
        if not isinstance(found, str):
            self._statistics.handed_out += 1
            return found
        if found != _INCOMPLETE:
            counts = self._statistics.kept_back
            counts[found] = counts.get(found, 0) + 1
            _log.info("object_kept_back tier=%s reason=%r path=%r", self._statistics.name, found, entry.path)
        return None

    async def _whole(self, entry: Entry) -> LentFile | str:
        """The object, or why it cannot be handed out."""
        if lacks := _lacks(entry):
            return lacks
        if not await self._watching.sound(entry):
            return "cannot be read"
        opened = await self._reader.open(entry)
        if opened is None:
            return "cannot be opened"
        try:
            lent = opened.lent or await self._lend(entry, opened)
            if lent is None:
                return "not taken by the channel"
            if not self._reader.untouched(entry, opened, await self._reader.status(entry, opened)):
                return "changed by somebody else"
            if lacks := _lacks(entry):
                return lacks
            entry.handed_out = True  # no checkpoint since it was complete: nothing of it is dropped or written now
            if not entry.handed_out_saved and not await self._save(entry):
                return "cannot be marked"
            if not self._reader.untouched(entry, opened, await self._reader.status(entry, opened)):
                return "changed by somebody else"
            if lacks := _lacks(entry):
                return lacks
            return lent
        except OSError as error:
            await self._reader.failed(entry, 0, error)
            return "cannot be read"
        finally:
            self._descriptors.give_back(opened)

    def device(self, lent: LentFile) -> Device | None:
        """Where a lent file lies; None when it was taken back."""
        entry = self._descriptors.owner(lent)
        return entry.device if isinstance(entry, Entry) else None

    async def failed(self, lent: LentFile, offset_bytes: int, error_number: int) -> None:
        """LocalTier.failed. ``error_number`` 0: the file ended before."""
        entry = self._descriptors.owner(lent)
        if not isinstance(entry, Entry):
            return
        error = OSError(error_number, os.strerror(error_number) if error_number else "short file")
        await self._reader.failed(entry, offset_bytes // entry.block_bytes, error)

    async def _lend(self, entry: Entry, opened: OpenObject) -> LentFile | None:
        """Lend an object that the caller has borrowed; of several callers one does it."""
        while opened.lent is None and opened in self._under_way:
            await self._under_way[opened].wait()
        lender = self._descriptors.lender
        if opened.lent is not None or lender is None or trio.current_time() < opened.lend_again_s:
            return opened.lent
        done = self._under_way[opened] = trio.Event()
        try:
            opened.lent = await self._lend_read_only(lender, entry, opened)
            if opened.lent is None:
                opened.lend_again_s = trio.current_time() + _REFUSED_S
        finally:
            del self._under_way[opened]
            done.set()
        return opened.lent

    async def _save(self, entry: Entry) -> bool:
        device = entry.device
        async with device.lock:
            if entry.removing or not device.readable:
                return False
            if not entry.handed_out_saved:
                try:
                    await device.blocking(device.hand_out, entry.name)
                except (OSError, sqlite3.Error) as error:
                    device.fault(error)
                    return False
                entry.handed_out_saved = True
        return True

    async def _lend_read_only(self, lender: Lender, entry: Entry, opened: OpenObject) -> LentFile | None:
        try:
            fd = opened.reopen() if self._reader.at_once(entry) else await entry.device.reading(opened.reopen)
        except OSError as error:  # our own lack of something: the object is as good as before
            _log.warning("object_cannot_be_lent bytes=%d reason=%r", opened.size_bytes, error.strerror)
            return None
        try:
            return await lender.lend(fd, opened.size_bytes)
        finally:
            os.close(fd)


def _lacks(entry: Entry) -> str:
    """Why it cannot be handed out; "" when every block can be read, and none is being written."""
    if entry.removing:
        return "being evicted"
    if not 0 < entry.resident_blocks == len(entry.resident):
        return _INCOMPLETE
    if entry.writing or entry.pending:
        return "being written"
    if 0 in entry.verified:
        return "not verified"
    return ""
