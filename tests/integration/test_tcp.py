"""The TCP transport by itself, on real sockets."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.integration.serving import pattern, run
from tierfs.blocks.errors import SourceUnavailable
from tierfs.config.addresses import Address
from tierfs.transport import tcp


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    listener.close()
    one.setblocking(False)
    other.setblocking(False)
    yield one, other
    one.close()
    other.close()


def test_a_file_is_sent_whole_and_received_in_place(tmp_path: Path, pair: tuple[socket.socket, socket.socket]) -> None:
    data = pattern(6 << 20)
    (tmp_path / "file").write_bytes(data)
    here, there = (tcp.TcpConnection(sock, peer="peer") for sock in pair)
    received = bytearray(len(data) - 1000)

    async def main() -> None:
        fd = os.open(tmp_path / "file", os.O_RDONLY)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: there.receive_exactly_into(memoryview(received), progress_timeout_s=10))
                sent = await here.send_file(fd, 1000, len(data), progress_timeout_s=10, limiter=trio.CapacityLimiter(1))
            assert sent == len(data) - 1000, "it ends where the file ends"
        finally:
            os.close(fd)

    run(main)
    assert received == data[1000:]


def test_a_descriptor_is_not_closed_while_a_thread_sends_to_it(
    tmp_path: Path, pair: tuple[socket.socket, socket.socket]
) -> None:
    (tmp_path / "file").write_bytes(bytes(64 << 20))
    connection = tcp.TcpConnection(pair[0], peer="peer")
    number = pair[0].fileno()

    async def main() -> None:
        fd = os.open(tmp_path / "file", os.O_RDONLY)
        failed = trio.Event()

        async def send() -> None:
            with pytest.raises(SourceUnavailable, match="closed here"):
                await connection.send_file(fd, 0, 64 << 20, progress_timeout_s=10, limiter=trio.CapacityLimiter(1))
            failed.set()

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                while not connection.sending_in_thread:  # noqa: ASYNC110 - true for some milliseconds at a time
                    await trio.lowlevel.checkpoint()
                connection.close()
                os.fstat(number)  # raises if it was closed
                await failed.wait()
            with pytest.raises(OSError, match="Bad file"):
                os.fstat(number)
        finally:
            os.close(fd)

    run(main)


def test_silence_and_a_full_peer_end_at_their_deadlines(pair: tuple[socket.socket, socket.socket]) -> None:
    connection = tcp.TcpConnection(pair[0], peer="peer")

    async def main() -> None:
        with pytest.raises(SourceUnavailable, match="sent nothing for 0.05 s"):
            await connection.receive_exactly_into(memoryview(bytearray(1 << 20)), progress_timeout_s=0.05)
        with pytest.raises(SourceUnavailable, match="took nothing for 0.05 s"):
            await connection.send_all(bytes(64 << 20), progress_timeout_s=0.05)

    run(main)


def test_closing_wakes_a_receiver(pair: tuple[socket.socket, socket.socket]) -> None:
    connection = tcp.TcpConnection(pair[0], peer="peer")

    async def main() -> None:
        async with trio.open_nursery() as nursery:

            async def receive() -> None:
                with pytest.raises(SourceUnavailable, match="closed here"):
                    await connection.receive_exactly_into(memoryview(bytearray(1)), progress_timeout_s=1000)

            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            connection.close()

    run(main)


def test_a_port_where_nobody_listens_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    async def main() -> None:
        with pytest.raises(SourceUnavailable, match=f"tcp://127.0.0.1:{port} cannot be reached"):
            await tcp.connect(Address("127.0.0.1", port), timeout_s=5)

    run(main)
