"""A real export, a real server and real sockets, for the tests of the wire: what they share."""

import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import trio

from tierfs.blocks.ids import VersionId
from tierfs.blocks.spans import Span, block_count, whole_block
from tierfs.catalog.schema import Publication
from tierfs.server.exports import Exported, OpenBlock
from tierfs.server.limits import ServerLimits
from tierfs.server.listener import Server
from tierfs.server.rdma import RdmaService
from tierfs.tiers.directory import DirectorySource
from tierfs.tiers.interface import Source
from tierfs.tiers.remote import RemoteSource
from tierfs.wire import messages as m
from tierfs.wire.framing import HEADER_BYTES, parse_header

BLOCK_BYTES = 256 << 10
DEADLINE_S = 30.0  # no test waits longer for anything


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run a test's main with a deadline, and close what its raw peers left open."""

    async def bounded() -> None:
        with trio.fail_after(DEADLINE_S):
            try:
                await main()
            finally:
                RawPeer.close_all()

    trio.run(bounded)


def pattern(size_bytes: int, seed: int = 1) -> bytes:
    """Bytes that tell their place: a block in the wrong place, or a shifted one, is noticed."""
    words = (seed * 1_000_003 + i for i in range(0, size_bytes, 8))
    return b"".join(word.to_bytes(8, "little") for word in words)[:size_bytes]


@dataclass
class Served:
    """A running server and what it exports."""

    server: Server
    host: str
    port: int
    source: DirectorySource

    def url(self, export: str = "") -> str:
        return f"tierfs://{self.host}:{self.port}/{export}"


class GatedExport:
    """A directory source whose blocks wait at a gate: to have requests under way for as long as a test wants."""

    def __init__(self, inner: DirectorySource) -> None:
        self.inner = inner
        self.gate = trio.Event()
        self.waiting = 0
        self.someone_waits = trio.Event()

    async def publication(self) -> Publication:
        return await self.inner.publication()

    async def wait_changed(self, revision: int) -> Publication:
        return await self.inner.wait_changed(revision)

    @asynccontextmanager
    async def open_block(self, version: VersionId, block: int) -> AsyncIterator[OpenBlock]:
        self.waiting += 1
        self.someone_waits.set()
        try:
            await self.gate.wait()
        finally:
            self.waiting -= 1
        async with self.inner.open_block(version, block) as opened:
            yield opened


@asynccontextmanager
async def exporting(directory: Path, *, digest: bool = True) -> AsyncIterator[DirectorySource]:
    source = DirectorySource(
        directory, name="", block_bytes=BLOCK_BYTES, state_directory=None, rescan_s=0.05, digest=digest
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(source.run)
        yield source
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def listening(
    exports: Mapping[str, Exported],
    *,
    tokens: Mapping[str, bytes | None] | None = None,
    tls: ssl.SSLContext | None = None,
    limits: ServerLimits | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    rdma: RdmaService | None = None,
) -> AsyncIterator[tuple[Server, int]]:
    listen = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    server = Server(exports, listen=[listen], tokens=tokens or {}, tls=tls, limits=limits, rdma=rdma)
    async with trio.open_nursery() as nursery:
        bound = await nursery.start(server.run)
        yield server, bound[0].port
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def serving(
    directory: Path,
    *,
    token: bytes | None = None,
    tls: ssl.SSLContext | None = None,
    limits: ServerLimits | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    digest: bool = True,
    rdma: RdmaService | None = None,
) -> AsyncIterator[Served]:
    async with exporting(directory, digest=digest) as source:
        exports = {"": source}
        async with listening(
            exports, tokens={"": token}, tls=tls, limits=limits, host=host, port=port, rdma=rdma
        ) as where:
            yield Served(where[0], host, where[1], source)


@asynccontextmanager
async def running(source: RemoteSource) -> AsyncIterator[RemoteSource]:
    async with trio.open_nursery() as nursery:
        await nursery.start(source.run)
        yield source
        nursery.cancel_scope.cancel()


def file_of(publication: Publication, name: bytes) -> tuple[VersionId, int]:
    """Version and size of a file in the root of the export."""
    for entry in publication.catalog.entries:
        if entry.name == name:
            return VersionId(entry.version), entry.size_bytes
    raise AssertionError(f"{name!r} is not in the catalog")


async def read_file(source: Source, publication: Publication, name: bytes) -> bytes:
    """The whole file, all blocks at once."""
    version, size_bytes = file_of(publication, name)
    block_bytes = publication.catalog.block_bytes
    whole = bytearray(size_bytes)
    view = memoryview(whole)

    async def read(block: int) -> None:
        span: Span = whole_block(size_bytes, block_bytes, block)
        start = block * block_bytes
        await source.read_into(version, span, view[start : start + span.length_bytes])

    async with trio.open_nursery() as nursery:
        for block in range(block_count(size_bytes, block_bytes)):
            nursery.start_soon(read, block)
    return bytes(whole)


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until a callable is true. The surrounding deadline is the limit."""
    while not condition():  # noqa: ASYNC110 - what is waited for is in another process or has no event
        await trio.sleep(0.002)


class RawPeer:
    """A client that sends what a test tells it to, well-formed or not. Its socket is closed when ``run`` ends."""

    _sockets: ClassVar[list[trio.socket.SocketType]] = []

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream: trio.abc.Stream = stream
        self._sockets.append(stream.socket)
        self._buffer = bytearray()

    @classmethod
    def close_all(cls) -> None:
        for sock in cls._sockets:
            sock.close()
        cls._sockets.clear()

    @classmethod
    async def connect(cls, port: int, host: str = "127.0.0.1") -> "RawPeer":
        return cls(await trio.open_tcp_stream(host, port))

    async def connect_to(self, port: int) -> None:
        """Connect a socket that was made before."""
        assert isinstance(self.stream, trio.SocketStream)
        await self.stream.socket.connect(("127.0.0.1", port))

    async def send(self, message: m.Message, request_id: int = 0) -> None:
        await self.stream.send_all(m.encode(message, request_id=request_id))

    async def receive(self) -> tuple[int, m.Message, bytes]:
        """The next frame: request id, message, data. Raises EOFError when the server has closed."""
        header = parse_header(await self._exactly(HEADER_BYTES))
        body = await self._exactly(header.body_bytes)
        return header.request_id, m.decode(header.type, body), await self._exactly(header.data_bytes)

    async def hello(self, export: str = "") -> m.Message:
        await self.send(m.Hello(export, bytes(m.NONCE_BYTES), "test", ()))
        return (await self.receive())[1]

    async def closed(self) -> bool:
        """Wait until the server closes; True if nothing else came first."""
        try:
            data = await self.stream.receive_some()
        except trio.BrokenResourceError:
            return True
        return not data and not self._buffer

    async def _exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            piece = await self.stream.receive_some(1 << 20)
            if not piece:
                raise EOFError
            self._buffer += piece
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data


def certificate(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A self-signed certificate for 127.0.0.1: the server's context and one that trusts it."""
    key, certificate_ = directory / "key.pem", directory / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate_],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate_, key)
    return server, ssl.create_default_context(cafile=certificate_)
