"""The daemon's Unix socket: one JSON object a line. A request is {"command": name, ...arguments}; the answer is any
number of progress lines and one last line with "done": true, or "error": text.

The server side is trio; the client side is blocking, for commands. Requests are small and bounded; a client that does
not read is cut off.
"""

import contextlib
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import trio

from tierfs.blocks.errors import ControlError, TierfsError, first
from tierfs.control.registry import Record, failure
from tierfs.transport.newcomers import Newcomers

log = logging.getLogger(__name__)

_REQUEST_BYTES_MAX = 1 << 20
_REPLY_BYTES_MAX = 256 << 20  # of one line, such as the residency of a million files; a daemon taken over may go on
_CLIENTS_MAX = 64
_IDLE_S = 30.0
_ACCEPT_AGAIN_S = 0.1

Reply = dict[str, Any]
Send = Callable[[Reply], Awaitable[None]]
Handler = Callable[[Mapping[str, Any], Send], Awaitable[None]]


async def serve(
    path: Path, handlers: Mapping[str, Handler], *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED
) -> None:
    """Answer commands on a socket at ``path`` (mode 0600; nothing may be there) until cancelled."""
    listening = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listening:
        os.fchmod(listening.fileno(), 0o600)  # bind gives its file this mode (less the umask) from the first moment
        await listening.bind(os.fspath(path))
        listening.listen(16)
        limiter = trio.CapacityLimiter(_CLIENTS_MAX)
        newcomers = Newcomers()
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                try:
                    connection, _ = await listening.accept()
                except OSError as error:  # no descriptor left, or the client went away
                    log.warning("control_accept_failed error=%s", error)
                    await trio.sleep(_ACCEPT_AGAIN_S)
                    continue
                nursery.start_soon(_answer, trio.SocketStream(connection), handlers, limiter, newcomers)


async def _answer(
    stream: trio.SocketStream, handlers: Mapping[str, Handler], limiter: trio.CapacityLimiter, newcomers: Newcomers
) -> None:
    async def send(reply: Reply) -> None:
        with trio.fail_after(_IDLE_S):
            await stream.send_all(json.dumps(reply).encode() + b"\n")

    async with stream:
        if not limiter.available_tokens and not newcomers.push_out():
            return
        await limiter.acquire_on_behalf_of(stream)
        try:
            with newcomers.arrive() as newcomer:
                request = await _request(stream)
            if newcomer.scope.cancelled_caught:
                return  # somebody else wanted the place
            handler = handlers.get(str(request.get("command")))
            if handler is None:
                raise ControlError(f"unknown command {request.get('command')!r}: is the daemon an older tierfs?")
            await handler(request, send)
            await send({"done": True})
        except TierfsError as error:
            await _say(send, error)
        except (trio.BrokenResourceError, trio.TooSlowError):
            pass  # the client went away
        except ExceptionGroup as group:  # the same out of a handler's nursery
            expected = group.subgroup(TierfsError)
            if expected is not None:
                await _say(send, first(expected))
            elif group.subgroup((trio.BrokenResourceError, trio.TooSlowError)) is None:
                log.error("control_failed_by_bug error=%r", group, exc_info=group)
        except Exception as error:
            log.error("control_failed_by_bug error=%r", error, exc_info=error)
        finally:
            limiter.release_on_behalf_of(stream)


async def _say(send: Send, error: TierfsError) -> None:
    with contextlib.suppress(trio.BrokenResourceError, trio.TooSlowError):
        await send({"error": str(error)})


async def _request(stream: trio.SocketStream) -> Mapping[str, Any]:
    data = b""
    with trio.move_on_after(_IDLE_S):
        while not data.endswith(b"\n"):
            more = await stream.receive_some(65536)
            if not more or len(data) > _REQUEST_BYTES_MAX:
                raise ControlError("the request ended early or is too long")
            data += more
    try:
        request = json.loads(data)
    except ValueError as error:
        raise ControlError("the request is not a line of JSON") from error
    if not isinstance(request, dict):
        raise ControlError("the request is not a JSON object")
    return request


def ask(record: Record, command: str, *, timeout_s: float = 10.0, **arguments: Any) -> Iterator[Reply]:
    """Ask a daemon; yields its replies. Raises ControlError when it cannot be reached, refuses, or is silent."""
    if not record.alive:
        raise ControlError(
            f"the daemon of {record.mountpoint} (pid {record.pid}) is gone; `tierfs mount {record.config}"
            f" {record.mountpoint}` mounts again, `tierfs unmount {record.mountpoint}` cleans up"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(record.socket)
            connection.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")
            with connection.makefile("rb") as lines:
                while line := lines.readline(_REPLY_BYTES_MAX):
                    try:
                        reply = json.loads(line)
                    except (ValueError, RecursionError) as error:
                        raise ControlError(f"the daemon of {record.mountpoint} gave no readable answer") from error
                    if "error" in reply:
                        raise ControlError(reply["error"])
                    if reply.get("done"):
                        return
                    yield reply
        except TimeoutError as error:
            raise ControlError(
                f"the daemon of {record.mountpoint} (pid {record.pid}) did not answer in {timeout_s:g} s"
            ) from error
        except (ConnectionRefusedError, FileNotFoundError) as error:
            if not record.channel:
                raise ControlError(f"cannot ask the daemon of {record.mountpoint}: {error}") from error
            reason = failure(record)
            cause = f"; the last one could not start: {reason}" if reason else ""
            raise ControlError(
                f"{record.mountpoint} has no daemon just now: its channel (pid {record.pid}) starts another;"
                f" ask again{cause}"
            ) from error
        except OSError as error:
            raise ControlError(f"cannot ask the daemon of {record.mountpoint}: {error}") from error
    raise ControlError(f"the daemon of {record.mountpoint} closed the connection without an answer")
