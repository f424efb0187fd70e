"""One pyfuse3 session: mounting, the request loop, and the guard against its known freeze.

Under a channel there is no mount to make here: pyfuse3 reads the requests from the channel's socket, where a message
that is there stays until it is read, so that no guard is needed. The end of the socket is the end of the mount. Nor is
there one to make where somebody else has mounted and gave us the descriptor (given.py).

Without one, pyfuse3 receives from a blocking /dev/fuse with the GIL held. When a request vanishes between readiness and
read (its reader was killed), that read blocks, and with it every thread of the daemon, until another request comes. Two
guards:

1. Readiness is confirmed by a poll with zero timeout right before pyfuse3 reads, which leaves a window of
   microseconds.
2. An interval timer of the process sends SIGALRM to the main thread every quarter of a second. The blocked read ends
   with EINTR, which pyfuse3 takes as "try again". No other system call minds: Python retries them (PEP 475).

pyfuse3 keeps its session in module globals: one session per process.
"""

import errno
import logging
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyfuse3
import trio

from tierfs.blocks.errors import MountFailed
from tierfs.fuse import given
from tierfs.fuse.channel import Channel

log = logging.getLogger(__name__)

_GUARD_INTERVAL_S = 0.25
# Requests answered at once. Each reader that waits for a cold block takes a handler, and names must never wait behind
# them, so this is far more than the kernel's background limit and any number of synchronous readers to be expected.
_HANDLERS_MAX = 10_000
_HANDLERS_IDLE_MIN = 8
# What pyfuse3 ends with when the channel has closed its end; EIO is libfuse's word for a message of no bytes.
_ENDED = {errno.EIO, errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN}


class Session:
    """A mounted file system. Use: ``with Session(...) as session: await session.serve()`` on the main thread."""

    def __init__(
        self,
        operations: pyfuse3.Operations,
        mountpoint: str,
        *,
        allow_other: bool,
        channel: Channel | None = None,
        given_fd: int | None = None,
    ) -> None:
        self._operations = operations
        self._mountpoint = mountpoint
        self._channel = channel
        self._given_fd = given_fd
        self._options = {"fsname=tierfs", "subtype=tierfs", "ro", "nosuid", "nodev", "default_permissions", "noatime"}
        if allow_other:
            self._options.add("allow_other")
        logging.getLogger("pyfuse3").addFilter(_expected_reply_failures)

    def __enter__(self) -> "Session":
        try:
            channel = self._channel
            place = self._mountpoint
            if channel is not None:
                place = f"/dev/fd/{channel.fuse_fd}"
            elif self._given_fd is not None:
                given.make_blocking(self._given_fd)
                place = f"/dev/fd/{self._given_fd}"
            pyfuse3.init(self._operations, place, self._options)
        except RuntimeError as error:
            raise MountFailed(
                f"cannot mount on {self._mountpoint}: {error}; see the lines above, and check that /dev/fuse exists,"
                " that fusermount3 is installed, and, when not root, that 'user_allow_other' is in /etc/fuse.conf or"
                " mount.allow_other is false: `tierfs doctor CONFIG` does"
            ) from error
        return self

    def __exit__(self, *exception: object) -> None:
        # Lazy: readers that still hold files do not keep the mount point from going.
        pyfuse3.close(unmount=self._channel is None and self._given_fd is None)

    async def serve(self) -> None:
        """Answer requests until the mount goes away or stop() is called."""
        if self._channel is None:
            with _freeze_guard():
                await self._loop()
            return
        try:
            await self._loop()
        except* OSError as group:
            _, others = group.split(lambda error: isinstance(error, OSError) and error.errno in _ENDED)
            if others is not None:
                raise others from None
            log.info("channel_closed_its_socket")

    async def _loop(self) -> None:
        await pyfuse3.main(min_tasks=_HANDLERS_IDLE_MIN, max_tasks=_HANDLERS_MAX)

    def stop(self) -> None:
        """End serve() from another task."""
        pyfuse3.terminate()


@contextmanager
def _freeze_guard() -> Iterator[None]:
    wait_readable = trio.lowlevel.wait_readable

    polls: dict[int, select.poll] = {}

    async def confirmed_readable(descriptor: Any) -> None:
        if not isinstance(descriptor, int):  # somebody's socket; pyfuse3 passes the number of its one descriptor
            await wait_readable(descriptor)
            return
        poll = polls.get(descriptor)
        if poll is None:
            poll = polls[descriptor] = select.poll()
            poll.register(descriptor, select.POLLIN)
        await trio.lowlevel.checkpoint()
        while not poll.poll(0):
            await wait_readable(descriptor)

    def wake(signal_number: int, frame: object) -> None:
        """Interrupts a blocked read; nothing else."""

    previous = signal.signal(signal.SIGALRM, wake)
    signal.setitimer(signal.ITIMER_REAL, _GUARD_INTERVAL_S, _GUARD_INTERVAL_S)
    # pyfuse3 looks this name up at each call. Other users of trio's function get the same behaviour, only confirmed.
    trio.lowlevel.wait_readable = confirmed_readable  # type: ignore[assignment]  # pyfuse3 passes a descriptor
    try:
        yield
    finally:
        trio.lowlevel.wait_readable = wait_readable
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _expected_reply_failures(record: logging.LogRecord) -> bool:
    """Drop pyfuse3's lines about replies to readers that were killed meanwhile (ENOENT)."""
    message = record.getMessage()
    return not ("fuse_reply_* failed with" in message and "No such file or directory" in message)
