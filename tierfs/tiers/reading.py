"""Reads from the objects of a local tier. Called by local.py, on the trio thread; threads get descriptors and buffers.

What must hold: nothing is returned from a block that is not verified (its digest was compared since the last unclean
stop, or its bytes came from a buffer whose digest had been), nor from a file that somebody else wrote to since (see the
stamp in index.py). A whole-block read always compares. What fails is dropped, counted and logged, and is a miss from
then on.
"""

import errno
import logging
import os
import sqlite3
import sys
from collections.abc import Callable

import trio

from tierfs.blocks.ids import BlockDigest, digest_block
from tierfs.blocks.spans import Span
from tierfs.tiers.descriptors import Descriptors
from tierfs.tiers.device import GONE
from tierfs.tiers.index import Entry
from tierfs.tiers.interface import TierStatistics
from tierfs.tiers.objects import OpenObject, allocated_bytes, read_block

_log = logging.getLogger(__name__)

# Our own lack of something; it says nothing about the object.
_OURS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN))
_REPLY_BYTES = 1 << 20
_REPLY_BUFFERS = 16
_SOON_BYTES = 128 << 10  # a larger one would be copied several times on the trio thread
_LOOKS = 12  # passes of the loop, of some 15 microseconds each where nothing else is to do


class Reader:
    """The reads of one tier. ``remove`` takes a whole object out of the tier."""

    def __init__(
        self, *, descriptors: Descriptors, statistics: TierStatistics, mapped: bool, remove: Callable[[Entry], None]
    ) -> None:
        self._descriptors = descriptors
        self._statistics = statistics
        self._mapped = mapped
        self._remove = remove
        self._replies: list[bytearray] = []

    def span_nowait(self, entry: Entry, span: Span) -> memoryview | None:
        """LocalTier.read_nowait."""
        if not self.usable(entry, span) or not self.at_once(entry):
            return None
        opened = self._descriptors.borrow(entry)
        if opened is None and self._mapped:
            # Opening a file in memory does not wait.
            try:
                fresh = entry.device.store.open_object(entry.name, entry.size_bytes)
            except OSError as error:
                self._open_failed(entry, error)
                return None
            opened = self._descriptors.add(entry, fresh)
        if opened is None:
            return None
        try:
            if not self.untouched(entry, opened) or not self.usable(entry, span):
                return None
            offset_bytes = span.block * entry.block_bytes + span.start_bytes
            if self._mapped:
                view: memoryview | None = opened.view(offset_bytes, span.length_bytes)
            else:
                view = self._cached(entry, opened, offset_bytes, span.length_bytes)
        except OSError:
            return None  # the waiting read meets it again, and deals with it
        finally:
            self._descriptors.give_back(opened)
        if view is not None and span.start_bytes == 0:
            self._statistics.hit_blocks += 1
        return view

    async def span_soon(self, entry: Entry, span: Span) -> memoryview | None:
        """LocalTier.read_soon. A read with RWF_NOWAIT that finds nothing has started the disk's read all the same; an
        NVMe disk has it after some 60 microseconds, less than a hop to a thread and back takes.
        """
        if self._mapped or span.length_bytes > _SOON_BYTES or not self.usable(entry, span) or not self.at_once(entry):
            return None
        opened = self._descriptors.borrow(entry)
        if opened is None:
            return None
        try:
            offset_bytes = span.block * entry.block_bytes + span.start_bytes
            for _ in range(_LOOKS):
                await trio.lowlevel.checkpoint()
                view = self._cached(entry, opened, offset_bytes, span.length_bytes)
                if view is not None:  # read, and then checked, with no checkpoint between
                    return view if self.untouched(entry, opened) and self.usable(entry, span) else None
                if not entry.device.nowait:
                    return None
        except OSError:
            pass  # the waiting read meets it again, and deals with it
        finally:
            self._descriptors.give_back(opened)
        return None

    async def span(self, entry: Entry, span: Span) -> bytes | None:
        """LocalTier.read_span."""
        if not self.usable(entry, span):
            return None
        opened = await self.open(entry)
        if opened is None:
            return None
        try:
            before = await self.status(entry, opened)
            if not self.untouched(entry, opened, before) or not self.usable(entry, span):
                return None
            offset_bytes = span.block * entry.block_bytes + span.start_bytes
            serial = entry.stamp_serial
            data = await entry.device.reading(os.pread, opened.fd, span.length_bytes, offset_bytes)
            after = await self.status(entry, opened)
            # Another reader may have noticed a foreign write meanwhile, and taken the new stamp.
            if not self.untouched(entry, opened, after) or serial != entry.stamp_serial or not self.usable(entry, span):
                return None
        except OSError as error:
            await self.failed(entry, span.block, error)
            return None
        finally:
            self._descriptors.give_back(opened)
        if len(data) != span.length_bytes:
            return None
        if span.start_bytes == 0:
            self._statistics.hit_blocks += 1
        return data

    async def block(self, entry: Entry, block: int, buffer: memoryview) -> bool:
        """LocalTier.read_block."""
        if not entry.has(block) or len(buffer) != entry.length_bytes(block):
            return False
        expected = entry.digest(block)
        opened = await self.open(entry)
        if opened is None:
            return False
        try:
            self.untouched(entry, opened, await self.status(entry, opened))
            if not entry.has(block):
                return False
            serial = entry.stamp_serial
            found = await entry.device.reading(_read_and_digest, opened, block * entry.block_bytes, buffer)
            after = await self.status(entry, opened)
            # The stamp again, after the read: what was compared must be what later reads will find.
            untouched = not entry.removing and self.untouched(entry, opened, after) and serial == entry.stamp_serial
        except OSError as error:
            await self.failed(entry, block, error)
            return False
        finally:
            self._descriptors.give_back(opened)
        if found == expected:
            if untouched and entry.has(block) and not entry.verified[block]:
                entry.verified[block] = 1
                if entry.device.persistent:
                    entry.device.verified.append((entry.name, block))
                    if entry.stamp is not None and not entry.writing:
                        entry.device.stamps[entry.name] = entry.stamp
            self._statistics.hit_blocks += 1
            return True
        if entry.has(block):
            self._statistics.corrupt_blocks += 1
            self._log_block("corrupt_block_dropped", entry, block, "short file" if found is None else "digest differs")
            await self._drop(entry, block)
        return False

    async def open(self, entry: Entry) -> OpenObject | None:
        """The open object, borrowed; None where it cannot be opened (dealt with) or has left meanwhile."""
        opened = self._descriptors.borrow(entry)
        if opened is not None:
            return opened
        try:
            fresh = await entry.device.reading(entry.device.store.open_object, entry.name, entry.size_bytes)
        except OSError as error:
            self._open_failed(entry, error)
            return None
        if entry.removing:  # meanwhile
            fresh.close()
            return None
        return self._descriptors.add(entry, fresh)

    def usable(self, entry: Entry, span: Span) -> bool:
        """Whether the span lies in a verified block. Beyond its end nothing does: a source may say that files of
        different sizes have one content."""
        if not entry.has(span.block) or not entry.verified[span.block]:
            return False
        return span.start_bytes + span.length_bytes <= entry.length_bytes(span.block)

    def at_once(self, entry: Entry) -> bool:
        """Whether looking at an open object of it never waits for its medium."""
        return self._mapped or entry.device.nowait

    async def status(self, entry: Entry, opened: OpenObject) -> os.stat_result:
        """fstat of the open object: at once where that never waits (a local disk keeps the inode of an open file in
        memory), else in a thread (a network's file system may ask its server). Raises OSError.
        """
        if self.at_once(entry):
            return os.fstat(opened.fd)
        return await entry.device.reading(os.fstat, opened.fd)

    def untouched(self, entry: Entry, opened: OpenObject, status: os.stat_result | None = None) -> bool:
        """Whether the file is as we left it. If not, what it may have lost is dropped, the rest is to be verified.

        ``status``: how it was just now; where it is not given it is looked at. Raises OSError.
        """
        status = status or os.fstat(opened.fd)
        if entry.removing:
            return False
        if status.st_size != entry.size_bytes or status.st_nlink == 0:
            change = "unlinked" if status.st_nlink == 0 else f"length {status.st_size}"
            _log.error("object_damaged tier=%s object=%s device=%s change=%r path=%r", self._statistics.name,
                       entry.name.hex(), entry.device.root, change, entry.path)  # fmt: skip
            self._remove(entry)
            if status.st_nlink == 0:
                entry.device.attention.set()
            return False
        stamp = (status.st_mtime_ns, status.st_ctime_ns)
        # While we write, the times are ours; they were compared before and are taken anew after.
        if entry.writing or entry.compare(stamp):
            return True
        _log.warning("object_changed_by_somebody_else tier=%s object=%s device=%s path=%r", self._statistics.name,
                     entry.name.hex(), entry.device.root, entry.path)  # fmt: skip
        if allocated_bytes(status) < entry.allocated_bytes:
            self._drop_holes(entry, opened)
        return False

    def _drop_holes(self, entry: Entry, opened: OpenObject) -> None:
        for block, _ in entry.blocks():
            start_bytes = block * entry.block_bytes
            if os.lseek(opened.fd, start_bytes, os.SEEK_HOLE) < start_bytes + entry.length_bytes(block):
                if entry.handed_out:
                    self._statistics.corrupt_blocks += 1
                    self._quarantine(entry)
                    return
                entry.drop(block)

    def _cached(self, entry: Entry, opened: OpenObject, offset_bytes: int, length_bytes: int) -> memoryview | None:
        """The bytes if they are in the page cache."""
        if not entry.device.nowait:
            return None
        view = memoryview(self._reply_buffer(length_bytes))[:length_bytes]
        try:
            count = os.preadv(opened.fd, [view], offset_bytes, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                entry.device.nowait = False
            return None
        return view if count == length_bytes else None

    def _reply_buffer(self, length_bytes: int) -> bytearray:
        # A fresh bytearray is zeroed first, which costs as much as the copy. One whose earlier view is gone serves
        # again: a view keeps a reference to it, without one only the list, `buffer` and the argument are left.
        if length_bytes > _REPLY_BYTES:
            return bytearray(length_bytes)
        for buffer in self._replies:
            if sys.getrefcount(buffer) == 3:
                return buffer
        buffer = bytearray(_REPLY_BYTES)
        if len(self._replies) < _REPLY_BUFFERS:
            self._replies.append(buffer)
        return buffer

    def _open_failed(self, entry: Entry, error: OSError) -> None:
        self._statistics.failed_reads += 1
        if error.errno in _OURS or entry.removing:
            return
        self._log_block("object_cannot_be_opened", entry, -1, error.strerror)
        if error.errno in GONE:
            entry.device.attention.set()
        self._remove(entry)

    async def failed(self, entry: Entry, block: int, error: OSError) -> None:
        """A read of that block failed: it is a miss from now on, unless the failure was ours."""
        self._statistics.failed_reads += 1
        if error.errno in _OURS or not entry.has(block):
            return
        self._log_block("unreadable_block_dropped", entry, block, error.strerror)
        await self._drop(entry, block)

    async def _drop(self, entry: Entry, block: int) -> None:
        """The block is a miss at once; the row goes before the caller can fetch it anew."""
        entry.drop(block)
        device = entry.device
        try:
            async with device.lock:
                if entry.removing or not device.present:
                    return
                if entry.handed_out:
                    await device.blocking(device.forget, [entry.name])
                else:
                    await device.blocking(device.remove_blocks, {entry.name: [block]})
        except (OSError, sqlite3.Error) as error:
            device.fault(error)
        finally:
            if entry.handed_out:
                self._quarantine(entry)

    def _quarantine(self, entry: Entry) -> None:
        """Somebody may map the file, so no block of it can be made anew in place: all of it goes."""
        if entry.removing:
            return
        _log.error("object_quarantined tier=%s object=%s device=%s path=%r", self._statistics.name, entry.name.hex(),
                   entry.device.root, entry.path)  # fmt: skip
        self._remove(entry)

    def _log_block(self, event: str, entry: Entry, block: int, reason: str | None) -> None:
        _log.error("%s tier=%s object=%s block=%d path=%r device=%s reason=%r", event, self._statistics.name,
                   entry.name.hex(), block, entry.path, entry.device.root, reason)  # fmt: skip


def _read_and_digest(opened: OpenObject, offset_bytes: int, buffer: memoryview) -> BlockDigest | None:
    return digest_block(buffer) if read_block(opened, offset_bytes, buffer) else None
