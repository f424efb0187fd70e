"""One connection of the server: the handshake, then requests until the peer goes or breaks a rule.

The listener is its only caller. One task reads requests, one per request prepares and sends its reply, a lock keeps
replies whole. Back-pressure is not reading: at ``requests_per_connection`` the reader stops. What must hold: every
request gets exactly one reply while the connection lives; no wait on the peer is without a deadline; once the header of
a block is out, exactly the announced number of bytes follows, zeros where the file had no more (the client's digest
check finds them).
"""

import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from tierfs.blocks.errors import ProtocolError, SourceRefused, SourceUnavailable, StaleVersion, TierfsError
from tierfs.blocks.ids import VersionId
from tierfs.server.budget import ByteBudget
from tierfs.server.exports import OpenBlock
from tierfs.server.feed import ExportFeed
from tierfs.server.limits import WATCH, ServerLimits, ServerStatistics
from tierfs.server.rdma import Lending, RdmaService, check_length
from tierfs.transport.tcp import TcpConnection
from tierfs.wire import messages as m
from tierfs.wire.framing import DATA_LIMIT_BYTES, Frame, FrameReader
from tierfs.wire.handshake import ServerHandshake

log = logging.getLogger(__name__)

_ZEROS = bytes(256 << 10)
_RECEIVE_BYTES = 16 << 10
_LOGGED_FAILURES = 8
_BUFFER_WAIT_S = 5.0  # a client within its credits waits for none
_Served = m.ReadBlock | m.LeaseBlock | m.GetCatalog | m.RdmaConnect
_KINDS = {m.ReadBlock: "read", m.LeaseBlock: "lease", m.GetCatalog: "catalog", m.RdmaConnect: "rdma-connect"}


@dataclass(slots=True, eq=False)
class _Request:
    scope: trio.CancelScope
    since_s: float
    replying: bool = False
    outcome: str = "lost"


class Session:
    """One peer. ``run`` returns when it left in order and raises TierfsError with the reason otherwise."""

    def __init__(
        self,
        connection: TcpConnection,
        *,
        feeds: Mapping[str, ExportFeed],
        limits: ServerLimits,
        budget: ByteBudget,
        memory_budget: ByteBudget,
        send_limiter: trio.CapacityLimiter,
        statistics: ServerStatistics,
        rdma: RdmaService | None = None,
    ) -> None:
        self._connection = connection
        self._feeds = feeds
        self._limits = limits
        self._budget = budget
        self._memory_budget = memory_budget
        self._send_limiter = send_limiter
        self._statistics = statistics
        self._rdma = rdma
        self._lending: Lending | None = None
        self._frames = FrameReader(body_limit_bytes=limits.body_limit_bytes)
        self._received = memoryview(bytearray(_RECEIVE_BYTES))
        self._send_lock = trio.Lock()
        self._in_reply = False  # stays true when a reply was cut in the middle: nothing can follow it then
        self._reply_since_s = 0.0
        self._slots = trio.Semaphore(limits.requests_per_connection)
        self._open_slots = trio.Semaphore(limits.open_blocks_per_connection)
        self._requests: dict[int, _Request] = {}
        self._watching = False
        self._logged: set[str] = set()
        self._failure: TierfsError | None = None
        self._scope = trio.CancelScope()

    async def run(self, handshake: ServerHandshake, on_welcome: Callable[[], None] = lambda: None) -> None:
        """Serve the peer until it leaves. The caller closes the connection, also after cancellation.

        ``on_welcome`` is called once it has proved that it may be here.
        """
        feed = self._feeds[await self._shake_hands(handshake)]
        on_welcome()
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    try:
                        while (frame := await self._next_frame(self._limits.idle_s)) is not None:
                            await self._start(frame, feed, nursery)
                    except TierfsError as error:
                        self._fail(error)
                    nursery.cancel_scope.cancel()
        finally:
            self._stop_lending()
        if self._failure is not None:
            if isinstance(self._failure, ProtocolError) and not self._in_reply:
                await self._say_last(m.Error(m.Code.PROTOCOL, m.printable(str(self._failure))))
            raise self._failure

    async def refuse(self, code: m.Code, reason: str) -> None:
        """Tell a peer that is not served (yet) why; the caller closes the connection."""
        self._statistics.refused[code.value] += 1
        await self._say_last(m.Refused(code, m.printable(reason)))

    async def _say_last(self, message: m.Message) -> None:
        """Send a last message, then wait shortly for the peer to close: closing first could destroy it on its way."""
        with trio.move_on_after(self._limits.linger_s):
            try:
                await self._connection.send_all(
                    m.encode(message, request_id=0), progress_timeout_s=self._limits.linger_s
                )
                self._connection.shutdown_send()
                while await self._connection.wait_receivable(self._limits.linger_s):
                    self._connection.receive_nowait(self._received)
                    await trio.lowlevel.checkpoint()
            except SourceUnavailable:
                pass

    # the reader

    async def _shake_hands(self, handshake: ServerHandshake) -> str:
        with trio.move_on_after(self._limits.handshake_s):
            while True:
                answer: m.Message
                try:
                    frame = await self._next_frame(self._limits.handshake_s)
                    if frame is None:
                        raise SourceUnavailable(f"{self._connection.peer} left during the handshake")
                    answer = handshake.receive(m.decode(frame.header.type, frame.body))
                except ProtocolError as error:
                    answer = m.Refused(m.Code.PROTOCOL, m.printable(str(error)))
                if isinstance(answer, m.Refused):
                    await self.refuse(answer.code, answer.reason)
                    raise m.error_for(answer.code, answer.reason)
                await self._connection.send_all(
                    m.encode(answer, request_id=0), progress_timeout_s=self._limits.handshake_s
                )
                if handshake.export is not None:
                    return handshake.export
        self._statistics.timed_out += 1
        raise SourceUnavailable(
            f"{self._connection.peer} did not finish the handshake within {self._limits.handshake_s:g} s"
        )

    async def _next_frame(self, idle_s: float) -> Frame | None:
        """The next frame; None when the peer closed between frames."""
        deadline_s = trio.current_time() + idle_s
        in_frame = False
        while (frame := self._frames.next_frame()) is None:
            if self._frames.in_frame and not in_frame:
                in_frame = True
                deadline_s = trio.current_time() + self._limits.frame_s
            try:
                count = self._connection.receive_nowait(self._received)
            except SourceUnavailable:
                if in_frame:
                    raise
                return None
            if count is not None:
                self._frames.feed(self._received[:count])
                await trio.lowlevel.checkpoint()  # a peer that floods must not keep the others from their turn
                continue
            left_s = deadline_s - trio.current_time()
            if left_s <= 0 or not await self._connection.wait_receivable(left_s):
                self._statistics.timed_out += 1
                what = "did not finish a request in time" if in_frame else f"was silent for {idle_s:g} s"
                raise SourceUnavailable(f"{self._connection.peer} {what}")
        return frame

    async def _start(self, frame: Frame, feed: ExportFeed, nursery: trio.Nursery) -> None:
        request_id = frame.header.request_id
        message = m.decode(frame.header.type, frame.body)
        match message:
            case m.ReadBlock() | m.LeaseBlock() | m.GetCatalog() | m.RdmaConnect():
                self._check_new(request_id)
                since_s = trio.current_time()
                await self._slots.acquire()
                request = self._requests[request_id] = _Request(trio.CancelScope(), since_s)
                nursery.start_soon(self._serve, request_id, request, message, feed)
            case m.Watch():
                self._check_new(request_id)
                if self._watching:
                    await self._reply(request_id, m.Error(m.Code.BUSY, "one Watch at a time on a connection"))
                    return
                self._watching = True
                request = self._requests[request_id] = _Request(trio.CancelScope(), trio.current_time())
                nursery.start_soon(self._watch, request_id, request, message, feed)
            case m.Ping():
                await self._reply(request_id, m.Pong())
            case m.Cancel():
                cancelled = self._requests.get(request_id)
                if cancelled is not None and not cancelled.replying:
                    cancelled.scope.cancel()
                self._return_leases((request_id,))
            case m.ReturnLeases(leases=leases):
                self._return_leases(leases)
            case m.RdmaDisconnect():
                self._stop_lending()
            case _:
                raise ProtocolError(f"a {type(message).__name__} message is not a request")

    def _check_new(self, request_id: int) -> None:
        if request_id in self._requests:
            raise ProtocolError(f"request id {request_id} is in use on this connection already")

    # the requests

    async def _serve(self, request_id: int, request: _Request, message: _Served, feed: ExportFeed) -> None:
        kind = _KINDS[type(message)]
        self._statistics.running_requests += 1
        try:
            with request.scope:
                try:
                    match message:
                        case m.ReadBlock():
                            await self._read_block(request_id, request, message, feed)
                        case m.LeaseBlock():
                            await self._lease_block(request_id, request, message, feed)
                        case m.GetCatalog():
                            part = feed.catalog_part(message.digest, message.offset_bytes, message.length_bytes)
                            await self._reply(request_id, m.CatalogPart(), part, request=request)
                        case m.RdmaConnect():
                            await self._reply(request_id, await self._lend(message, feed), request=request)
                    request.outcome = "ok"
                    self._statistics.latencies[kind].add(trio.current_time() - request.since_s)
                except Exception as error:
                    await self._report(request_id, request, error)
            await self._answer_cancelled(request_id, request)
        except TierfsError as error:  # the reply could not be sent
            self._fail(error)
        finally:
            del self._requests[request_id]
            self._slots.release()
            self._statistics.running_requests -= 1
            self._statistics.requests[kind][request.outcome] += 1

    async def _watch(self, request_id: int, request: _Request, message: m.Watch, feed: ExportFeed) -> None:
        try:
            with request.scope:
                changed, data = await feed.wait_news(message)
                await self._reply(request_id, changed, data, request=request)
                request.outcome = "ok"
            await self._answer_cancelled(request_id, request)
        except TierfsError as error:
            self._fail(error)
        finally:
            del self._requests[request_id]
            self._watching = False
            self._statistics.requests[WATCH][request.outcome] += 1

    async def _answer_cancelled(self, request_id: int, request: _Request) -> None:
        if request.scope.cancelled_caught:
            await self._reply(request_id, m.Error(m.Code.CANCELLED, "cancelled"))
            request.outcome = m.Code.CANCELLED.value

    async def _report(self, request_id: int, request: _Request, error: Exception) -> None:
        """Answer with the failure, unless the reply is out already or the connection is what failed."""
        self._statistics.failed_requests += 1
        if request.replying:
            if self._failure is None and not isinstance(error, TierfsError):
                self._log_once(error)
            return
        if isinstance(error, TierfsError):
            reply = m.Error(m.code_for(error), m.printable(str(error)))
            outcome = reply.code.value
        else:
            # A bug, or an OSError the export did not expect: the peer may try again, and the log has the cause.
            self._log_once(error)
            reply = m.Error(m.Code.UNAVAILABLE, f"the server failed on this: {type(error).__name__}")
            outcome = "failed"
        await self._reply(request_id, reply, request=request)
        request.outcome = outcome

    def _log_once(self, error: Exception) -> None:
        """A failing disk fails every request: one traceback of each kind per connection is enough."""
        if repr(error) not in self._logged and len(self._logged) < _LOGGED_FAILURES:
            self._logged.add(repr(error))
            log.error("request_failed peer=%s error=%r", self._connection.peer, error, exc_info=error)

    async def _read_block(self, request_id: int, request: _Request, message: m.ReadBlock, feed: ExportFeed) -> None:
        length_bytes = message.length_bytes
        _check_size(message, feed)
        async with (
            self._open_slots,
            self._budget.hold(length_bytes, self._cut_off_slow),
            self._open(feed, VersionId(message.version), message.block) as opened,
        ):
            _check_span(message, opened)
            async with self._replying(request):
                await self._send_block(request_id, opened, message)
            self._statistics.sent_blocks += 1
            self._statistics.sent_bytes += length_bytes

    @asynccontextmanager
    async def _open(self, feed: ExportFeed, version: VersionId, block: int) -> AsyncIterator[OpenBlock]:
        """The block, in a file if it can be: an export has few buffers, and slow peers must not hold them.

        A block that was read to learn its digest is in the page cache, and comes as a file when it is asked for again.
        Only one that the export cannot remember (its file was written just now) is sent from memory, and few of these.
        """
        for _ in range(2):
            async with feed.source.open_block(version, block) as opened:
                if opened.data is None:
                    yield opened
                    return
                length_bytes = opened.length_bytes
        async with (
            self._memory_budget.hold(length_bytes, self._cut_off_slow),
            feed.source.open_block(version, block) as opened,
        ):
            yield opened

    async def _send_block(self, request_id: int, opened: OpenBlock, message: m.ReadBlock) -> None:
        """Inside ``_replying``. A failure of the connection ends the session: the stream is out of step."""
        timeout_s = self._limits.send_progress_s
        length_bytes = message.length_bytes
        head = m.encode(m.BlockData(opened.digest), request_id=request_id, data_bytes=length_bytes)
        try:
            if opened.fd is None:
                assert opened.data is not None, "an opened block is in a file or in memory"
                data = opened.data[message.start_bytes : message.start_bytes + length_bytes]
                await self._connection.send_all(head, data, progress_timeout_s=timeout_s)
                return
            await self._connection.send_all(head, progress_timeout_s=timeout_s, more=length_bytes > 0)
            missing_bytes = length_bytes - await self._connection.send_file(
                opened.fd,
                opened.offset_bytes + message.start_bytes,
                length_bytes,
                progress_timeout_s=timeout_s,
                limiter=self._send_limiter,
            )
            if missing_bytes:
                self._statistics.padded_blocks += 1
                log.warning(
                    "block_padded peer=%s block=%d missing_bytes=%d: the file ended or failed while it was sent",
                    self._connection.peer, message.block, missing_bytes,
                )  # fmt: skip
            while missing_bytes:
                piece = _ZEROS[:missing_bytes]
                await self._connection.send_all(piece, progress_timeout_s=timeout_s)
                missing_bytes -= len(piece)
        except SourceUnavailable as error:
            self._fail(error)
            raise

    # over RDMA

    async def _lend(self, message: m.RdmaConnect, feed: ExportFeed) -> m.RdmaConnected:
        self._stop_lending()
        if self._rdma is None:
            raise SourceUnavailable("RDMA is switched off on the server (server.rdma_memory), or it speaks TLS")
        if feed.block_bytes is None:
            raise SourceUnavailable("the export has not been scanned yet")
        lending = await self._rdma.lend(message, local_host=self._connection.local_host, block_bytes=feed.block_bytes)
        self._stop_lending()  # of another RdmaConnect meanwhile
        self._lending = lending
        return lending.connected

    def _stop_lending(self) -> None:
        if self._lending is not None:
            self._lending.close()
            self._lending = None

    def _return_leases(self, leases: Iterable[int]) -> None:
        if self._lending is not None:
            for lease in leases:
                self._lending.leases.give_back(lease)

    async def _lease_block(self, request_id: int, request: _Request, message: m.LeaseBlock, feed: ExportFeed) -> None:
        _check_size(message, feed)
        lending = self._lending
        if lending is None:
            raise SourceUnavailable("there is no queue pair on this connection")
        check_length(message.length_bytes, lending.buffer_bytes)
        leases = lending.leases
        buffer = await leases.take(timeout_s=_BUFFER_WAIT_S)
        granted = False
        try:
            async with self._open_slots, self._open(feed, VersionId(message.version), message.block) as opened:
                _check_span(message, opened)
                missing_bytes = await trio.to_thread.run_sync(
                    _fill, buffer.view[: message.length_bytes], opened, message.start_bytes, limiter=self._send_limiter
                )
                self._statistics.padded_blocks += missing_bytes > 0
                digest = opened.digest
            async with self._replying(request):
                leases.grant(request_id, buffer)
                granted = True
                leased = m.Leased(digest, request_id, buffer.address, buffer.remote_key)
                try:
                    await self._connection.send_all(
                        m.encode(leased, request_id=request_id), progress_timeout_s=self._limits.send_progress_s
                    )
                except SourceUnavailable as error:  # the stream is out of step
                    self._fail(error)
                    raise
        finally:
            if not granted:
                leases.put(buffer)
        self._statistics.lent_blocks += 1
        self._statistics.lent_bytes += message.length_bytes

    async def _reply(
        self, request_id: int, message: m.Message, data: memoryview | None = None, *, request: _Request | None = None
    ) -> None:
        data_bytes = 0 if data is None else len(data)
        parts = [] if data is None else [data]
        async with self._replying(request):
            await self._connection.send_all(
                m.encode(message, request_id=request_id, data_bytes=data_bytes),
                *parts,
                progress_timeout_s=self._limits.send_progress_s,
            )

    @asynccontextmanager
    async def _replying(self, request: _Request | None) -> AsyncIterator[None]:
        """Hold the connection for one whole reply, from the first byte on which a Cancel comes too late."""
        async with self._send_lock:
            if request is not None:
                if request.scope.cancel_called:  # cancelled in the last moment before its turn
                    await trio.lowlevel.checkpoint()
                request.replying = True
            self._in_reply = True
            self._reply_since_s = trio.current_time()
            yield
            self._in_reply = False

    def _cut_off_slow(self) -> bool:
        if not self._in_reply or trio.current_time() - self._reply_since_s < self._limits.patience_s:
            return False  # what takes long is not this peer
        self._fail(SourceUnavailable(f"{self._connection.peer} is so slow that others had to wait; it was cut off"))
        return True

    def _fail(self, error: TierfsError) -> None:
        """The first failure ends the session and is the one that is told."""
        if self._failure is None:
            self._failure = error
        self._scope.cancel()


def _check_size(message: m.ReadBlock | m.LeaseBlock, feed: ExportFeed) -> None:
    length_bytes = message.length_bytes
    if feed.block_bytes is not None and message.block_bytes != feed.block_bytes:
        raise StaleVersion(f"the export's blocks have {feed.block_bytes} bytes now, not {message.block_bytes}")
    if length_bytes > min(DATA_LIMIT_BYTES, feed.block_bytes or DATA_LIMIT_BYTES):
        raise SourceRefused(f"{length_bytes} bytes are more than a block of this export")


def _check_span(message: m.ReadBlock | m.LeaseBlock, opened: OpenBlock) -> None:
    end_bytes = message.start_bytes + message.length_bytes
    if end_bytes > opened.length_bytes:
        raise SourceRefused(
            f"bytes {message.start_bytes} to {end_bytes} of block {message.block}: it has {opened.length_bytes}"
        )


def _fill(view: memoryview, opened: OpenBlock, start_bytes: int) -> int:
    """In a thread: put a part of the block there, zeros where the file has no more; how many bytes are missing."""
    if opened.fd is None:
        assert opened.data is not None, "an opened block is in a file or in memory"
        view[:] = opened.data[start_bytes : start_bytes + len(view)]
        return 0
    done = 0
    while done < len(view):
        try:
            count = os.preadv(opened.fd, [view[done:]], opened.offset_bytes + start_bytes + done)
        except OSError:  # as where it is sent: the client's digest check finds it
            count = 0
        if count == 0:
            view[done:] = bytes(len(view) - done)
            break
        done += count
    return len(view) - done
