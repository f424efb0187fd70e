"""A device on the reading side: the buffer pool registered with it, its completions, and the queues that read with it.

The remote source opens one for each device that its connections start from, and keeps it as long as it lives. What must
hold: the pool's memory is registered for our own READs only, so that no peer can write to it; it is deregistered only
when every queue pair is gone. At rest nothing runs: completions are waited for with ``wait_readable``.
"""

import errno
import logging

import trio

from tierfs.blocks.errors import SourceUnavailable
from tierfs.transport.rdma.memlock import address_of, register
from tierfs.transport.rdma.read_queue import PART_BYTES, ReadQueue
from tierfs.transport.rdma.verbs import Completions, Domain, OpenDevice, QueuePair, Region

log = logging.getLogger(__name__)

REGION_BYTES = 16 << 20  # registering takes a millisecond per some MiB, and nothing else runs meanwhile
_COMPLETIONS = 4096
_POLL = 64


class ReadDevice:
    """One open device and the registered pool. ``start`` first, ``run`` in a nursery, ``close`` at the end."""

    def __init__(self, name: str, device: OpenDevice, memory: memoryview, *, block_bytes: int, key: str) -> None:
        """``memory`` is cut into blocks of ``block_bytes``; ``key`` is what in the configuration sizes it."""
        self.name = name
        self.device = device
        self.failure: str | None = None
        self._memory = memory
        self._key = key
        self._address = address_of(memory)
        # A block never lies in two regions.
        self._region_bytes = max(1, min(REGION_BYTES, device.limits.region_bytes) // block_bytes) * block_bytes
        self._regions: list[Region] = []
        self._queues: dict[int, ReadQueue] = {}  # by the numbers of their READs under way, and those just ended
        self._open: set[ReadQueue] = set()
        self._transfers = 0
        self._closed = False
        self._domain = device.domain()
        try:
            self._completions = device.completions(min(_COMPLETIONS, device.limits.completions))
        except BaseException:
            self._domain.close()
            raise

    async def start(self) -> None:
        """Register the memory. Raises SourceUnavailable: not allowed, with what to do. Then, or when it is cancelled,
        close it."""
        whole_bytes = len(self._memory)
        for start in range(0, whole_bytes, self._region_bytes):
            part = self._memory[start : start + self._region_bytes]
            self._regions.append(
                register(self._domain, part, remote_read=False, whole_bytes=whole_bytes, key=self._key)
            )
            await trio.lowlevel.checkpoint()

    async def run(self) -> None:
        """Hand out completions until cancelled, or until the device fails; then its queues fail."""
        try:
            self._completions.arm()
            while True:
                self._dispatch()
                await trio.lowlevel.wait_readable(self._completions.fd)
                while self._completions.take_event():
                    pass
                self._completions.arm()  # then look once more: what came before arming makes no event
        except trio.ClosedResourceError:
            pass  # closed by somebody who saw it fail first
        except OSError as error:
            self.fail(f"{self.name} failed: {error}")

    def _dispatch(self) -> None:
        while found := self._completions.poll(_POLL):
            for completion in found:
                queue = self._queues.pop(completion.transfer, None)
                if queue is not None:  # else its queue pair is gone
                    queue.completed(completion)

    def local_key(self, buffer: memoryview) -> tuple[int, int] | None:
        """Address and key of a buffer in the pool; None of any other memory."""
        address = address_of(buffer)
        offset = address - self._address
        if not 0 <= offset <= len(self._memory) - len(buffer):
            return None
        region = offset // self._region_bytes
        if (offset + len(buffer) - 1) // self._region_bytes != region or region >= len(self._regions):
            return None
        return address, self._regions[region].local_key

    def queue(self, *, message_limit_bytes: int, blocks: int, block_bytes: int, timeout_s: float) -> ReadQueue:
        """A new queue for so many blocks at once. Raises SourceUnavailable."""
        if self.failure is not None:
            raise SourceUnavailable(f"RDMA: {self.failure}")
        limits = self.device.limits
        part_bytes = min(PART_BYTES, message_limit_bytes)
        parts = -(-block_bytes // part_bytes)
        while parts > 1 and parts * blocks > min(limits.requests, limits.completions // 8):
            parts //= 2
            part_bytes = -(-block_bytes // parts)
        if part_bytes > message_limit_bytes:
            raise SourceUnavailable(f"RDMA: {self.name} cannot take READs of blocks of {block_bytes} bytes")
        try:
            pair = self._domain.queue_pair(self._completions, requests=parts * blocks)
        except OSError as error:
            raise SourceUnavailable(f"RDMA: {self.name} gives no queue pair: {error}") from error
        queue = ReadQueue(
            pair, part_bytes=part_bytes, timeout_s=timeout_s, new_transfer=self._number, destroy=self._destroy
        )
        self._open.add(queue)
        return queue

    def _number(self, queue: ReadQueue) -> int:
        self._transfers += 1
        self._queues[self._transfers] = queue
        return self._transfers

    def _destroy(self, queue: ReadQueue, pair: QueuePair) -> None:
        self._open.discard(queue)
        self._queues = {number: other for number, other in self._queues.items() if other is not queue}
        try:
            pair.close()
        except OSError as error:
            # Its READs could go on: only closing the device ends them for certain, as the kernel then destroys all.
            log.error("queue_pair_not_destroyed device=%s error=%s", self.name, error)
            self.fail(f"{self.name}: a queue pair could not be destroyed: {error}")
            self.device.close()

    def fail(self, reason: str) -> None:
        """Give the device up, with every queue on it."""
        if self.failure is None:
            self.failure = reason
            log.warning("rdma_device_failed device=%s reason=%s", self.name, reason)
        for queue in list(self._open):
            queue.close(reason)

    def close(self) -> None:
        """Queues, memory, completions, domain, device, in that order. Nothing is left, whatever fails."""
        if self._closed:
            return
        self._closed = True
        for queue in list(self._open):
            queue.close("closed")
        trio.lowlevel.notify_closing(self._completions.fd)
        parts: list[Region | Completions | Domain | OpenDevice] = [*reversed(self._regions)]
        parts += [self._completions, self._domain, self.device]
        self._regions = []
        for part in parts:
            try:
                part.close()
            except OSError as error:
                if error.errno != errno.ENODEV:
                    log.warning("rdma_close_failed device=%s part=%s error=%s", self.name, type(part).__name__, error)
