"""Blocks over RDMA, beside the connections of a remote source: a queue pair for each, and what is fetched through it.

The remote source makes one, runs it, has it ``keep`` a path for each of its links, and asks ``path`` for one before it
fetches over TCP. What must hold: trouble here costs a block time and nothing else; a path that failed is given up
with its queue pair, and made again after a while; the reason why there is none is always there to be read.

    link is up ─► connect ─► path ── its queue is gone, or the link ──► none ── after a while ──► connect
                     └── refused: ``reason`` ───────────────────────────────┘
"""

import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from tierfs.blocks.errors import SourceUnavailable, TierfsError
from tierfs.blocks.ids import BlockDigest
from tierfs.tiers.remote_link import Link
from tierfs.transport.rdma.devices import choose, interface_of
from tierfs.transport.rdma.memlock import check_limit
from tierfs.transport.rdma.read_device import ReadDevice
from tierfs.transport.rdma.read_queue import ReadQueue
from tierfs.transport.rdma.verbs import Gid, Port, Route, Verbs
from tierfs.wire import messages as m

log = logging.getLogger(__name__)

_BLOCKS_MOST = 8  # at once through one queue pair; the server may allow fewer
# Between the same two addresses: the second one is for when the first fails, or has all its credits in use. More only
# compete with each other in the device (soft-RoCE then sends much twice), and each pins buffers on the server.
_PATHS_MOST = 2
_READS_MOST = 2  # under way on one queue pair; of 1 MiB each they fill any link, and a slow device answers all in time
_RETURN_AT_ONCE = 4  # leases; fewer wait for the next request, or a moment
_RETURN_S = 0.01
_BACKOFF_FIRST_S = 0.2
_BACKOFF_LAST_S = 30.0
_PACKET_NUMBERS = 1 << 24
_NOT_YET = "no connection has been made yet"


class RdmaPath:
    """One queue pair to the server, on a link of its own. ``fetch`` may be called by many at once."""

    def __init__(
        self,
        link: Link,
        device: ReadDevice,
        route: tuple[Port, Gid],
        queue: ReadQueue,
        connected: m.RdmaConnected,
        timeout_s: float,
    ) -> None:
        self.port, self.gid = route
        self.mtu_bytes = connected.mtu_bytes
        self.between = (link.local_host, link.peer_host)
        self.queue = queue
        self.waiting = 0  # fetches that have a credit, or wait for one
        self._link = link
        self._device = device
        self._timeout_s = timeout_s
        self._buffer_bytes = connected.buffer_bytes
        self._credits = trio.Semaphore(min(connected.buffers, _BLOCKS_MOST))
        self._returned: list[int] = []
        self._returned_some = trio.Event()

    @property
    def free(self) -> bool:
        """Whether another block would not have to wait for a credit."""
        return self._credits.value > 0

    def takes(self, buffer: memoryview) -> bool:
        """Whether the device can put bytes into this buffer, and the server has buffers as large."""
        return len(buffer) <= self._buffer_bytes and self._device.local_key(buffer) is not None

    async def fetch(self, request: m.LeaseBlock, buffer: memoryview) -> BlockDigest:
        """Fill the buffer; the digest the server claims. Raises what the server answers, or SourceUnavailable.

        After an error or a cancellation nothing writes to the buffer.
        """
        local = self._device.local_key(buffer)
        assert local is not None, "the caller asks `takes` before"
        self.waiting += 1
        try:
            async with self._credits:
                if self.queue.failure is not None:  # while we waited
                    raise SourceUnavailable(f"RDMA: {self.queue.failure}")
                self._send_returned()  # before the request, which may need one of them
                reply = await self._link.request(request, m.Type.LEASED, timeout_s=self._timeout_s)
                leased = reply.message
                assert isinstance(leased, m.Leased), "the link checks the type of a reply"
                try:
                    await self.queue.read(
                        address=local[0],
                        local_key=local[1],
                        remote_address=leased.address,
                        remote_key=leased.remote_key,
                        length_bytes=len(buffer),
                    )
                finally:
                    self._give_back(leased.lease)
                return BlockDigest(leased.digest)
        finally:
            self.waiting -= 1

    def _give_back(self, lease: int) -> None:
        self._returned.append(lease)
        self._returned_some.set()
        if len(self._returned) >= _RETURN_AT_ONCE:
            self._send_returned()

    def _send_returned(self) -> None:
        if self._returned and self.queue.failure is None:
            self._link.tell(m.ReturnLeases(tuple(self._returned)))
        self._returned.clear()

    async def return_leases(self) -> None:
        """Return leases that no request takes along. Runs as long as the path."""
        while True:
            await self._returned_some.wait()
            self._returned_some = trio.Event()
            await trio.sleep(_RETURN_S)
            self._send_returned()


class RdmaReader:
    """The RDMA side of one remote source."""

    def __init__(self, verbs: Callable[[], Verbs], *, source: str, timeout_s: float) -> None:
        """``timeout_s``: how long the lease of a block, and then its READ, may take."""
        self._make_verbs = verbs
        self._source = source
        self._timeout_s = timeout_s
        self._verbs: Verbs | None = None
        self._memory: memoryview | None = None
        self._memory_key = ""
        self._block_bytes = 0
        self._pinned_bytes = 0
        self._offered = trio.Event()
        self._tried = trio.Event()
        self._opening = trio.Lock()
        self._threads = trio.CapacityLimiter(1)
        self._devices: dict[str, ReadDevice] = {}
        self._nursery: trio.Nursery | None = None
        self._paths: list[RdmaPath] = []
        self._between: list[tuple[str, str]] = []  # the two addresses of each path, made or being made
        self._path_lost = trio.Event()
        self.reason = _NOT_YET
        self.failures = 0
        self.failed_reads = 0
        self.blocks = 0
        self.bytes = 0

    async def run(self, *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Everything that lives as long as the source. Cancel to close: no queue pair and no registration is left."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None
            for device in self._devices.values():
                device.close()
            self._devices.clear()

    # before there is a path

    def has_device(self) -> bool:
        """Whether this machine has an RDMA device, of use or not."""
        if self._verbs is None:
            self._verbs = self._make_verbs()
        return bool(self._verbs.ports())

    def check(self) -> None:
        """Raises SourceUnavailable, with what to install or configure, where this machine cannot use RDMA at all."""
        if not self.has_device():
            choose((), "", interface_of=interface_of)

    def offer(self, memory: memoryview, *, block_bytes: int, key: str, pinned_bytes: int | None = None) -> None:
        """Blocks will be read into this memory, which is cut into blocks of that size and outlives the source.

        ``pinned_bytes``: as much must be allowed to be registered, where this memory is only a sample of it.
        """
        self._memory, self._block_bytes, self._memory_key = memory, block_bytes, key
        self._pinned_bytes = len(memory) if pinned_bytes is None else pinned_bytes
        self._offered.set()

    async def tried(self) -> bool:
        """Wait until a path was made, or could not be; whether there is one. The caller sets a deadline."""
        await self._tried.wait()
        return bool(self._paths)

    # paths

    @property
    def paths(self) -> tuple[RdmaPath, ...]:
        """Those that there are now, the oldest first."""
        return tuple(self._paths)

    @property
    def ports(self) -> list[Port]:
        """The ports in use, each once."""
        return list({str(path.port): path.port for path in self._paths}.values())

    def path(self, buffer: memoryview) -> RdmaPath | None:
        """The path for this buffer: of those between the same addresses the oldest one with a credit left, and of these
        the least busy one. Without any credit, the least busy one of all."""
        paths = [path for path in self._paths if path.takes(buffer)]
        first = {path.between: path for path in reversed(paths) if path.free}
        return min(first.values() or paths, key=lambda path: path.waiting, default=None)

    async def keep(self, link: Link) -> None:
        """Have a path on this link as long as it lives. Cancel when the link is lost."""
        await self._offered.wait()
        backoff_s = _BACKOFF_FIRST_S
        between = (link.local_host, link.peer_host)
        while True:
            while self._between.count(between) >= _PATHS_MOST:
                await self._path_lost.wait()
            self._between.append(between)
            try:
                async with self._connected(link) as path:
                    backoff_s = _BACKOFF_FIRST_S
                    await path.queue.gone.wait()
                    failure = path.queue.failure or "closed"
            except TierfsError as error:
                failure = str(error)
            finally:
                self._between.remove(between)
                self._path_lost.set()
                self._path_lost = trio.Event()
            if not self._paths:
                self._set_reason(failure)
            self._tried.set()
            await trio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _BACKOFF_LAST_S)

    @asynccontextmanager
    async def _connected(self, link: Link) -> AsyncIterator[RdmaPath]:
        queue, path = await self._connect(link)
        try:
            self._paths.append(path)
            self._set_reason("")
            self._tried.set()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(path.return_leases)
                yield path
                nursery.cancel_scope.cancel()
        finally:
            self._paths.remove(path)
            queue.close("the connection to the server is gone")
            self.failed_reads += queue.failed_reads
            link.tell(m.RdmaDisconnect())

    async def _connect(self, link: Link) -> tuple[ReadQueue, RdmaPath]:
        if m.RDMA_FEATURE not in link.features:
            raise SourceUnavailable("the server offers no RDMA: an older version, or server.rdma_memory is 0, or TLS")
        self.check()
        assert self._verbs is not None, "check made it"
        if not link.local_host:
            raise SourceUnavailable("the connection to the server is gone")
        port, gid = choose(self._verbs.ports(), link.local_host, interface_of=interface_of)
        device = await self._device(port.device)
        try:
            state = device.device.port_state(port.number)
        except OSError as error:
            device.fail(str(error))
            raise SourceUnavailable(f"{port}: {error}") from error
        queue = device.queue(
            message_limit_bytes=state.message_limit_bytes,
            blocks=_BLOCKS_MOST,
            block_bytes=self._block_bytes,
            timeout_s=self._timeout_s,
        )
        try:
            own_first_packet = secrets.randbelow(_PACKET_NUMBERS)
            hello = m.RdmaConnect(
                queue_pair=queue.number,
                first_packet=own_first_packet,
                gid=gid.raw,
                lid=state.lid,
                mtu_bytes=state.mtu_bytes,
                reads=min(device.device.limits.reads_out, _READS_MOST),
            )
            reply = await link.request(hello, m.Type.RDMA_CONNECTED)
            connected = reply.message
            assert isinstance(connected, m.RdmaConnected), "the link checks the type of a reply"
            queue.connect(
                _route(port, gid, connected, state.mtu_bytes),
                first_packet=connected.first_packet,
                own_first_packet=own_first_packet,
                reads=min(connected.reads, hello.reads),
            )
        except BaseException:
            queue.close()
            raise
        log.info(
            "rdma_connected source=%s device=%s port=%d address=%s buffers=%d mtu=%d",
            self._source, port.device, port.number, link.local_host, connected.buffers, connected.mtu_bytes,
        )  # fmt: skip
        return queue, RdmaPath(link, device, (port, gid), queue, connected, self._timeout_s)

    async def _device(self, name: str) -> ReadDevice:
        """The device, opened and with the memory registered; only once however many links start from it."""
        async with self._opening:
            device = self._devices.get(name)
            if device is not None and device.failure is None:
                return device
            if device is not None:
                device.close()
                del self._devices[name]
            assert self._verbs is not None and self._memory is not None and self._nursery is not None
            check_limit(self._verbs.lockable_bytes(), whole_bytes=self._pinned_bytes, key=self._memory_key)
            await trio.to_thread.run_sync(self._verbs.prepare, limiter=self._threads)
            try:
                opened = self._verbs.open(name)
            except OSError as error:
                raise SourceUnavailable(f"the RDMA device {name} cannot be opened: {error}") from error
            try:
                device = ReadDevice(name, opened, self._memory, block_bytes=self._block_bytes, key=self._memory_key)
            except OSError as error:
                opened.close()
                raise SourceUnavailable(f"the RDMA device {name} cannot be used: {error}") from error
            try:
                await device.start()
            except BaseException:
                device.close()
                raise
            self._devices[name] = device
            self._nursery.start_soon(device.run)
            return device

    def _set_reason(self, reason: str) -> None:
        if reason and reason != self.reason:
            log.info("rdma_not_used source=%s reason=%s", self._source, reason)
        self.reason = reason


def _route(port: Port, gid: Gid, connected: m.RdmaConnected, mtu_bytes: int) -> Route:
    return Route(
        port=port.number,
        gid_index=gid.index,
        link=port.link,
        peer_gid=connected.gid,
        peer_lid=connected.lid,
        peer_queue_pair=connected.queue_pair,
        mtu_bytes=min(mtu_bytes, connected.mtu_bytes),
    )
