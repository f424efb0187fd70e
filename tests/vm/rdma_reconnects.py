"""Both ends of the RDMA transport in one process on the real device, with no server: for what only the device shows."""

import mmap
import multiprocessing
import os
import resource
from collections.abc import Awaitable
from multiprocessing.connection import Connection

import trio

from tests.vm.guest import RDMA_HOST
from tierfs.blocks.errors import SourceUnavailable
from tierfs.transport.rdma.devices import choose, interface_of
from tierfs.transport.rdma.lending import LendingQueue
from tierfs.transport.rdma.pyverbs_device import PyVerbs
from tierfs.transport.rdma.read_device import ReadDevice
from tierfs.transport.rdma.read_queue import ReadQueue
from tierfs.transport.rdma.verbs import Gid, OpenDevice, Port, Route

BLOCK_BYTES = 256 << 10


class Ends:
    """A reading device with a pool of four blocks, and the device that lends."""

    def __init__(self) -> None:
        self.verbs = PyVerbs()
        self.verbs.prepare()
        self.port: Port
        self.gid: Gid
        self.port, self.gid = choose(self.verbs.ports(), RDMA_HOST, interface_of=interface_of)
        self.memory = memoryview(mmap.mmap(-1, 4 * BLOCK_BYTES))
        self.reading = ReadDevice(
            self.port.device,
            self.verbs.open(self.port.device),
            self.memory,
            block_bytes=BLOCK_BYTES,
            key="memory.limit",
        )
        self.lending: OpenDevice = self.verbs.open(self.port.device)
        self.mtu_bytes = self.lending.port_state(self.port.number).mtu_bytes

    def connect(self, timeout_s: float) -> tuple[ReadQueue, LendingQueue]:
        """A new pair of queue pairs."""
        lent = LendingQueue(self.lending, buffers=2, buffer_bytes=BLOCK_BYTES)
        queue = self.reading.queue(
            message_limit_bytes=1 << 20, blocks=2, block_bytes=BLOCK_BYTES, timeout_s=timeout_s
        )  # fmt: skip
        lent.connect(self._route(queue.number), first_packet=7, reads=4)
        queue.connect(self._route(lent.number), first_packet=9, own_first_packet=7, reads=4)
        return queue, lent

    def _route(self, number: int) -> Route:
        return Route(self.port.number, self.gid.index, self.port.link, self.gid.raw, 0, number, self.mtu_bytes)

    def close(self) -> None:
        """Both devices."""
        self.reading.close()
        self.lending.close()


async def read(ends: Ends, queue: ReadQueue, lent: LendingQueue, *, key_error: int = 0) -> None:
    """One block from the first lent buffer into the first block of the pool."""
    local = ends.reading.local_key(ends.memory[:BLOCK_BYTES])
    assert local is not None
    await queue.read(
        address=local[0],
        local_key=local[1],
        remote_address=lent.buffers[0].address,
        remote_key=lent.buffers[0].remote_key ^ key_error,
        length_bytes=BLOCK_BYTES,
    )


def reconnect(times: int) -> int:
    """Connect, read, fail in one of three ways, and close, so often; how often every byte was right."""

    async def main() -> int:
        right = 0
        ends = Ends()
        async with trio.open_nursery() as nursery:
            try:
                await ends.reading.start()
                nursery.start_soon(ends.reading.run)
                for number in range(times):
                    queue, lent = ends.connect(timeout_s=4.0)
                    lent.buffers[0].view[:] = bytes([number % 251 + 1]) * BLOCK_BYTES
                    await read(ends, queue, lent)
                    right += ends.memory[:BLOCK_BYTES] == bytes([number % 251 + 1]) * BLOCK_BYTES
                    if number % 3 == 1:
                        await _fails(read(ends, queue, lent, key_error=0x5A00))
                    elif number % 3 == 2:
                        lent.close()
                        await _fails(read(ends, queue, lent))
                    queue.close()
                    lent.close()
                nursery.cancel_scope.cancel()
            finally:
                ends.close()
        return right

    return trio.run(main)


def time_to_notice(timeout_s: float) -> float:
    """Seconds until a READ from a queue pair that is destroyed fails."""

    async def main() -> float:
        ends = Ends()
        async with trio.open_nursery() as nursery:
            try:
                await ends.reading.start()
                nursery.start_soon(ends.reading.run)
                queue, lent = ends.connect(timeout_s)
                await read(ends, queue, lent)
                lent.close()
                begun_s = trio.current_time()
                await _fails(read(ends, queue, lent))
                seconds = trio.current_time() - begun_s
                nursery.cancel_scope.cancel()
            finally:
                ends.close()
        return seconds

    return trio.run(main)


async def _fails(reading: Awaitable[None]) -> None:
    try:
        await reading
    except SourceUnavailable:
        return
    raise AssertionError("a READ that cannot succeed did")


def register_with_limit(limit_bytes: int) -> None:
    """Register a pool in a process without CAP_IPC_LOCK and with this RLIMIT_MEMLOCK. Raises what that raises."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=_register, args=(limit_bytes, theirs))
    child.start()
    theirs.close()
    reason = ours.recv()
    child.join()
    if reason is not None:
        raise SourceUnavailable(reason)


def _register(limit_bytes: int, answer: Connection) -> None:
    ends = Ends()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit_bytes, limit_bytes))
    os.setuid(65534)  # the device is open already
    try:
        trio.run(ends.reading.start)
    except SourceUnavailable as error:
        answer.send(str(error))
    else:
        answer.send(None)
    os._exit(0)
