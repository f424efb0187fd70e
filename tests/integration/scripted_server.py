"""A server that keeps the protocol as far as a test wants it to: to see what a client makes of the rest."""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from tierfs.catalog.schema import Catalog, Entry, Kind, catalog_digest, encode
from tierfs.wire import messages as m
from tierfs.wire.framing import FrameReader
from tierfs.wire.handshake import ServerHandshake

BLOCK_BYTES = 1 << 20
VERSION = b"v" * 16
CATALOG = Catalog(
    "", 1, BLOCK_BYTES,
    [Entry(0, b"", Kind.DIRECTORY, 0o755, 0), Entry(0, b"file", Kind.FILE, 0o644, 0, 64 * BLOCK_BYTES, VERSION)],
)  # fmt: skip
ENCODED = encode(CATALOG)


class Peer:
    """The server's end of one connection."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._frames = FrameReader()
        self._sending = trio.Lock()

    async def receive(self) -> tuple[int, m.Message]:
        while (frame := self._frames.next_frame()) is None:
            data = await self.stream.receive_some()
            if not data:
                raise trio.EndOfChannel
            self._frames.feed(data)
        return frame.header.request_id, m.decode(frame.header.type, frame.body)

    async def send(self, message: m.Message, request_id: int, data: bytes = b"") -> None:
        await self.send_raw(m.encode(message, request_id=request_id, data_bytes=len(data)) + data)

    async def send_raw(self, data: bytes) -> None:
        async with self._sending:
            await self.stream.send_all(data)


Handler = Callable[[Peer, int, m.ReadBlock], Awaitable[None]]


@dataclass
class Script:
    """What the server does. ``read`` answers block requests, one after the other; it may hang."""

    read: Handler
    boot: bytes = b"b" * 16
    encoded: bytes = ENCODED
    claimed_digest: bytes = b""
    claimed_bytes: int = -1
    contents: bytes = b""
    max_requests: int = 32
    idle_timeout_s: int = 60
    answers_pings: bool = True
    port: int = 0
    connections: int = 0
    cancels: list[int] = field(default_factory=list)
    watches: list[m.Watch] = field(default_factory=list)
    catalogs_sent: int = 0
    pings: int = 0
    published: trio.Event = field(default_factory=trio.Event)

    def publish(self, encoded: bytes, *, contents: bytes = b"") -> None:
        """Another catalog, which everybody who watches is told of."""
        self.encoded, self.contents = encoded, contents
        self.published.set()
        self.published = trio.Event()

    async def serve(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        peer = Peer(stream)
        try:
            async with trio.open_nursery() as nursery:
                await self._serve(peer, nursery)
        except* (trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    async def _serve(self, peer: Peer, nursery: trio.Nursery) -> None:
        welcome = m.Welcome(b"", self.boot, self.max_requests, self.idle_timeout_s, "script", ())
        handshake = ServerHandshake(tokens={"": None}, nonce=bytes(32), welcome=welcome)
        request_id, message = await peer.receive()
        await peer.send(handshake.receive(message), request_id)
        reads_send, reads_receive = trio.open_memory_channel[tuple[int, m.ReadBlock]](100)
        nursery.start_soon(self._reader, peer, reads_receive)
        while True:
            request_id, message = await peer.receive()
            match message:
                case m.Watch():
                    self.watches.append(message)
                    nursery.start_soon(self._watch, peer, request_id, message)
                case m.GetCatalog():
                    self.catalogs_sent += 1
                    end = message.offset_bytes + message.length_bytes
                    await peer.send(m.CatalogPart(), request_id, self.encoded[message.offset_bytes : end])
                case m.Ping():
                    self.pings += 1
                    if self.answers_pings:
                        await peer.send(m.Pong(), request_id)
                case m.Cancel():
                    self.cancels.append(request_id)
                case m.ReadBlock():
                    reads_send.send_nowait((request_id, message))
                case _:
                    raise AssertionError(f"unexpected {message}")

    async def _watch(self, peer: Peer, request_id: int, message: m.Watch) -> None:
        while True:
            digest = self.claimed_digest or catalog_digest(self.encoded)
            size = self.claimed_bytes if self.claimed_bytes >= 0 else len(self.encoded)
            if message.boot != self.boot or message.catalog_digest != digest:
                await peer.send(m.Changed(self.boot, digest, size, 1, 0), request_id, self.contents)
                return
            await self.published.wait()

    async def _reader(self, peer: Peer, reads: trio.MemoryReceiveChannel[tuple[int, m.ReadBlock]]) -> None:
        async for request_id, message in reads:
            await self.read(peer, request_id, message)


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[str]:
    """Run it; the url of its export."""
    async with trio.open_nursery() as nursery:
        serve = functools.partial(trio.serve_tcp, script.serve, script.port, host="127.0.0.1")
        listeners = await nursery.start(serve)
        script.port = listeners[0].socket.getsockname()[1]
        yield f"tierfs://127.0.0.1:{script.port}/"
        nursery.cancel_scope.cancel()
