"""TCP: connect, listen, and move bytes with as few copies as the kernel allows. Knows no message.

The server and the remote source are its callers, on the trio thread. Sockets are plain non-blocking ones: a receive
chooses its destination *after* the wait for bytes, in one step with the receive itself, so that a caller may take its
buffer back at any checkpoint. What must hold: every wait on the peer has a deadline on progress; a file is never read
on the trio thread; an error or a cancellation in the middle of a send leaves the stream out of step, so the connection
must be closed then; a descriptor is not closed while a thread uses it (its number could be another connection's next).
"""

import errno
import math
import os
import select
import socket
import ssl
from collections.abc import Awaitable, Callable

import trio

from tierfs.blocks.errors import AuthenticationFailed, SourceUnavailable
from tierfs.config.addresses import Address

RECEIVE_CHUNK_BYTES = 1 << 20  # between two checkpoints; about 0.2 ms of copying
SEND_CHUNK_BYTES = 512 << 10
LOW_WATER_BYTES = 512 << 10  # wake up for this much of a large transfer, not for each 64 KiB segment
LOW_WATER_FROM_BYTES = 64 << 10
POLL_SLICE_S = 1.0  # below the low-water mark no wake-up comes: look by ourselves this often
USER_TIMEOUT_MS = 30_000
# How long a thread that feeds a socket waits for room before it hands the wait back to trio. Long enough that a reader
# at full speed does not cost a thread hop per socket buffer, short enough that a slow one does not occupy the thread.
_THREAD_POLL_MS = 2
_UNLIMITED = trio.CapacityLimiter(math.inf)  # for threads that hold a token of the caller's limiter already
_CONNECTION_LOST = (errno.EPIPE, errno.ECONNRESET, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNABORTED)


class TcpConnection:
    """One connected stream. At most one task receives and one sends at any time."""

    def __init__(self, sock: socket.socket, *, peer: str) -> None:
        self._socket = sock
        self._encrypted = isinstance(sock, ssl.SSLSocket)
        self._low_water_bytes = 1
        self._closed = False
        self._in_thread = False
        self.peer = peer

    @property
    def sending_in_thread(self) -> bool:
        """Whether a thread uses the descriptor now."""
        return self._in_thread

    @property
    def local_host(self) -> str:
        """The address on this side, which the route to the peer starts from; empty once it is lost."""
        try:
            return str(self._socket.getsockname()[0])
        except OSError:
            return ""

    @property
    def peer_host(self) -> str:
        """The peer's address; empty once the connection is lost."""
        try:
            return str(self._socket.getpeername()[0])
        except OSError:
            return ""

    def close(self) -> None:
        """Close at once; a task that waits on the connection gets SourceUnavailable. May be called again."""
        if not self._closed:
            self._closed = True
            trio.lowlevel.notify_closing(self._socket)
            if self._in_thread:
                self._shutdown(socket.SHUT_RDWR)  # makes the thread return; it is closed then
            else:
                self._socket.close()

    def _close_if_asked(self) -> None:
        if self._closed:
            self._socket.close()

    def shutdown_send(self) -> None:
        """Say that nothing more will be sent (without TLS's goodbye, which could block)."""
        self._shutdown(socket.SHUT_WR)

    def _shutdown(self, how: int) -> None:
        try:
            socket.socket.shutdown(self._socket, how)
        except OSError:
            pass  # the peer was faster

    # receiving

    def receive_nowait(self, destination: memoryview) -> int | None:
        """Receive into ``destination`` what is there: how many bytes, or None if a wait is needed first.

        Raises SourceUnavailable when the peer has closed or the connection is lost.
        """
        try:
            count = self._socket.recv_into(destination)
        except (BlockingIOError, ssl.SSLWantReadError):
            return None
        except ssl.SSLWantWriteError:  # only while keys are changed: the answer goes out with the next attempt
            return None
        except (OSError, ValueError) as error:
            raise self._lost(error) from error
        if count == 0:
            raise SourceUnavailable(f"{self.peer} closed the connection")
        return count

    async def wait_receivable(self, timeout_s: float, *, wanted_bytes: int = 1) -> bool:
        """Wait until there is something to receive; False after ``timeout_s``. Cancellation leaves nothing.

        With ``wanted_bytes`` of a large transfer it may wait until a good part of them is there, and may then also
        answer True after POLL_SLICE_S: try again, there may be something.
        """
        if self._encrypted:
            wanted_bytes = 1
        low_water_bytes = 1 if wanted_bytes < LOW_WATER_FROM_BYTES else min(wanted_bytes, LOW_WATER_BYTES)
        try:
            if low_water_bytes != self._low_water_bytes:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water_bytes)
                self._low_water_bytes = low_water_bytes
            partial = low_water_bytes > 1 and timeout_s > POLL_SLICE_S
            with trio.move_on_after(POLL_SLICE_S if partial else timeout_s) as scope:
                await trio.lowlevel.wait_readable(self._socket)
        except (OSError, ValueError, trio.ClosedResourceError) as error:
            raise self._lost(error) from error
        return low_water_bytes > 1 or not scope.cancelled_caught

    async def receive_exactly_into(self, destination: memoryview, *, progress_timeout_s: float) -> None:
        """Fill ``destination``. Raises SourceUnavailable: closed, lost, or no byte for ``progress_timeout_s``.

        Cancellation: some bytes are taken from the stream and lost, so the connection must be closed; nothing is
        written to ``destination`` afterwards.
        """
        done = 0
        since_checkpoint = 0
        last_progress_s = trio.current_time()
        while done < len(destination):
            count = self.receive_nowait(destination[done : done + RECEIVE_CHUNK_BYTES])
            if count is not None:
                done += count
                since_checkpoint += count
                last_progress_s = trio.current_time()
                if since_checkpoint >= RECEIVE_CHUNK_BYTES:
                    since_checkpoint = 0
                    await trio.lowlevel.checkpoint()
                continue
            since_checkpoint = 0
            left_s = last_progress_s + progress_timeout_s - trio.current_time()
            if left_s <= 0 or not await self.wait_receivable(left_s, wanted_bytes=len(destination) - done):
                raise SourceUnavailable(f"{self.peer} sent nothing for {progress_timeout_s:g} s")

    # sending

    async def send_all(
        self, *buffers: bytes | bytearray | memoryview, progress_timeout_s: float, more: bool = False
    ) -> None:
        """Send all of these in order. ``more``: file data follows at once, do not send a small packet for this.

        Raises SourceUnavailable: lost, or the peer took nothing for ``progress_timeout_s``.
        """
        flags = socket.MSG_MORE if more and not self._encrypted else 0
        for buffer in buffers:
            view = memoryview(buffer)
            while view:
                count = self._send_nowait(view[:SEND_CHUNK_BYTES], flags)
                if count is None:
                    await self._wait_sendable(progress_timeout_s)
                    continue
                view = view[count:]
                if view:
                    await trio.lowlevel.checkpoint()

    def send_nowait(self, data: bytes) -> int:
        """Send what the socket takes at once: how many bytes (0: none just now). Raises SourceUnavailable: lost."""
        return self._send_nowait(memoryview(data), 0) or 0

    async def send_file(
        self, fd: int, offset_bytes: int, length_bytes: int, *, progress_timeout_s: float, limiter: trio.CapacityLimiter
    ) -> int:
        """Send part of a file from the page cache, without a copy through Python; how many bytes were sent.

        Fewer than asked: the file ended or could not be read there; the caller decides how to go on. Disk waits happen
        in a thread of ``limiter``, waits for the peer on trio. Raises SourceUnavailable like send_all. Cancellation
        waits for the thread (bounded by the disk), which uses ``fd`` no more afterwards.
        """
        if self._encrypted:
            return await self._send_file_copied(fd, offset_bytes, length_bytes, progress_timeout_s, limiter)
        sent = 0
        while sent < length_bytes:
            count, end, error = await self._send_file_in_thread(fd, offset_bytes + sent, length_bytes - sent, limiter)
            sent += count
            if error is not None:
                if error.errno in _CONNECTION_LOST or error.errno == errno.EBADF:
                    raise self._lost(error) from error
                if error.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):  # this file system has no sendfile
                    return sent + await self._send_file_copied(
                        fd, offset_bytes + sent, length_bytes - sent, progress_timeout_s, limiter
                    )
                return sent
            if end:
                return sent
            if sent < length_bytes:
                await self._wait_sendable(progress_timeout_s)
        return sent

    async def _send_file_in_thread(
        self, fd: int, offset_bytes: int, length_bytes: int, limiter: trio.CapacityLimiter
    ) -> tuple[int, bool, OSError | None]:
        async with limiter:
            if self._closed:  # while we waited for our turn
                raise self._lost(ConnectionAbortedError())
            self._in_thread = True
            try:
                return await trio.to_thread.run_sync(
                    _sendfile_until_blocked, self._socket.fileno(), fd, offset_bytes, length_bytes, limiter=_UNLIMITED
                )
            finally:
                self._in_thread = False
                self._close_if_asked()

    async def _send_file_copied(
        self, fd: int, offset_bytes: int, length_bytes: int, progress_timeout_s: float, limiter: trio.CapacityLimiter
    ) -> int:
        sent = 0
        while sent < length_bytes:
            want = min(SEND_CHUNK_BYTES, length_bytes - sent)
            try:
                piece = await trio.to_thread.run_sync(os.pread, fd, want, offset_bytes + sent, limiter=limiter)
            except OSError:
                return sent
            if not piece:
                return sent
            await self.send_all(piece, progress_timeout_s=progress_timeout_s)
            sent += len(piece)
        return sent

    def _send_nowait(self, view: memoryview, flags: int) -> int | None:
        try:
            # An SSLSocket must be offered the same bytes again after it asked for a wait; send_all does that.
            return self._socket.send(view, flags) if flags else self._socket.send(view)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return None
        except (OSError, ValueError) as error:
            raise self._lost(error) from error

    async def _wait_sendable(self, timeout_s: float) -> None:
        with trio.move_on_after(timeout_s) as scope:
            try:
                await trio.lowlevel.wait_writable(self._socket)
            except (OSError, ValueError, trio.ClosedResourceError) as error:
                raise self._lost(error) from error
        if scope.cancelled_caught:
            raise SourceUnavailable(f"{self.peer} took nothing for {timeout_s:g} s")

    def _lost(self, error: Exception) -> SourceUnavailable:
        reason = "closed here" if self._closed else error
        return SourceUnavailable(f"connection with {self.peer} lost: {reason}")


async def connect(
    address: Address,
    *,
    timeout_s: float,
    tls: ssl.SSLContext | None = None,
    server_name: str | None = None,
    turn: int = 0,
) -> TcpConnection:
    """Connect to the first address of the host that answers, beginning with number ``turn`` (modulo their number) of
    those of the first one's family. Raises SourceUnavailable or, for a certificate that is
    not trusted, AuthenticationFailed. Cancellation leaves no socket."""
    failure: Exception | None = None
    with trio.move_on_after(timeout_s) as scope:
        try:
            found = await trio.socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise SourceUnavailable(f"{address}: the name cannot be resolved: {error}") from error
        if turn:
            alike = [one for one in found if one[0] == found[0][0]]
            first = turn % len(alike)
            found = alike[first:] + alike[:first] + [one for one in found if one not in alike]
        for index, (family, kind, protocol, _, where) in enumerate(found):
            share_s = (scope.deadline - trio.current_time()) / (len(found) - index)
            try:
                sock = socket.socket(family, kind, protocol)
            except OSError as error:  # no descriptor left, or an address family that is switched off
                failure = error
                continue
            try:
                with trio.move_on_after(share_s) as share:
                    sock.setblocking(False)
                    _tune(sock)
                    await _connect_socket(sock, where)
                    sock = await _start_tls(sock, tls, server_side=False, server_name=server_name or address.host)
                    return TcpConnection(sock, peer=str(address))
                if share.cancelled_caught:
                    failure = TimeoutError(f"no answer within {share_s:.1f} s")
            except ssl.SSLCertVerificationError as error:
                raise AuthenticationFailed(
                    f"{address}: its certificate is not trusted: {error.verify_message}"
                ) from error
            except OSError as error:
                failure = error
            except BaseException:
                sock.close()
                raise
            sock.close()
    raise SourceUnavailable(f"{address} cannot be reached: {failure or 'no answer in time'}") from failure


async def resolve(address: Address) -> list[Address]:
    """The literal addresses of a host, to listen on. Raises OSError."""
    found = await trio.socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys(Address(str(where[0]), int(where[1])) for *_, where in found))


def listen(address: Address, *, backlog: int = 256) -> socket.socket:
    """A listening socket on a literal address. Raises OSError."""
    sock = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address.host, address.port))
        sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return sock


async def accept(listener: socket.socket) -> tuple[socket.socket, str]:
    """The next connection, tuned, and the peer's host. Raises OSError (EMFILE among others)."""
    while True:
        await trio.lowlevel.checkpoint()
        try:
            sock, where = listener.accept()
        except BlockingIOError:
            await trio.lowlevel.wait_readable(listener)
            continue
        except ConnectionAbortedError:
            continue
        sock.setblocking(False)
        try:
            _tune(sock)
        except OSError:  # gone already
            sock.close()
            continue
        return sock, str(where[0])


async def start_server_tls(sock: socket.socket, tls: ssl.SSLContext | None) -> socket.socket:
    """The server's TLS handshake; without a context the socket itself. Raises OSError; the caller sets the deadline."""
    return await _start_tls(sock, tls, server_side=True, server_name=None)


def _tune(sock: socket.socket) -> None:
    # Buffer sizes are left to the kernel: setting them switches its autotuning off, and rmem_max is often below what
    # autotuning reaches.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


async def _connect_socket(sock: socket.socket, where: tuple[object, ...]) -> None:
    try:
        sock.connect(where)
    except BlockingIOError:
        await trio.lowlevel.wait_writable(sock)
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error)) from None


async def _start_tls(
    sock: socket.socket, tls: ssl.SSLContext | None, *, server_side: bool, server_name: str | None
) -> socket.socket:
    if tls is None:
        return sock
    wrapped = tls.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False, server_hostname=server_name)
    try:
        while True:
            wait: Callable[[socket.socket], Awaitable[None]]
            try:
                wrapped.do_handshake()
                return wrapped
            except ssl.SSLWantReadError:
                wait = trio.lowlevel.wait_readable
            except ssl.SSLWantWriteError:
                wait = trio.lowlevel.wait_writable
            await wait(wrapped)
    except BaseException:
        wrapped.close()  # wrapping took the descriptor over
        raise


def _sendfile_until_blocked(
    socket_fd: int, file_fd: int, offset_bytes: int, length_bytes: int
) -> tuple[int, bool, OSError | None]:
    """In a thread: bytes sent, whether the file ended, and what failed. Returns when the socket stays full."""
    sent = 0
    room = select.poll()
    room.register(socket_fd, select.POLLOUT)
    try:
        while sent < length_bytes:
            try:
                count = os.sendfile(socket_fd, file_fd, offset_bytes + sent, length_bytes - sent)
            except BlockingIOError:
                if not room.poll(_THREAD_POLL_MS):
                    return sent, False, None
                continue
            if count == 0:
                return sent, True, None
            sent += count
    except OSError as error:
        return sent, False, error
    return sent, False, None
