"""One life of one connection of a remote source: from the handshake until it is lost.

The remote source opens links, sends requests over them and replaces lost ones. One task receives, one sends what a full
socket did not take, one pings. Callers wait for their reply; the receiving task puts the data straight into the
caller's buffer.

What must hold: after ``request`` has returned or raised, nothing writes to its buffer. That is so because the receive
happens on the trio thread in one step with the look-up of its destination, and an abandoned request has none.
"""

import math
import ssl
from dataclasses import dataclass

import trio

from tierfs.blocks.errors import ProtocolError, SourceUnavailable, TierfsError
from tierfs.config.addresses import Address
from tierfs.transport import tcp
from tierfs.wire import messages as m
from tierfs.wire.connection import Pending, PendingRequests
from tierfs.wire.framing import BODY_LIMIT_BYTES, HEADER_BYTES, Header, parse_header
from tierfs.wire.handshake import ClientHandshake

_SCRATCH_BYTES = 256 << 10
_SPARE_REQUESTS = 8  # Watch, Ping and what a Cancel has not freed yet, beside blocks and catalog parts
_PING_S = 15.0
_PONG_S = 10.0


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply and, where no buffer was given, its data."""

    message: m.Message
    data: bytearray


@dataclass(slots=True, eq=False)
class _Waiter:
    done: trio.Event
    scope: trio.CancelScope
    timeout_s: float
    reply: Reply | None = None
    failure: TierfsError | None = None


class Link:
    """A connection after its handshake. ``run`` must be running for requests to be answered."""

    def __init__(self, connection: tcp.TcpConnection, welcome: m.Welcome, *, request_timeout_s: float) -> None:
        self._connection = connection
        self._welcome = welcome
        self._request_timeout_s = request_timeout_s
        self._requests: PendingRequests[_Waiter] = PendingRequests(welcome.max_requests + _SPARE_REQUESTS)
        self._unsent = bytearray()
        self._unsent_some = trio.Event()
        self._received_s = trio.current_time()
        self._scratch: memoryview | None = None
        self._failure: TierfsError | None = None
        self._scope = trio.CancelScope()
        self._asked_whether_alive = trio.Event()
        self.load = 0  # block and catalog requests under way
        self.silent = False  # lost, as nothing at all came
        self.doubted = False

    @property
    def has_room(self) -> bool:
        """Whether another block may be asked for now."""
        return self._failure is None and self.load < self._welcome.max_requests and not self._requests.full

    @property
    def features(self) -> tuple[str, ...]:
        """What the server can do beyond what every server can."""
        return self._welcome.features

    @property
    def local_host(self) -> str:
        """The address of this side of the connection."""
        return self._connection.local_host

    @property
    def peer_host(self) -> str:
        """The address of the server that answered."""
        return self._connection.peer_host

    @property
    def max_requests(self) -> int:
        """How many block and catalog requests the server takes at once on this connection."""
        return self._welcome.max_requests

    async def run(self) -> TierfsError:
        """Serve the connection until it is lost; why it was. Cancel to close."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._guard_send)
                    nursery.start_soon(self._ping)
                    try:
                        await self._receive()
                    except TierfsError as error:
                        self.lose(error)
            assert self._failure is not None, "only a failure or a cancellation ends a link"
            return self._failure
        finally:
            self.lose(SourceUnavailable("the source was closed"))
            self._connection.close()

    def lose(self, failure: TierfsError) -> None:
        """Give the connection up; everyone who waits on it gets SourceUnavailable at once."""
        if self._failure is None:
            self._failure = failure
        for waiter in self._requests.close():
            waiter.failure = SourceUnavailable(f"{self._connection.peer}: {self._failure}")
            waiter.failure.__cause__ = self._failure
            waiter.done.set()
        self._scope.cancel()

    async def request(
        self,
        message: m.Message,
        reply: m.Type,
        *,
        buffer: memoryview | None = None,
        data_limit_bytes: int = 0,
        timeout_s: float | None = None,
    ) -> Reply:
        """Send a request and wait for its reply. Raises what the server's Error stands for, or SourceUnavailable when
        the link is lost or the reply makes no progress for ``timeout_s``.

        Cancellation tells the server, and leaves ``buffer`` alone from then on.
        """
        if self._failure is not None:
            raise SourceUnavailable(f"{self._connection.peer}: {self._failure}") from self._failure
        if self._requests.full:
            raise SourceUnavailable(f"{self._connection.peer}: too many requests are open on this connection")
        timeout_s = self._request_timeout_s if timeout_s is None else timeout_s
        asked_s = trio.current_time()
        waiter = _Waiter(trio.Event(), trio.CancelScope(deadline=asked_s + timeout_s), timeout_s)
        pending = self._requests.add(reply, waiter, buffer=buffer, data_limit_bytes=data_limit_bytes)
        self._send(m.encode(message, request_id=pending.request_id))
        try:
            with waiter.scope:
                await waiter.done.wait()
        finally:
            if self._requests.abandon(pending):
                self._cancel(pending.request_id)
        if waiter.reply is not None:
            return waiter.reply
        if waiter.failure is not None:
            raise waiter.failure
        late = SourceUnavailable(f"{self._connection.peer}: no progress on a request for {timeout_s:g} s")
        if self._received_s <= asked_s:  # not only this request: nothing at all came
            self.silent = True
            self.lose(late)
        raise late

    def doubt(self) -> None:
        """Another connection to this server went silent: find out soon whether this one is alive, or give it up."""
        self.doubted = True
        self._asked_whether_alive.set()

    def tell(self, message: m.Message) -> None:
        """Send a message that has no reply; nothing happens on a link that is lost."""
        if self._failure is None:
            self._send(m.encode(message, request_id=0))

    def _cancel(self, request_id: int) -> None:
        if self._requests.abandoned * 2 > self._welcome.max_requests + _SPARE_REQUESTS:
            self.lose(SourceUnavailable("too many requests were given up without an answer"))
        elif self._failure is None:
            self._send(m.encode(m.Cancel(), request_id=request_id))

    # sending: frames are small and their number is bounded by the open requests

    def _send(self, frame: bytes) -> None:
        if self._unsent:
            self._unsent += frame
            return
        try:
            sent = self._connection.send_nowait(frame)
        except SourceUnavailable as error:
            self.lose(error)
            return
        if sent < len(frame):
            self._unsent += frame[sent:]
            self._unsent_some.set()

    async def _guard_send(self) -> None:
        while True:
            await self._unsent_some.wait()
            self._unsent_some = trio.Event()
            try:
                while self._unsent:
                    # What is being sent must stay in _unsent, so that _send keeps the order.
                    piece = bytes(self._unsent)
                    await self._connection.send_all(piece, progress_timeout_s=self._request_timeout_s)
                    del self._unsent[: len(piece)]
            except SourceUnavailable as error:
                self.lose(error)

    async def _ping(self) -> None:
        every_s = min(_PING_S, self._welcome.idle_timeout_s / 4)
        while True:
            timeout_s = min(_PONG_S, every_s)
            with trio.move_on_after(every_s):
                await self._asked_whether_alive.wait()
                self._asked_whether_alive = trio.Event()
                timeout_s = min(timeout_s, self._request_timeout_s / 4)
            asked_s = trio.current_time()
            try:
                await self.request(m.Ping(), m.Type.PONG, timeout_s=timeout_s)
                self.doubted = False
            except TierfsError as error:
                if self._received_s <= asked_s:  # a Pong may wait behind blocks; silence is another thing
                    self.lose(error)

    # receiving

    async def _receive(self) -> None:
        head = memoryview(bytearray(HEADER_BYTES))
        while True:
            # Between frames there is no deadline: silence is what pings are for.
            await self._connection.receive_exactly_into(head, progress_timeout_s=math.inf)
            header = parse_header(head, body_limit_bytes=BODY_LIMIT_BYTES)
            body = bytearray(header.body_bytes)
            await self._connection.receive_exactly_into(memoryview(body), progress_timeout_s=self._request_timeout_s)
            self._received_s = trio.current_time()
            if header.request_id == 0:
                raise _last_word(m.decode(header.type, bytes(body)))
            pending = self._requests.match(header)
            message = m.decode(header.type, bytes(body))
            data = await self._receive_data(header, pending)
            waiter = self._requests.finish(pending)
            if waiter is not None:
                if isinstance(message, m.Error):
                    waiter.failure = m.error_for(message.code, message.message)
                else:
                    waiter.reply = Reply(message, data)
                waiter.done.set()

    async def _receive_data(self, header: Header, pending: Pending[_Waiter]) -> bytearray:
        """Receive a frame's data into the caller's buffer, or one made here, or nowhere if nobody wants it any more."""
        length_bytes = header.data_bytes
        own = bytearray(length_bytes if pending.buffer is None and pending.waiter is not None else 0)
        into = memoryview(own)
        done = since_checkpoint = 0
        last_progress_s = trio.current_time()
        while done < length_bytes:
            # No checkpoint between looking up the destination and receiving into it.
            if pending.waiter is None:
                if self._scratch is None:
                    self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
                count = self._connection.receive_nowait(self._scratch[: length_bytes - done])
            else:
                whole = into if pending.buffer is None else pending.buffer
                count = self._connection.receive_nowait(whole[done : done + tcp.RECEIVE_CHUNK_BYTES])
            if count is not None:
                done += count
                since_checkpoint += count
                self._received_s = last_progress_s = trio.current_time()
                if pending.waiter is not None:
                    pending.waiter.scope.deadline = last_progress_s + pending.waiter.timeout_s
                if since_checkpoint >= tcp.RECEIVE_CHUNK_BYTES:
                    since_checkpoint = 0
                    await trio.lowlevel.checkpoint()
                continue
            since_checkpoint = 0
            left_s = last_progress_s + self._request_timeout_s - trio.current_time()
            if left_s <= 0 or not await self._connection.wait_receivable(left_s, wanted_bytes=length_bytes - done):
                raise SourceUnavailable(f"nothing came for {self._request_timeout_s:g} s in the middle of a reply")
        return own


async def open_link(
    address: Address,
    *,
    export: str,
    token: bytes | None,
    nonce: bytes,
    tls: ssl.SSLContext | None,
    connect_timeout_s: float,
    request_timeout_s: float,
    features: tuple[str, ...] = (),
    turn: int = 0,
) -> Link:
    """Connect (``turn``: see tcp.connect) and shake hands.

    Raises SourceUnavailable, AuthenticationFailed, NotFound, ProtocolError, SourceRefused. Cancellation leaves no
    connection.
    """
    with trio.move_on_after(connect_timeout_s):
        connection = await tcp.connect(address, timeout_s=connect_timeout_s, tls=tls, turn=turn)
        try:
            handshake = ClientHandshake(export=export, token=token, nonce=nonce, software="tierfs", features=features)
            answer: m.Message = handshake.hello()
            while not isinstance(answer, m.Welcome):
                await connection.send_all(m.encode(answer, request_id=0), progress_timeout_s=connect_timeout_s)
                answer = handshake.receive(await _receive_message(connection, connect_timeout_s))
            return Link(connection, answer, request_timeout_s=request_timeout_s)
        except BaseException:
            connection.close()
            raise
    raise SourceUnavailable(f"{address} did not finish the handshake within {connect_timeout_s:g} s")


async def _receive_message(connection: tcp.TcpConnection, timeout_s: float) -> m.Message:
    head = bytearray(HEADER_BYTES)
    await connection.receive_exactly_into(memoryview(head), progress_timeout_s=timeout_s)
    header = parse_header(head, body_limit_bytes=BODY_LIMIT_BYTES, data_limit_bytes=0)
    body = bytearray(header.body_bytes)
    await connection.receive_exactly_into(memoryview(body), progress_timeout_s=timeout_s)
    return m.decode(header.type, bytes(body))


def _last_word(message: m.Message) -> TierfsError:
    """What a message about no request in particular means: the server is about to close."""
    if isinstance(message, m.Error):
        return m.error_for(message.code, message.message)
    if isinstance(message, m.Refused):
        return m.error_for(message.code, message.reason)
    return ProtocolError(f"the server sent a {type(message).__name__} out of place")
