"""A relay in front of a real server, whose faults are switched while it runs.

Threads and blocking sockets, so that it shares nothing with the code it hurts. What the client sends goes through as it
is; what the server answers is cut into frames, and a fault says what becomes of each.
"""

import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tierfs.wire import messages as m
from tierfs.wire.framing import HEADER_BYTES, encode_header, parse_header


@dataclass(frozen=True)
class Answer:
    """One frame of the server."""

    type: int
    request_id: int
    body: bytes
    data: bytes

    @property
    def is_block(self) -> bool:
        """Whether it carries bytes of a block."""
        return self.type == m.Type.BLOCK_DATA and bool(self.data)

    def encoded(self, data: bytes | None = None, *, said_bytes: int | None = None) -> bytes:
        """The frame, perhaps with other data, or with a header that says another length than its data has."""
        data = self.data if data is None else data
        said_bytes = len(data) if said_bytes is None else said_bytes
        head = encode_header(
            type=self.type, request_id=self.request_id, body_bytes=len(self.body), data_bytes=said_bytes
        )
        return head + self.body + data


Fault = Callable[[socket.socket, Answer], None]


def none(client: socket.socket, answer: Answer) -> None:
    """No fault."""
    client.sendall(answer.encoded())


def slow(client: socket.socket, answer: Answer) -> None:
    """A second for each answer."""
    time.sleep(1)
    client.sendall(answer.encoded())


def trickle(client: socket.socket, answer: Answer) -> None:
    """One byte a second, of blocks."""
    frame = answer.encoded()
    if not answer.is_block:
        client.sendall(frame)
        return
    for byte in frame:
        client.sendall(bytes([byte]))
        time.sleep(1)


def reset(client: socket.socket, answer: Answer) -> None:
    """The connection is reset in the middle of a block."""
    frame = answer.encoded()
    if not answer.is_block:
        client.sendall(frame)
        return
    client.sendall(frame[: len(frame) // 2])
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def wrong_bytes(client: socket.socket, answer: Answer) -> None:
    """One bit of each block is another."""
    data = bytearray(answer.data)
    if answer.is_block:
        data[len(data) // 3] ^= 0x10
    client.sendall(answer.encoded(bytes(data)))


def short(client: socket.socket, answer: Answer) -> None:
    """Blocks end early, in frames that are whole."""
    client.sendall(answer.encoded(answer.data[:-4096] if answer.is_block else answer.data))


def long(client: socket.socket, answer: Answer) -> None:
    """Blocks have more bytes than they should, in frames that are whole."""
    client.sendall(answer.encoded(answer.data + b"\0" * 4096 if answer.is_block else answer.data))


def short_of_its_header(client: socket.socket, answer: Answer) -> None:
    """The stream is out of step: fewer bytes than the header says."""
    frame = answer.encoded()
    client.sendall(frame[:-1] if answer.is_block else frame)


def longer_than_its_header(client: socket.socket, answer: Answer) -> None:
    """The stream is out of step: more bytes than the header says."""
    client.sendall(answer.encoded() + (b"\0" if answer.is_block else b""))


class FaultProxy:
    """Listens on a port of its own and relays to the server that ``url`` names; ``close`` ends every thread."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("tierfs://").rstrip("/").rpartition(":")
        self._server = (host, int(port))
        self._listener: socket.socket | None = None
        self._port = 0
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._fault: Fault = none
        self._silent = False
        self._dead: set[socket.socket] = set()  # half-open: nothing of theirs goes on
        self._closed = False
        self.connections = 0
        self.blocks = 0
        self.up()

    @property
    def url(self) -> str:
        """What a mount connects to."""
        return f"tierfs://127.0.0.1:{self._port}"

    def suffer(self, fault: Fault) -> None:
        """Do that to each frame of the server from now on."""
        self._fault = fault

    def silence(self, silent: bool) -> None:
        """Accept, and let nothing through in either direction; what came meanwhile is lost with its connection."""
        self._silent = silent
        if not silent:
            self.cut()

    def half_open(self) -> None:
        """Connections there are go nowhere any more, without a word; new ones are fine."""
        with self._lock:
            self._dead.update(self._ends)

    def cut(self) -> None:
        """End every connection."""
        with self._lock:
            ends, self._ends = self._ends, []
        for end in ends:
            _end(end)

    def up(self) -> None:
        """Listen, at the same port as before."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        listener.listen(64)
        self._port = listener.getsockname()[1]
        self._listener = listener
        self._start(self._accept, listener)

    def down(self) -> None:
        """Refuse connections, and end those there are."""
        listener, self._listener = self._listener, None
        if listener is not None:
            _end(listener)
        self.cut()

    def close(self) -> None:
        """End everything; raises AssertionError if a thread does not."""
        self._closed = True
        self.down()
        for thread in self._threads:
            thread.join(5)
            assert not thread.is_alive(), thread.name

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, name=f"proxy {run.__name__}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._server, timeout=5)
            except OSError:
                _end(client)
                continue
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server.settimeout(None)
            self.connections += 1
            with self._lock:
                self._ends += [client, server]
            self._start(self._requests, client, server)
            self._start(self._answers, client, server)

    def _stuck(self, end: socket.socket) -> bool:
        return self._silent or end in self._dead

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while data := client.recv(1 << 16):
                if not self._stuck(client):
                    server.sendall(data)
        except OSError:
            pass
        finally:
            _end(server)

    def _answers(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while head := _exactly(server, HEADER_BYTES):
                header = parse_header(head)
                body = _exactly(server, header.body_bytes)
                data = _exactly(server, header.data_bytes)
                answer = Answer(header.type, header.request_id, body, data)
                self.blocks += answer.is_block
                if not self._stuck(client):
                    self._fault(client, answer)
        except (OSError, EOFError):
            pass
        finally:
            _end(client)


def _exactly(end: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = end.recv(min(1 << 20, length - len(data)))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _end(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits on it; close alone would not
    except OSError:
        pass
    end.close()
