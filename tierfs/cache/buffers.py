"""The one bounded pool of block buffers of a daemon.

Every byte that passes through Python's memory lands here: fetches, loads from warm, blocks waiting to be written. The
pool is one memfd mapping cut into slots of one block, so that slots are page aligned (O_DIRECT) and another process
or a NIC can be given the same memory. Pages that no block ever used cost nothing.

A slot is free, or it is held by a Buffer. A Buffer counts its holders (the memory block, leases of writers, replies
that another process copies from here); the last one to release it frees the slot.
"""

import fcntl
import mmap
import os
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from tierfs.blocks.errors import NoBuffer

_SWEEP_S = 0.002  # while somebody waits for a buffer: looking costs little beside what a block takes from anywhere


def _nothing_outside() -> bool:
    return False


class Buffer:
    """One slot of the pool in use. Starts with one holder."""

    __slots__ = ("_holders", "_pool", "index", "view")

    def __init__(self, pool: "BufferPool", index: int, view: memoryview) -> None:
        self._pool = pool
        self._holders = 1
        self.index = index
        self.view = view

    @property
    def offset_bytes(self) -> int:
        """Where the slot begins in the pool's memory file."""
        return self.index * self._pool.block_bytes

    @property
    def holders(self) -> int:
        """How many release() calls are outstanding."""
        return self._holders

    def hold(self) -> None:
        """One more holder."""
        assert self._holders > 0, "a free slot was taken without the pool"
        self._holders += 1

    def release(self) -> None:
        """One holder fewer; the last one frees the slot."""
        assert self._holders > 0, "a buffer was released twice"
        self._holders -= 1
        if self._holders == 0:
            self._pool._freed(self.index)
        elif self._holders == 1:
            self._pool.notify()  # the memory block may be its only holder now, and so reclaimable


class BlockLease:
    """A writer's hold on the bytes of one block; implements ``tiers.interface.Lease``."""

    __slots__ = ("_buffer", "_on_release", "view")

    def __init__(self, buffer: Buffer, length_bytes: int, *, on_release: Callable[[], None]) -> None:
        buffer.hold()
        self._buffer = buffer
        self._on_release = on_release
        self.view = buffer.view[:length_bytes]

    def release(self) -> None:
        """Give the hold back."""
        self._on_release()
        self._buffer.release()


class BufferPool:
    """``limit_bytes`` of memory as slots of ``block_bytes``.

    ``sweep`` looks whether others (the channel) are done with what they hold; True if some were.
    ``reclaim`` frees the slot that is worth least, if there is one; ``recycle`` the same, but only what is used up.
    Slots used up are taken before slots never used: their pages are there already, and still in the processor's
    cache, which makes a cold sequential read about twice as fast as cycling through the whole pool.
    """

    def __init__(self, *, limit_bytes: int, block_bytes: int) -> None:
        self.slots = max(limit_bytes // block_bytes, 4)
        self.block_bytes = block_bytes
        self.reclaim: Callable[[], bool] = lambda: False
        self.recycle: Callable[[], bool] = lambda: False
        self.sweep: Callable[[], bool] = _nothing_outside
        self._sweeping = False  # one of those who wait in acquire() does it for all
        self.size_bytes = self.slots * block_bytes
        self.fd = os.memfd_create("tierfs-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, self.size_bytes)
        # Whoever else maps it must not be hurt by a file that shrinks.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._memory = mmap.mmap(self.fd, self.size_bytes, mmap.MAP_SHARED)
        self._view = memoryview(self._memory)
        self._free = list(range(self.slots - 1, -1, -1))  # a stack: the slot freed last is taken first
        self._touched = 0
        self._waiters: trio.lowlevel.ParkingLot = trio.lowlevel.ParkingLot()

    @property
    def memory(self) -> memoryview:
        """All slots, for an RDMA device to be given; the pool outlives what uses it."""
        return self._view

    @property
    def used_slots(self) -> int:
        """Slots held by somebody."""
        return self.slots - len(self._free)

    @property
    def used_bytes(self) -> int:
        """Bytes of memory the pool has taken from the system so far (at most its limit)."""
        return self._touched * self.block_bytes

    def acquire_nowait(self) -> Buffer | None:
        """A buffer, if one is free or can be freed at once."""
        fresh = self._only_fresh()
        if fresh and self.sweep():
            fresh = self._only_fresh()
        if fresh and not self.recycle() and not self._free and not self.reclaim():
            return None
        index = self._free.pop()
        self._touched = max(self._touched, index + 1)
        start = index * self.block_bytes
        return Buffer(self, index, self._view[start : start + self.block_bytes])

    async def acquire(self, *, timeout_s: float) -> Buffer:
        """A buffer, waiting for one. Raises NoBuffer at the deadline. Cancellation leaves nothing behind."""
        buffer = self.acquire_nowait()
        if buffer is not None:
            return buffer
        with trio.move_on_after(timeout_s):
            while True:
                await self._released()
                buffer = self.acquire_nowait()
                if buffer is not None:
                    return buffer
        raise NoBuffer(f"no buffer became free in {timeout_s:g} s: raise memory.limit")

    def notify(self) -> None:
        """Something became reclaimable: let one waiter look again."""
        self._waiters.unpark()

    def _only_fresh(self) -> bool:
        """Whether no slot is free that was used before."""
        return not self._free or self._free[-1] >= self._touched

    async def _released(self) -> None:
        """Wait until another look may help.

        The channel is done with a reply when it says so in shared memory, which wakes nobody: one of those who wait
        looks for it.
        """
        if self._sweeping or self.sweep is _nothing_outside:
            await self._waiters.park()
            return
        self._sweeping = True
        try:
            while True:
                with trio.move_on_after(_SWEEP_S):
                    await self._waiters.park()
                    return
                if self.sweep():
                    return
        finally:
            self._sweeping = False
            self._waiters.unpark()  # whoever still waits goes on looking

    def _freed(self, index: int) -> None:
        self._free.append(index)
        self._waiters.unpark()


class PartBudget:
    """How many buffers may be held by requests that still wait for more of them.

    Without a bound, requests of several parts could hold all buffers between them, each waiting for its last part.
    """

    def __init__(self, limit_parts: int) -> None:
        self._limit_parts = limit_parts
        self._held_parts = 0
        self._turn = trio.Lock()  # in order of arrival: a request of many parts must not starve
        self._given_back = trio.lowlevel.ParkingLot()

    @asynccontextmanager
    async def hold(self, parts: int) -> AsyncIterator[None]:
        """So many parts (at most the whole limit) while inside. Cancellation leaves nothing."""
        parts = min(parts, self._limit_parts)
        async with self._turn:
            while self._held_parts + parts > self._limit_parts:
                await self._given_back.park()
            self._held_parts += parts
        try:
            yield
        finally:
            self._held_parts -= parts
            self._given_back.unpark_all()
