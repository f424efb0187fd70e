"""The lending end of one connection: registered buffers that one peer may read from, and nothing else.

A session of the server makes it for a client and closes it with the connection. What must hold: it has a protection
domain and memory of its own, so that a client reaches only what was put there for it; the peer may read, never write.
"""

import logging
import mmap
from collections.abc import Callable
from dataclasses import dataclass

from tierfs.blocks.errors import SourceUnavailable
from tierfs.transport.rdma.memlock import address_of, register
from tierfs.transport.rdma.verbs import OpenDevice, Route

log = logging.getLogger(__name__)

_COMPLETIONS = 1  # an answering queue pair has none, but needs a queue for them


@dataclass(frozen=True, slots=True, eq=False)
class StagingBuffer:
    """One buffer of the peer's. ``view`` is ours to fill while the peer has no lease on it."""

    view: memoryview
    address: int
    remote_key: int


class LendingQueue:
    """A queue pair that a peer reads through, and the buffers it may read."""

    def __init__(self, device: OpenDevice, *, buffers: int, buffer_bytes: int) -> None:
        """Raises SourceUnavailable: the device or the system gives too little, with what to do."""
        size_bytes = buffers * buffer_bytes
        self._closing: list[Callable[[], None]] = []
        self._memory = mmap.mmap(-1, size_bytes)
        self._view = memoryview(self._memory)
        try:
            domain = device.domain()
            self._closing.append(domain.close)
            completions = device.completions(_COMPLETIONS)
            self._closing.append(completions.close)
            region = register(domain, self._view, remote_read=True, whole_bytes=size_bytes, key="buffers of one client")
            self._closing.append(region.close)
            self._pair = domain.queue_pair(completions, requests=1)
            self._closing.append(self._pair.close)
        except OSError as error:
            self.close()
            raise SourceUnavailable(f"RDMA: {error}") from error
        except BaseException:
            self.close()
            raise
        base = address_of(self._view)
        self.number = self._pair.number
        self.buffers = [
            StagingBuffer(self._view[start : start + buffer_bytes], base + start, region.remote_key)
            for start in range(0, size_bytes, buffer_bytes)
        ]

    def connect(self, route: Route, *, first_packet: int, reads: int) -> None:
        """Let the peer read. Raises SourceUnavailable."""
        try:
            self._pair.answer(route, first_packet=first_packet, reads=reads)
        except OSError as error:
            raise SourceUnavailable(f"RDMA: the queue pair cannot be connected: {error}") from error

    def close(self) -> None:
        """Queue pair, memory, completions, domain. No thread may be filling a buffer. May be called again."""
        while self._closing:
            part = self._closing.pop()
            try:
                part()
            except OSError as error:
                log.warning("rdma_close_failed error=%s", error)
