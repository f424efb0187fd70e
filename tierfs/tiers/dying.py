"""Evicted files that somebody may still map, until nobody does. Called by removing.py, on the trio thread.

    buried ─► looked at, ever more rarely ─► a write lease is granted: unlinked, its space is given up
                 └ until _SOON_S it counts as leaving: blocks wait for its space. After that they do not.

Nobody tells when the last map of a file goes, so each is tried again and again. What must hold: its bytes count as used
until then; nothing but the attempt itself waits for it.
"""

import logging
import os
from dataclasses import dataclass

import trio

from tierfs.tiers.device import Device
from tierfs.tiers.filling import Space
from tierfs.tiers.objects import unlink_unmapped

_log = logging.getLogger(__name__)

_FIRST_S = 0.05  # what nobody maps is free as soon as the channel has closed it too
_LAST_S = 10.0
_SOON_S = 0.5


@dataclass(eq=False)
class DyingFile:
    """One file in the folder of dying objects."""

    device: Device
    leaf: str
    allocated_bytes: int
    model: bytes | None  # None: from an earlier run
    since_s: float
    leaving: bool  # its bytes are in Space.leaving_bytes too


class Dying:
    """The dying files of one tier."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._files: list[DyingFile] = []
        self._added = trio.Event()
        self._limiter = trio.CapacityLimiter(1)

    @property
    def mapped_models(self) -> set[bytes]:
        """Models of which an evicted object has turned out to be in use still: evicting more of them frees nothing."""
        return {file.model for file in self._files if file.model is not None and not file.leaving}

    def add(
        self, device: Device, leaf: str, allocated_bytes: int, *, model: bytes | None = None, leaving: bool
    ) -> None:
        """A file is among the dying ones of that device. ``leaving``: its space is expected any moment."""
        self._files.append(DyingFile(device, leaf, allocated_bytes, model, trio.current_time(), leaving))
        self._space.dying_bytes += allocated_bytes
        if leaving:
            self._space.leaving_bytes += allocated_bytes
        self._added.set()

    def forget(self, device: Device) -> None:
        """The device is gone, and opening it again finds them anew."""
        for file in [file for file in self._files if file.device is device]:
            self._give_up(file)

    async def run(self) -> None:
        """Look at them for ever, after ``_FIRST_S`` where one was added, then ever more rarely up to ``_LAST_S``."""
        wait_s = _FIRST_S
        while True:
            if not self._files:
                await self._added.wait()
            if self._added.is_set():
                self._added, wait_s = trio.Event(), _FIRST_S
            with trio.move_on_after(wait_s):
                await self._added.wait()
                continue
            wait_s = min(_LAST_S, 2 * wait_s)
            for file in list(self._files):
                if file in self._files:
                    await self._try(file)

    async def _try(self, file: DyingFile) -> None:
        gone = False
        try:
            # A descriptor of its own: a device that is lost meanwhile closes its folders.
            folder_fd = file.device.store.dying_folder()
            try:
                gone = await trio.to_thread.run_sync(unlink_unmapped, file.leaf, folder_fd, limiter=self._limiter)
            finally:
                os.close(folder_fd)
        except OSError as error:
            _log.debug("dying_object_not_removed file=%s reason=%r", file.leaf, error.strerror)
        if file not in self._files:  # forgotten meanwhile
            return
        if gone:
            self._give_up(file)
        elif file.leaving and trio.current_time() - file.since_s >= _SOON_S:
            file.leaving = False
            self._space.leaving_bytes -= file.allocated_bytes
            self._space.freed.set()  # who waits looks again, and finds that this is not coming
            _log.info("object_dying device=%s file=%s bytes=%d: evicted, and somebody still has it mapped or open",
                      file.device.root, file.leaf, file.allocated_bytes)  # fmt: skip

    def _give_up(self, file: DyingFile) -> None:
        self._files.remove(file)
        self._space.dying_bytes -= file.allocated_bytes
        if file.leaving:
            self._space.leaving_bytes -= file.allocated_bytes
        self._space.freed.set()
