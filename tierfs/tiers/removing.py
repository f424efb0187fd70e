"""How objects leave a local tier. Called by local.py, on the trio thread.

    remove ─► leaving ─► row durably gone ─► unlinked ─► retired while somebody still reads ─► closed: space given up
     (out of the index at once)        └ handed out: renamed ─► dying.py ─► nobody maps it: unlinked, space given up

What must hold: residency first, then the file; a name is free again only when its old file is unlinked; space counts as
used until the last descriptor is closed and the last map is gone, since only then the file system has it back.
"""

import sqlite3
from collections.abc import Callable, Iterable

import trio

from tierfs.blocks.ids import ObjectKey
from tierfs.tiers.descriptors import Descriptors
from tierfs.tiers.device import Device, close_all
from tierfs.tiers.dying import Dying
from tierfs.tiers.filling import Space
from tierfs.tiers.index import Entry, Index
from tierfs.tiers.objects import OpenObject


class Removals:
    """What is leaving one tier. ``on_remove`` is told that an object left the index."""

    def __init__(self, *, index: Index, space: Space, open_objects: int, on_remove: Callable[[], None]) -> None:
        self.descriptors = Descriptors(open_objects, on_idle=self._idle)
        self._index = index
        self._space = space
        self._on_remove = on_remove
        self._leaving: dict[tuple[Device, ObjectKey], Entry] = {}
        self.dying = Dying(space)
        self._retired: dict[OpenObject, Entry] = {}
        self._closable: list[OpenObject] = []
        self._closer = trio.Event()
        self._waiting: dict[Entry, trio.Event] = {}

    def leaving(self, device: Device, name: ObjectKey) -> bool:
        """Whether a file of that name is about to be unlinked there: it must not be made anew yet."""
        return (device, name) in self._leaving

    def remove(self, entry: Entry) -> None:
        """Take the object out of the index now; its row, file and space follow."""
        if entry.removing:
            return
        entry.removing = True
        self._index.discard(entry)
        self._leaving[entry.device, entry.name] = entry
        self._space.leaving_bytes += entry.allocated_bytes
        self._on_remove()
        entry.device.reclaim.set()

    def gone(self, entry: Entry) -> trio.Event:
        """Set when the object's space has been given up, or its file is dying.

        To be asked before the next checkpoint after ``remove``."""
        return self._waiting.setdefault(entry, trio.Event())

    async def finish(self, device: Device) -> None:
        """Remove what is leaving that device. What fails is tried again by the next call."""
        # A batch that writes to the object may be about to create its file: wait for it, it wakes the keeper.
        ready = [entry for entry in self._leaving.values() if entry.device is device and not entry.writing]
        if not ready or not device.readable:
            return
        async with device.lock:
            try:
                handed_out = {entry.name for entry in ready if entry.handed_out}
                buried = await device.blocking(device.remove, [entry.name for entry in ready], handed_out)
            except (OSError, sqlite3.Error) as error:
                device.fault(error)
                return
        for entry in ready:
            if self._leaving.pop((device, entry.name), None) is entry:
                if entry.name in buried:
                    self._buried(entry, buried[entry.name])
                self._unlinked(entry)

    def lose(self, device: Device, entries: Iterable[Entry]) -> None:
        """The directory is gone: so are its objects, and those that were leaving."""
        for entry in entries:
            self.remove(entry)
        for entry in [entry for entry in self._leaving.values() if entry.device is device]:
            del self._leaving[device, entry.name]
            self._unlinked(entry)
        self.dying.forget(device)

    async def close_idle(self) -> None:
        """Close for ever what its last user has left, in a thread: freeing the space of a large file takes time."""
        limiter = trio.CapacityLimiter(1)
        while True:
            await self._closer.wait()
            self._closer = trio.Event()
            closable = list(self._closable)
            await trio.to_thread.run_sync(close_all, closable, limiter=limiter)
            # Only now: what no thread has closed when the tier ends is closed by `stop`.
            del self._closable[: len(closable)]
            for opened in closable:
                self._give_up(self._retired.pop(opened))

    def stop(self) -> None:
        """The tier has ended: nobody waits any more, and what nobody uses is closed."""
        for gone in self._waiting.values():
            gone.set()
        self.descriptors.close()
        close_all(self._closable)
        self._retired.clear()

    def _buried(self, entry: Entry, leaf: str) -> None:
        """The object is out of the way; what is left is a file whose space follows when nobody maps it."""
        allocated_bytes = entry.allocated_bytes
        self._give_up(entry)
        self.dying.add(entry.device, leaf, allocated_bytes, model=entry.model, leaving=True)

    def _unlinked(self, entry: Entry) -> None:
        opened = self.descriptors.retire(entry)
        if opened is None:
            self._give_up(entry)
            return
        self._retired[opened] = entry
        if not opened.users:
            self._idle(opened)

    def _idle(self, opened: OpenObject) -> None:
        self.descriptors.take_back(opened)
        if opened in self._retired:
            self._closable.append(opened)
            self._closer.set()
        else:  # the tier has stopped meanwhile
            opened.close()

    def _give_up(self, entry: Entry) -> None:
        self._space.give_up(entry)
        gone = self._waiting.pop(entry, None)
        if gone is not None:
            gone.set()
