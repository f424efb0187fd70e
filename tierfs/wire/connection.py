"""What a client's connection is waiting for, and where the bytes of an arriving frame go. Pure.

The link of a remote source is its only caller. A request is *open* until its one reply has been received; an abandoned
request (cancelled or timed out) stays open with no buffer, so that its reply is drained elsewhere and its id is not
mistaken. What must hold: after abandon(), nothing here knows the caller's buffer any more.

    add -> waiting --- reply received ---> finish
               \\-- abandon -> draining --/
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from tierfs.blocks.errors import ProtocolError
from tierfs.wire.framing import Header
from tierfs.wire.messages import Type, type_name

Waiter = TypeVar("Waiter")


@dataclass(slots=True, eq=False)
class Pending(Generic[Waiter]):
    """One open request. The reply's data fills ``buffer`` exactly; without one it has at most ``data_limit_bytes``."""

    request_id: int
    reply: Type
    length_bytes: int | None  # exact length of the reply's data where it is known
    data_limit_bytes: int
    buffer: memoryview | None
    waiter: Waiter | None  # None: abandoned


class PendingRequests(Generic[Waiter]):
    """The open requests of one connection, at most ``limit``."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pending: dict[int, Pending[Waiter]] = {}
        self._next_id = 1
        self.abandoned = 0

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def full(self) -> bool:
        """Whether add() would have to refuse."""
        return len(self._pending) >= self._limit

    def add(
        self, reply: Type, waiter: Waiter, *, buffer: memoryview | None = None, data_limit_bytes: int = 0
    ) -> Pending[Waiter]:
        """Open a request; ask ``full`` first."""
        assert not self.full, "the caller looks before it asks"
        length_bytes = None if buffer is None else len(buffer)
        pending = Pending(self._next_id, reply, length_bytes, data_limit_bytes, buffer, waiter)
        self._pending[pending.request_id] = pending
        self._next_id += 1
        return pending

    def abandon(self, pending: Pending[Waiter]) -> bool:
        """Forget caller and buffer. False: the reply was complete already, there is nothing to cancel."""
        open_ = self._pending.get(pending.request_id) is pending and pending.waiter is not None
        pending.buffer = pending.waiter = None
        self.abandoned += open_
        return open_

    def match(self, header: Header) -> Pending[Waiter]:
        """The request this frame answers. Raises ProtocolError unless it is a sound reply to an open one."""
        pending = self._pending.get(header.request_id)
        if pending is None:
            raise ProtocolError(
                f"the server sent a {type_name(header.type)} for request {header.request_id}, which is not open"
            )
        if header.type == Type.ERROR:
            if header.data_bytes:
                raise ProtocolError("the server sent an Error with data")
        elif header.type != pending.reply:
            raise ProtocolError(
                f"the server sent a {type_name(header.type)} where {type_name(pending.reply)} is expected"
            )
        elif pending.length_bytes is not None and header.data_bytes != pending.length_bytes:
            raise ProtocolError(
                f"the server sent {header.data_bytes} bytes where {pending.length_bytes} were asked for"
            )
        elif pending.length_bytes is None and header.data_bytes > pending.data_limit_bytes:
            raise ProtocolError(
                f"the server sent {header.data_bytes} bytes with a {type_name(header.type)};"
                f" the limit is {pending.data_limit_bytes}"
            )
        return pending

    def finish(self, pending: Pending[Waiter]) -> Waiter | None:
        """The reply is complete; whom to tell, None if abandoned, or if the connection was given up meanwhile."""
        if self._pending.pop(pending.request_id, None) is None:
            return None
        self.abandoned -= pending.waiter is None
        waiter = pending.waiter
        pending.buffer = pending.waiter = None
        return waiter

    def close(self) -> list[Waiter]:
        """The connection is gone: every caller that still waits; no buffer is known any more."""
        waiters = [pending.waiter for pending in self._pending.values() if pending.waiter is not None]
        for pending in self._pending.values():
            pending.buffer = pending.waiter = None
        self._pending.clear()
        self.abandoned = 0
        return waiters
