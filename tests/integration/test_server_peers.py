"""What peers can do to a server, on real sockets: slow, silent, malformed, greedy, gone."""

import logging
import os
import resource
import socket
import struct
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.integration.serving import (
    BLOCK_BYTES,
    GatedExport,
    RawPeer,
    certificate,
    eventually,
    exporting,
    file_of,
    listening,
    pattern,
    read_file,
    run,
    running,
    serving,
)
from tierfs.blocks.errors import ConfigError
from tierfs.blocks.ids import VersionId, digest_block
from tierfs.server.exports import OpenBlock
from tierfs.server.limits import ServerLimits
from tierfs.server.listener import Server
from tierfs.tiers.directory import BlockReading, DirectorySource
from tierfs.tiers.remote import RemoteSource
from tierfs.wire import messages as m


async def whole_file_is_served(port: int, data: bytes, name: bytes = b"file") -> None:
    async with running(RemoteSource(f"tierfs://127.0.0.1:{port}/", connections=1)) as source:
        assert await read_file(source, await source.publication(), name) == data


# malformed


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"TFS1" + bytes(28),
        b"TFS1\x02" + bytes(27),
        bytes(range(256)) * 10,
        m.encode(m.Ping(), request_id=0),
        m.encode(m.Hello("", bytes(32), "", ()), request_id=0)[:-1] + b"\x93",
    ],
)
def test_a_malformed_peer_is_told_and_closed_and_the_others_are_served(
    tmp_path: Path, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    data = pattern(BLOCK_BYTES + 5)
    (tmp_path / "file").write_bytes(data)

    async def main() -> None:
        async with serving(tmp_path) as served:
            for _ in range(3):
                peer = await RawPeer.connect(served.port)
                await peer.stream.send_all(garbage)
                _, message, _ = await peer.receive()
                assert isinstance(message, m.Refused) and message.code is m.Code.PROTOCOL and message.reason
                assert await peer.closed()
                await peer.stream.aclose()
            await eventually(lambda: served.server.statistics().malformed == 3)
            await whole_file_is_served(served.port, data)
            assert served.server.statistics().refused["protocol"] == 3

    with caplog.at_level(logging.WARNING):
        run(main)
    assert sum("peer_refused" in record.message for record in caplog.records) == 1, "not once per peer and reason"


@pytest.mark.parametrize(
    "request_",
    [m.Hello("", bytes(32), "", ()), m.Pong(), m.BlockData(bytes(16)), m.Proof(bytes(32))],
    ids=lambda message: type(message).__name__,
)
def test_a_message_that_is_no_request_ends_the_connection_with_an_error(tmp_path: Path, request_: m.Message) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            peer = await RawPeer.connect(served.port)
            assert isinstance(await peer.hello(), m.Welcome)
            await peer.send(request_, request_id=4)
            request_id, message, _ = await peer.receive()
            assert request_id == 0 and isinstance(message, m.Error) and message.code is m.Code.PROTOCOL
            assert await peer.closed()

    run(main)


def test_a_request_id_in_use_ends_the_connection(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")

    async def main() -> None:
        async with exporting(tmp_path) as inner:
            gated = GatedExport(inner)
            async with listening({"": gated}) as (_, port):
                version, _ = file_of(await inner.publication(), b"file")
                peer = await RawPeer.connect(port)
                await peer.hello()
                for _ in range(2):
                    await peer.send(m.ReadBlock(version, 0, 0, 1, BLOCK_BYTES), request_id=7)
                _, message, _ = await peer.receive()
                assert isinstance(message, m.Error) and "7 is in use" in message.message

    run(main)


# slow and silent


def test_one_byte_at_a_time_is_served_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")

    async def main() -> None:
        async with serving(tmp_path) as served:
            version, _ = file_of(await served.source.publication(), b"file")
            peer = await RawPeer.connect(served.port)
            for message, id_ in ((m.Hello("", bytes(32), "", ()), 0), (m.ReadBlock(version, 0, 1, 2, BLOCK_BYTES), 5)):
                for byte in m.encode(message, request_id=id_):
                    await peer.stream.send_all(bytes([byte]))
                request_id, reply, data = await peer.receive()
                assert request_id == id_
            assert isinstance(reply, m.BlockData) and data == b"bc"

    run(main)


@pytest.mark.parametrize(
    ("limits", "greeted", "first"),
    [
        (ServerLimits(handshake_s=0.1), False, b""),
        (ServerLimits(handshake_s=0.1), False, b"TFS1"),
        (ServerLimits(idle_s=0.1), True, b""),
        (ServerLimits(frame_s=0.1), True, b"TFS1"),
        (ServerLimits(frame_s=0.1), True, m.encode(m.Ping(), request_id=1) + b"TFS1"),
    ],
)
def test_a_silent_peer_is_closed_at_its_deadline(
    tmp_path: Path, limits: ServerLimits, greeted: bool, first: bytes
) -> None:
    async def main() -> None:
        async with serving(tmp_path, limits=limits) as served:
            peer = await RawPeer.connect(served.port)
            if greeted:
                await peer.hello()
            await peer.stream.send_all(first)
            if len(first) > 4:
                assert isinstance((await peer.receive())[1], m.Pong)
            assert await peer.closed()
            await eventually(lambda: served.server.statistics().connections == 0)
            assert served.server.statistics().timed_out == 1

    run(main)


def test_a_peer_that_takes_nothing_is_cut_off_and_gives_back_what_it_held(tmp_path: Path) -> None:
    data = pattern(64 * BLOCK_BYTES)
    (tmp_path / "file").write_bytes(data)

    async def main() -> None:
        async with serving(tmp_path, limits=ServerLimits(send_progress_s=0.2)) as served:
            version, _ = file_of(await served.source.publication(), b"file")
            peer = await narrow_peer(served.port)
            for block in range(32):
                await peer.send(m.ReadBlock(version, block, 0, BLOCK_BYTES, BLOCK_BYTES), request_id=block)
            await eventually(lambda: served.server.statistics().in_flight_bytes > 0)
            await eventually(lambda: served.server.statistics().connections == 0)
            assert served.server.statistics().in_flight_bytes == 0
            await whole_file_is_served(served.port, data)

    run(main)


def test_a_reset_in_mid_body_frees_everything(tmp_path: Path) -> None:
    data = pattern(64 * BLOCK_BYTES)
    (tmp_path / "file").write_bytes(data)

    async def main() -> None:
        async with serving(tmp_path) as served:
            version, _ = file_of(await served.source.publication(), b"file")
            for _ in range(5):
                peer = await narrow_peer(served.port)
                for block in range(32):
                    await peer.send(m.ReadBlock(version, block, 0, BLOCK_BYTES, BLOCK_BYTES), request_id=block)
                await peer.stream.receive_some(1000)
                reset(peer)
            await eventually(lambda: served.server.statistics().connections == 0)
            assert served.server.statistics().in_flight_bytes == 0
            outcomes = served.server.statistics().requests["read"]
            assert outcomes["lost"] >= 5 and set(outcomes) <= {"ok", "lost"}
            await whole_file_is_served(served.port, data)

    run(main)


def test_a_half_closed_peer_is_closed(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            peer = await RawPeer.connect(served.port)
            await peer.hello()
            assert isinstance(peer.stream, trio.SocketStream)
            await peer.stream.send_eof()
            assert await peer.closed()

    run(main)


def test_two_hundred_slow_peers_hold_bounded_memory_and_the_others_are_served(tmp_path: Path) -> None:
    data = pattern(16 * BLOCK_BYTES)
    (tmp_path / "file").write_bytes(data)
    limits = ServerLimits(in_flight_bytes=32 * BLOCK_BYTES, in_memory_bytes=4 * BLOCK_BYTES, patience_s=0.3)

    async def main() -> None:
        async with serving(tmp_path, limits=limits, digest=False) as served:
            version, _ = file_of(await served.source.publication(), b"file")
            before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

            async def be_slow() -> None:
                peer = await narrow_peer(served.port)
                try:
                    for block in range(16):
                        await peer.send(m.ReadBlock(version, block, 0, BLOCK_BYTES, BLOCK_BYTES), request_id=block)
                    await trio.sleep_forever()
                except (trio.BrokenResourceError, EOFError):
                    pass  # cut off

            async with trio.open_nursery() as nursery:
                for _ in range(200):
                    nursery.start_soon(be_slow)
                await eventually(lambda: served.server.statistics().accepted == 200)
                await whole_file_is_served(served.port, data)
                nursery.cancel_scope.cancel()
            statistics = served.server.statistics()
            assert statistics.most_in_flight_bytes <= limits.in_flight_bytes
            assert statistics.cut_offs > 0
            grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) * 1024
            assert grown_bytes < 100 << 20

    run(main)


# greedy


def test_many_requests_in_flight_come_back_in_any_order_each_once(tmp_path: Path) -> None:
    data = pattern(16 * BLOCK_BYTES)
    (tmp_path / "file").write_bytes(data)

    async def main() -> None:
        async with serving(tmp_path) as served:
            version, _ = file_of(await served.source.publication(), b"file")
            peer = await RawPeer.connect(served.port)
            await peer.hello()
            count = 400
            found: dict[int, bytes] = {}

            async def receive() -> None:
                for _ in range(count):
                    request_id, reply, received = await peer.receive()
                    assert isinstance(reply, m.BlockData) and request_id not in found
                    found[request_id] = received

            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive)
                for i in range(count):
                    await peer.send(m.ReadBlock(version, i % 16, i, 100, BLOCK_BYTES), request_id=i)
            for i in range(count):
                start = i % 16 * BLOCK_BYTES + i
                assert found[i] == data[start : start + 100]

    run(main)


def test_reading_stops_at_the_limit_of_requests(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)

    async def main() -> None:
        async with exporting(tmp_path) as inner:
            gated = GatedExport(inner)
            limits = ServerLimits(requests_per_connection=6, open_blocks_per_connection=3)
            async with listening({"": gated}, limits=limits) as (_, port):
                version, _ = file_of(await inner.publication(), b"file")
                peer = await RawPeer.connect(port)
                await peer.hello()
                for i in range(6):
                    await peer.send(m.ReadBlock(version, 0, 0, 100, BLOCK_BYTES), request_id=i)
                await peer.send(m.Ping(), request_id=100)
                assert isinstance((await peer.receive())[1], m.Pong)
                assert gated.waiting == 3, "not more are opened than may be"
                for i in range(6, 9):
                    await peer.send(m.ReadBlock(version, 0, 0, 100, BLOCK_BYTES), request_id=i)
                await peer.send(m.Ping(), request_id=101)
                gated.gate.set()
                order = [(await peer.receive())[0] for _ in range(10)]
                assert 101 in order and order.index(101) >= 2, "the Ping was read before there was room again"
                assert sorted(order) == [*range(9), 101]

    run(main)


def test_a_flood_of_cheap_requests_does_not_keep_the_others_from_their_turn(tmp_path: Path) -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async def main() -> None:
        nonlocal turns
        async with serving(tmp_path) as served, trio.open_nursery() as nursery:
            # As much as the socket buffers hold, before the server has seen any of it.
            sock = socket.create_connection(("127.0.0.1", served.port))
            sock.sendall(m.encode(m.Hello("", bytes(32), "", ()), request_id=0))
            sock.setblocking(False)
            cancel = m.encode(m.Cancel(), request_id=1)
            flood = memoryview(cancel * 20_000)
            sent = 0
            try:
                while sent < len(flood):
                    sent += sock.send(flood[sent:])
            except BlockingIOError:
                pass
            peer = RawPeer(trio.SocketStream(trio.socket.from_stdlib_socket(sock)))
            assert isinstance((await peer.receive())[1], m.Welcome)
            nursery.start_soon(count_turns)
            rest = bytes(flood[sent : sent + -sent % len(cancel)])
            await peer.stream.send_all(rest + m.encode(m.Ping(), request_id=2))
            assert isinstance((await peer.receive())[1], m.Pong)
            assert sent > 200_000 and turns > sent // 40_000
            nursery.cancel_scope.cancel()

    run(main)


def test_a_cancelled_request_is_answered_once_and_frees_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)

    async def main() -> None:
        async with exporting(tmp_path) as inner:
            gated = GatedExport(inner)
            async with listening({"": gated}) as (server, port):
                version, _ = file_of(await inner.publication(), b"file")
                peer = await RawPeer.connect(port)
                await peer.hello()
                await peer.send(m.ReadBlock(version, 0, 0, 100, BLOCK_BYTES), request_id=1)
                await gated.someone_waits.wait()
                assert server.statistics().running_requests == 1
                await peer.send(m.Cancel(), request_id=1)
                request_id, message, _ = await peer.receive()
                assert request_id == 1 and isinstance(message, m.Error) and message.code is m.Code.CANCELLED
                assert gated.waiting == 0 and server.statistics().in_flight_bytes == 0
                await peer.send(m.Cancel(), request_id=1)  # too late, and about nothing
                gated.gate.set()
                await peer.send(m.ReadBlock(version, 0, 0, 100, BLOCK_BYTES), request_id=1)
                assert (await peer.receive())[2] == b"x" * 100
                await eventually(lambda: server.statistics().running_requests == 0)
                assert server.statistics().requests["read"] == {"cancelled": 1, "ok": 1}
                assert sum(server.statistics().latencies["read"].counts) == 1

    run(main)


def test_a_cancel_at_any_moment_leaves_each_request_one_whole_reply(tmp_path: Path) -> None:
    data = pattern(BLOCK_BYTES)
    (tmp_path / "file").write_bytes(data)
    count = 400

    async def main() -> None:
        async with serving(tmp_path) as served:
            await eventually(lambda: served.source.statistics().digested_bytes == len(data))
            version, _ = file_of(await served.source.publication(), b"file")
            peer = await RawPeer.connect(served.port)
            await peer.hello()
            seen: list[int] = []
            whole = 0
            for i in range(count):
                await peer.send(m.ReadBlock(version, 0, 0, BLOCK_BYTES, BLOCK_BYTES), request_id=i)
                for _ in range(i % 50):
                    await trio.lowlevel.checkpoint()
                await peer.send(m.Cancel(), request_id=i)
                request_id, message, received = await peer.receive()
                seen.append(request_id)
                if isinstance(message, m.BlockData):
                    assert received == data
                    whole += 1
                else:
                    assert isinstance(message, m.Error) and message.code is m.Code.CANCELLED
            assert seen == list(range(count))
            assert 0 < whole < count, "the moments were all alike: this test tests nothing"
            await eventually(
                lambda: served.server.statistics().in_flight_bytes == 0
            )  # the last one is given up just now
            assert served.server.statistics().requests["read"] == {"ok": whole, "cancelled": count - whole}

    run(main)


def test_one_watch_at_a_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            peer = await RawPeer.connect(served.port)
            await peer.hello()
            await peer.send(m.Watch(b"", b"", 0), request_id=1)
            _, changed, _ = await peer.receive()
            assert isinstance(changed, m.Changed)
            for i in (2, 3):
                await peer.send(m.Watch(changed.boot, changed.catalog_digest, 0), request_id=i)
            request_id, message, _ = await peer.receive()
            assert request_id == 3 and isinstance(message, m.Error) and message.code is m.Code.BUSY

    run(main)


@pytest.mark.parametrize("limits", [ServerLimits(connections=2), ServerLimits(connections_per_address=2)])
@pytest.mark.parametrize("encrypted", [False, True])
def test_a_connection_too_many_is_told_so(tmp_path: Path, limits: ServerLimits, encrypted: bool) -> None:
    exported = tmp_path / "exported"
    exported.mkdir()
    server_tls, client_tls = certificate(tmp_path) if encrypted else (None, None)

    async def connect(port: int) -> RawPeer:
        peer = await RawPeer.connect(port)
        if client_tls is not None:
            peer.stream = trio.SSLStream(peer.stream, client_tls, server_hostname="127.0.0.1", https_compatible=True)
        return peer

    async def main() -> None:
        async with serving(exported, limits=limits, tls=server_tls) as served:
            peers = [await connect(served.port) for _ in range(2)]
            for peer in peers:
                assert isinstance(await peer.hello(), m.Welcome)
            third = await connect(served.port)
            message = await third.hello()
            assert isinstance(message, m.Refused) and message.code is m.Code.BUSY
            assert "2 connections already" in message.reason
            await third.stream.aclose()
            await peers[0].stream.aclose()
            await eventually(lambda: served.server.statistics().connections == 1)
            assert isinstance(await (await connect(served.port)).hello(), m.Welcome)

    run(main)


def test_a_server_out_of_descriptors_goes_on_when_there_are_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def says_so() -> int:
        return sum("accept_failed" in record.message for record in caplog.records)

    async def main() -> None:
        async with serving(tmp_path) as served:
            await served.source.publication()
            sock = socket.socket()
            peer = RawPeer(trio.SocketStream(trio.socket.from_stdlib_socket(sock)))
            taken: list[int] = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
            try:
                with pytest.raises(OSError, match="Too many open files"):
                    while True:
                        taken.append(os.dup(0))
                await peer.connect_to(served.port)
                await eventually(lambda: says_so() > 0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for fd in taken:
                    os.close(fd)
            assert isinstance(await peer.hello(), m.Welcome)
            assert says_so() == 1

    run(main)


# the export


class ShrunkExport:
    """A file that loses its second half after it was opened."""

    def __init__(self, inner: DirectorySource, path: Path, data: bytes) -> None:
        self.publication = inner.publication
        self.wait_changed = inner.wait_changed
        self._path = path
        self._data = data

    @asynccontextmanager
    async def open_block(self, version: VersionId, block: int) -> AsyncIterator[OpenBlock]:
        fd = os.open(self._path, os.O_RDONLY)
        try:
            yield BlockReading(digest_block(self._data), len(self._data), fd=fd)
        finally:
            os.close(fd)


def test_a_file_that_shrinks_while_it_is_sent_is_padded_and_does_not_pass_for_whole(tmp_path: Path) -> None:
    data = pattern(BLOCK_BYTES)
    (tmp_path / "file").write_bytes(data)

    async def main() -> None:
        async with exporting(tmp_path) as inner:
            publication = await inner.publication()
            version, _ = file_of(publication, b"file")
            with tempfile.TemporaryDirectory() as elsewhere:
                shrunk = Path(elsewhere) / "shrunk"
                shrunk.write_bytes(data[: BLOCK_BYTES // 2])
                async with listening({"": ShrunkExport(inner, shrunk, data)}) as (server, port):
                    peer = await RawPeer.connect(port)
                    await peer.hello()
                    await peer.send(m.ReadBlock(version, 0, 0, BLOCK_BYTES, BLOCK_BYTES), request_id=1)
                    _, reply, received = await peer.receive()
                    assert received == data[: BLOCK_BYTES // 2] + bytes(BLOCK_BYTES // 2)
                    assert isinstance(reply, m.BlockData) and reply.digest != digest_block(received)
                    await peer.send(m.Ping(), request_id=2)
                    assert isinstance((await peer.receive())[1], m.Pong)
                    assert server.statistics().padded_blocks == 1

    run(main)


def test_an_export_that_fails_unexpectedly_is_an_error_to_the_peer_and_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"x")

    async def main() -> None:
        async with exporting(tmp_path) as inner:
            version, _ = file_of(await inner.publication(), b"file")
            missing = ShrunkExport(inner, tmp_path / "missing", b"x")
            async with listening({"": missing}) as (server, port):
                peer = await RawPeer.connect(port)
                await peer.hello()
                for i in range(2):
                    await peer.send(m.ReadBlock(version, 0, 0, 1, BLOCK_BYTES), request_id=i)
                    _, message, _ = await peer.receive()
                    assert isinstance(message, m.Error) and message.code is m.Code.UNAVAILABLE
                await peer.send(m.ReadBlock(VersionId(bytes(16)), 0, 0, 1, BLOCK_BYTES), request_id=2)
                await peer.receive()
                await eventually(lambda: sum(server.statistics().requests["read"].values()) == 3)
                assert server.statistics().requests["read"]["failed"] >= 2

    run(main)
    assert any("request_failed" in record.message and record.exc_info for record in caplog.records)


# who may listen where


@pytest.mark.parametrize("listen", ["tcp://0.0.0.0:0", "tcp://[::]:0", "tcp://192.0.2.1:0"])
def test_an_export_without_a_token_listens_on_loopback_only(tmp_path: Path, listen: str) -> None:
    async def main() -> None:
        async with exporting(tmp_path) as source:
            exports = {"secret": source, "open": source}
            server = Server(exports, listen=["tcp://127.0.0.1:0", listen], tokens={"secret": b"t" * 32, "open": None})
            with pytest.raises(ConfigError, match=r"'open' has no token.*token file"):
                await server.run()

    run(main)


def test_an_address_in_use_is_a_clear_mistake(tmp_path: Path) -> None:
    async def main() -> None:
        async with exporting(tmp_path) as source, listening({"": source}) as (_, port):
            with pytest.raises(ConfigError, match=f"cannot listen on tcp://127.0.0.1:{port}: .*in use"):
                await Server({"": source}, listen=[f"tcp://127.0.0.1:{port}"], tokens={}).run()

    run(main)


def test_an_empty_token_is_refused(tmp_path: Path) -> None:
    source = DirectorySource(tmp_path, name="", block_bytes=BLOCK_BYTES, state_directory=None)
    with pytest.raises(ConfigError, match="token is empty"):
        Server({"": source}, listen=["tcp://127.0.0.1:0"], tokens={"": b""})


async def narrow_peer(port: int) -> RawPeer:
    """A peer that has said hello and takes little: its receive buffer is small."""
    sock = trio.socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await sock.connect(("127.0.0.1", port))
    peer = RawPeer(trio.SocketStream(sock))
    assert isinstance(await peer.hello(), m.Welcome)
    return peer


def reset(peer: RawPeer) -> None:
    assert isinstance(peer.stream, trio.SocketStream)
    peer.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.stream.socket.close()
