"""What the server lends over RDMA: its devices, and how much memory its clients may have registered together.

The listener builds one for all sessions; each session asks it for the buffers of its client. What must hold: registered
memory never exceeds the limit; whatever is missing here is a reason that the client's `status` shows, and it goes on
over TCP.
"""

import logging
import secrets
from collections.abc import Callable

import trio

from tierfs.blocks.errors import SourceRefused, SourceUnavailable
from tierfs.server.leases import Leases
from tierfs.transport.rdma.devices import choose, interface_of
from tierfs.transport.rdma.lending import LendingQueue
from tierfs.transport.rdma.memlock import check_limit
from tierfs.transport.rdma.verbs import OpenDevice, Route, Verbs
from tierfs.wire import messages as m

log = logging.getLogger(__name__)

BUFFERS_MOST = 8  # of one connection: the client has several, and each block takes one for some milliseconds
_BUFFERS_LEAST = 2  # with one, filling and reading would take turns
LEASE_S = 60  # longer than any client waits for one READ
_PACKET_NUMBERS = 1 << 24


class Lending:
    """One client's buffers and their leases."""

    def __init__(
        self, queue: LendingQueue, leases: Leases, connected: m.RdmaConnected, close: Callable[[], None]
    ) -> None:
        self.leases = leases
        self.connected = connected
        self.buffer_bytes = connected.buffer_bytes
        self._queue: LendingQueue | None = queue
        self._close = close

    def close(self) -> None:
        """Destroy the queue pair and give the memory back. May be called again."""
        if self._queue is not None:
            self._queue.close()
            self._queue = None
            self.leases.close()
            self._close()


class RdmaService:
    """Registered memory for clients, up to ``memory_bytes``."""

    def __init__(self, verbs: Callable[[], Verbs], *, memory_bytes: int) -> None:
        """Nothing is looked for before the first client asks."""
        self._make_verbs = verbs
        self._verbs: Verbs | None = None
        self._devices: dict[str, OpenDevice] = {}
        self._failed: list[OpenDevice] = []
        self._threads = trio.CapacityLimiter(1)
        self.memory_bytes = memory_bytes
        self._logged = ""
        self.lent_bytes = 0  # registered now

    async def lend(self, request: m.RdmaConnect, *, local_host: str, block_bytes: int) -> Lending:
        """Buffers for a client that connected to this address of ours. Raises SourceUnavailable with the reason."""
        try:
            if self._verbs is None:
                self._verbs = self._make_verbs()
            if self._verbs.ports():
                await trio.to_thread.run_sync(self._verbs.prepare, limiter=self._threads)
            # No checkpoint from here on: the caller has it, or it was never made.
            lending = self._lend(request, local_host, block_bytes)
        except SourceUnavailable as error:
            if str(error) != self._logged:
                self._logged = str(error)
                log.info("rdma_not_lent reason=%s", error)
            raise
        log.debug("rdma_lent local=%s buffers=%d", local_host, lending.connected.buffers)
        return lending

    def _lend(self, request: m.RdmaConnect, local_host: str, block_bytes: int) -> Lending:
        assert self._verbs is not None, "lend made it"
        port, gid = choose(self._verbs.ports(), local_host, interface_of=interface_of)
        buffers = min(BUFFERS_MOST, (self.memory_bytes - self.lent_bytes) // block_bytes)
        if buffers < _BUFFERS_LEAST:
            raise SourceUnavailable("the server's clients have all of its server.rdma_memory: raise it")
        whole_bytes = self.lent_bytes + buffers * block_bytes
        check_limit(self._verbs.lockable_bytes(), whole_bytes=whole_bytes, key="buffers of the server's clients")
        device = self._device(port.device)
        try:
            state = device.port_state(port.number)
        except OSError as error:
            self._forget(port.device)
            raise SourceUnavailable(f"{port}: {error}") from error
        queue = LendingQueue(device, buffers=buffers, buffer_bytes=block_bytes)
        size_bytes = buffers * block_bytes
        try:
            mtu_bytes = min(state.mtu_bytes, request.mtu_bytes)
            reads = min(device.limits.reads_in, request.reads)
            route = Route(
                port.number, gid.index, port.link, request.gid, request.lid, request.queue_pair, mtu_bytes
            )  # fmt: skip
            queue.connect(route, first_packet=request.first_packet, reads=reads)
        except BaseException:
            queue.close()
            raise
        self.lent_bytes += size_bytes
        connected = m.RdmaConnected(
            queue_pair=queue.number,
            first_packet=secrets.randbelow(_PACKET_NUMBERS),
            gid=gid.raw,
            lid=state.lid,
            mtu_bytes=mtu_bytes,
            reads=reads,
            buffers=buffers,
            buffer_bytes=block_bytes,
            lease_s=LEASE_S,
        )
        return Lending(queue, Leases(queue.buffers, lease_s=LEASE_S), connected, lambda: self._returned(size_bytes))

    def _returned(self, size_bytes: int) -> None:
        self.lent_bytes -= size_bytes

    def _device(self, name: str) -> OpenDevice:
        device = self._devices.get(name)
        if device is None:
            assert self._verbs is not None, "lend made it"
            try:
                device = self._devices[name] = self._verbs.open(name)
            except OSError as error:
                raise SourceUnavailable(f"the RDMA device {name} cannot be opened: {error}") from error
        return device

    def _forget(self, name: str) -> None:
        """A device that fails is opened anew for the next client; those that have it learn by their READs."""
        device = self._devices.pop(name, None)
        if device is not None:
            log.warning("rdma_device_failed device=%s", name)
            self._failed.append(device)  # sessions still have parts of it

    def close(self) -> None:
        """Close the devices, after every session."""
        for device in (*self._devices.values(), *self._failed):
            try:
                device.close()
            except OSError as error:
                log.warning("rdma_close_failed error=%s", error)
        self._devices.clear()
        self._failed.clear()


def check_length(length_bytes: int, buffer_bytes: int) -> None:
    """Raises SourceRefused where a block does not fit into a buffer: the export's block size has changed."""
    if length_bytes > buffer_bytes:
        raise SourceRefused(f"{length_bytes} bytes do not fit into a buffer of {buffer_bytes}")
