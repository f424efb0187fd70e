"""`GET /metrics` over a Unix socket or a TCP port, for Prometheus: HTTP/1.1, one request a connection, nothing else.

app/scraped.py runs it, for a mount or a server, where `metrics.listen` says so. What must hold: whoever scrapes,
however slowly and however often, costs readers at most one rendering of the page a second; a request has a size, a
connection a deadline, and there are at most a few of them. An address that cannot be had takes nothing with it: it is
told once, and tried again.
"""

import logging
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from tierfs.blocks.errors import ControlError
from tierfs.config.addresses import Address
from tierfs.transport.newcomers import Newcomers

log = logging.getLogger(__name__)

_REQUEST_BYTES_MAX = 8192
_CONNECTIONS_MAX = 8
_BACKLOG = 64  # each is taken, and closed at once if it is one too many
_DEADLINE_S = 10.0  # from the accept to the last byte sent
_FRESH_S = 1.0
_AGAIN_S = 5.0
_ACCEPT_AGAIN_S = 0.1

Page = Callable[[], bytes]


async def serve(
    where: Path | Address,
    page: Page,
    *,
    content_type: str,
    deadline_s: float = _DEADLINE_S,
    task_status: "trio.TaskStatus[Path | Address]" = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer scrapes there until cancelled. ``page`` must not wait.

    A Unix socket has mode 0660, and is removed at the end unless another one has its place.
    Started with the address in force, once it listens.
    """
    pages = _Pages(page)
    told = ""
    while True:
        try:
            listening = await _listen(where)
            break
        except (OSError, ControlError) as error:
            if str(error) != told:
                told = str(error)
                log.warning("metrics_unavailable listen=%s error=%s: trying again", where, error)
            await trio.sleep(_AGAIN_S)
    with listening, _removed(where):
        bound = Address(*listening.getsockname()[:2]) if isinstance(where, Address) else where
        log.info("metrics_listening at=%s", bound)
        limiter = trio.CapacityLimiter(_CONNECTIONS_MAX)
        newcomers = Newcomers()
        async with trio.open_nursery() as nursery:
            task_status.started(bound)
            while True:
                try:
                    connection, _ = await listening.accept()
                except OSError as error:  # no descriptor left, or the client went away
                    log.warning("metrics_accept_failed error=%s", error)
                    await trio.sleep(_ACCEPT_AGAIN_S)
                    continue
                stream = trio.SocketStream(connection)
                nursery.start_soon(_answer, stream, pages, content_type, deadline_s, limiter, newcomers)


class _Pages:
    """The page, made at most once in a while."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._made = b""
        self._made_s = float("-inf")

    def newest(self) -> bytes:
        """At most ``_FRESH_S`` old."""
        if trio.current_time() - self._made_s >= _FRESH_S:
            self._made = self._page()
            self._made_s = trio.current_time()
        return self._made


async def _listen(where: Path | Address) -> trio.socket.SocketType:
    """Raises OSError, ControlError."""
    if isinstance(where, Address):
        infos = await trio.socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = infos[0]
        listening = trio.socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            await listening.bind(address)
            listening.listen(_BACKLOG)
        except BaseException:
            listening.close()
            raise
        return listening
    await _clear(where)
    listening = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listening.fileno(), 0o660)  # from the first moment: bind takes it over
        await listening.bind(os.fspath(where))
        os.chmod(where, 0o660)  # what the umask took away
        listening.listen(_BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


@contextmanager
def _removed(where: Path | Address) -> Iterator[None]:
    """Remove the socket's file afterwards, if it is still the one that is there now."""
    if isinstance(where, Address):
        yield
        return
    ours = os.lstat(where).st_ino
    try:
        yield
    finally:
        try:
            if os.lstat(where).st_ino == ours:
                os.unlink(where)
        except OSError:
            pass


async def _clear(path: Path) -> None:
    """Remove the socket that a daemon before this one left. Raises ControlError where something else is there."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ControlError(f"{path} is there and no socket: remove it, or set metrics.listen to another path")
        with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, trio.move_on_after(_ACCEPT_AGAIN_S):
            await connection.connect(os.fspath(path))
        raise ControlError(f"another process listens on {path}: each mount and server needs a path of its own")
    except ConnectionRefusedError:
        os.unlink(path)
    except FileNotFoundError:
        pass


async def _answer(
    stream: trio.SocketStream,
    pages: _Pages,
    content_type: str,
    deadline_s: float,
    limiter: trio.CapacityLimiter,
    newcomers: Newcomers,
) -> None:
    async with stream:
        if not limiter.available_tokens and not newcomers.push_out():
            return
        await limiter.acquire_on_behalf_of(stream)
        try:
            with newcomers.arrive() as newcomer, trio.move_on_after(deadline_s):
                head = await _head(stream)
                newcomer.settle()
                await stream.send_all(_response(head, pages, content_type))
                await stream.send_eof()
                if head is None:  # closing over what was not read would take the answer back
                    for _ in range(_CONNECTIONS_MAX):
                        if not await stream.receive_some(65536):
                            break
        except trio.BrokenResourceError:
            pass  # the client went away
        except Exception as error:  # a bug in a figure must not take the process with it
            log.error("metrics_failed_by_bug error=%r", error, exc_info=error)
        finally:
            limiter.release_on_behalf_of(stream)


async def _head(stream: trio.SocketStream) -> bytes | None:
    """The request up to its empty line, or what came before the client ended; None if it is too long."""
    data = b""
    while b"\r\n\r\n" not in data:
        if len(data) > _REQUEST_BYTES_MAX:
            return None
        more = await stream.receive_some(4096)
        if not more:
            break
        data += more
    return data


def _response(head: bytes | None, pages: _Pages, content_type: str) -> bytes:
    if head is None:
        return _message("431 Request Header Fields Too Large", b"too long\n")
    line, separator, _ = head.partition(b"\r\n")
    words = line.split(b" ")
    if b"\r\n\r\n" not in head or not separator or len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return _message("400 Bad Request", b"not a request of HTTP/1.1\n")
    method, target, _ = words
    if target.partition(b"?")[0] != b"/metrics":
        return _message("404 Not Found", b"only /metrics is here\n")
    if method != b"GET":
        return _message("405 Method Not Allowed", b"only GET\n", "Allow: GET\r\n")
    return _message("200 OK", pages.newest(), content_type=content_type)


def _message(status: str, body: bytes, more: str = "", *, content_type: str = "text/plain; charset=utf-8") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}{more}Connection: close\r\n\r\n".encode() + body
