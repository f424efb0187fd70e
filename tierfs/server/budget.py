"""How many block bytes may be on their way to peers at once, for the whole server. Its sessions call it.

Waiters are served in order. A holder that blocks others is cut off: when somebody has waited for ``patience_s``, the
oldest holder older than that which is waiting for its peer is told so (its connection closes, which gives the bytes
back). Without pressure nobody is cut off, however slow. What must hold: held bytes never exceed the limit.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio


@dataclass(slots=True, eq=False)
class _Hold:
    since_s: float
    cut_off: Callable[[], bool]


class ByteBudget:
    """A bounded number of bytes, shared by all sessions."""

    def __init__(self, limit_bytes: int, *, patience_s: float) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.most_held_bytes = 0
        self.cut_offs = 0
        self._patience_s = patience_s
        self._holds: dict[_Hold, None] = {}  # oldest first
        self._waiters: deque[tuple[int, trio.Event]] = deque()

    @asynccontextmanager
    async def hold(self, size_bytes: int, cut_off: Callable[[], bool]) -> AsyncIterator[None]:
        """Hold so many bytes (at most the whole limit).

        ``cut_off`` is called when others have waited too long; it gives the bytes back soon and returns True, or
        returns False when its peer is not what takes so long.

        Cancellation while waiting leaves nothing.
        """
        size_bytes = min(size_bytes, self.limit_bytes)
        if self._waiters or self.held_bytes + size_bytes > self.limit_bytes:
            await self._wait(size_bytes)
        else:
            self._take(size_bytes)
        hold = _Hold(trio.current_time(), cut_off)
        self._holds[hold] = None
        try:
            yield
        finally:
            del self._holds[hold]
            self._give(size_bytes)

    async def _wait(self, size_bytes: int) -> None:
        granted = trio.Event()
        waiter = (size_bytes, granted)
        self._waiters.append(waiter)
        try:
            while not granted.is_set():
                with trio.move_on_after(self._patience_s):
                    await granted.wait()
                if not granted.is_set():
                    self._cut_off_oldest()
        except trio.Cancelled:
            if granted.is_set():
                self._give(size_bytes)
            else:
                self._waiters.remove(waiter)
                self._grant()
            raise

    def _cut_off_oldest(self) -> None:
        for hold in self._holds:
            if trio.current_time() - hold.since_s < self._patience_s:
                return
            if hold.cut_off():
                self.cut_offs += 1
                return

    def _take(self, size_bytes: int) -> None:
        self.held_bytes += size_bytes
        self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)

    def _give(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes
        self._grant()

    def _grant(self) -> None:
        while self._waiters and self.held_bytes + self._waiters[0][0] <= self.limit_bytes:
            size_bytes, granted = self._waiters.popleft()
            self._take(size_bytes)
            granted.set()
