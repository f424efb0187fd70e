"""Which of a client's staging buffers is lent under which lease. The session is its only caller, on the trio thread.

    free ── take ──► being filled ── grant ──► lent ── returned, or over ──► free
                          └── put ──► free

A lease that is over is taken back only when the buffer is needed. Its client may still be reading then: it gets other
bytes, which do not match the digest it was told. What must hold: a buffer has at most one lease.
"""

import trio

from tierfs.blocks.errors import SourceUnavailable
from tierfs.transport.rdma.lending import StagingBuffer


class Leases:
    """The buffers of one client."""

    def __init__(self, buffers: list[StagingBuffer], *, lease_s: float) -> None:
        self._free = list(buffers)
        self._lease_s = lease_s
        self._lent: dict[int, tuple[StagingBuffer, float]] = {}  # by lease, oldest first, with its end
        self._freed = trio.lowlevel.ParkingLot()
        self._closed = False
        self.expired = 0

    @property
    def lent(self) -> int:
        """Leases that are not returned."""
        return len(self._lent)

    async def take(self, *, timeout_s: float) -> StagingBuffer:
        """A buffer to fill; ``grant`` or ``put`` it. Raises SourceUnavailable. Cancellation leaves nothing."""
        with trio.move_on_after(timeout_s):
            while (buffer := self._take_nowait()) is None:
                if self._closed:
                    raise SourceUnavailable("the queue pair of these buffers is gone")
                with trio.move_on_at(self._next_end_s()):
                    await self._freed.park()
            return buffer
        raise SourceUnavailable("every buffer of this client is lent: it asks for more than it was told to")

    def grant(self, lease: int, buffer: StagingBuffer) -> None:
        """The peer may read it from now on."""
        assert lease not in self._lent, "a lease is named by its request, whose id is in use once"
        self._lent[lease] = (buffer, trio.current_time() + self._lease_s)

    def give_back(self, lease: int) -> None:
        """The peer is done with it. One that is over already, or never was, is ignored."""
        if (found := self._lent.pop(lease, None)) is not None:
            self.put(found[0])

    def put(self, buffer: StagingBuffer) -> None:
        """A buffer that nobody reads."""
        if self._closed:
            return
        self._free.append(buffer)
        self._freed.unpark()

    def close(self) -> None:
        """The buffers are gone, and nobody shall wait for one."""
        self._closed = True
        self._free.clear()
        self._lent.clear()
        self._freed.unpark_all()

    def _take_nowait(self) -> StagingBuffer | None:
        if not self._free and self._lent:
            lease, (_, end_s) = next(iter(self._lent.items()))
            if end_s <= trio.current_time():
                self.expired += 1
                return self._lent.pop(lease)[0]
        return self._free.pop() if self._free else None

    def _next_end_s(self) -> float:
        return min((end_s for _, end_s in self._lent.values()), default=float("inf"))
