"""The reading end of one connection: a queue pair, and the READs under way on it.

``ReadDevice`` makes it and tells it of completions. What must hold: when ``read`` has returned or raised, the device
writes to its buffer no more. That is so because a READ that has not completed takes the queue pair with it: it is
destroyed, and whatever else was under way on it fails at once (its callers fetch again another way).

    new ── connect ──► ready ── an error completion, a deadline, a cancelled READ, close() ──► gone
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from tierfs.blocks.errors import SourceUnavailable
from tierfs.transport.rdma.timing import timing_for
from tierfs.transport.rdma.verbs import FLUSHED, SUCCESS, Completion, QueuePair, Route, status_text

log = logging.getLogger(__name__)

PART_BYTES = 1 << 20  # of one READ: a device serves its queue pairs in turn, READ by READ
_CANCEL_GRACE_S = 0.2  # a READ that is nearly there need not take the others with it


@dataclass(eq=False, slots=True)
class _Transfer:
    done: trio.Event = field(default_factory=trio.Event)
    read: bool = False  # all of it, when ``done``


class ReadQueue:
    """One queue pair that reads. All of it belongs to the trio thread."""

    def __init__(
        self,
        pair: QueuePair,
        *,
        part_bytes: int,
        timeout_s: float,
        new_transfer: Callable[["ReadQueue"], int],
        destroy: Callable[["ReadQueue", QueuePair], None],
    ) -> None:
        """``new_transfer`` gives a number that no other READ of the device has; ``destroy`` ends the queue pair."""
        self._pair = pair
        self._part_bytes = part_bytes
        self._timeout_s = timeout_s
        self._new_transfer = new_transfer
        self._destroy = destroy
        self._transfers: dict[int, _Transfer] = {}
        self.number = pair.number
        self.failure: str | None = None
        self.failed_reads = 0  # READs that were under way, and waited for, when the queue pair went
        self.gone = trio.Event()

    @property
    def under_way(self) -> int:
        """READs that have not ended."""
        return len(self._transfers)

    def connect(self, route: Route, *, first_packet: int, own_first_packet: int, reads: int) -> None:
        """Make it ready. Raises SourceUnavailable; it is gone then."""
        timing = timing_for(self._timeout_s / 2)
        try:
            self._pair.ask(
                route, first_packet=first_packet, own_first_packet=own_first_packet, reads=reads, timing=timing
            )
        except OSError as error:
            self.close(f"it could not be connected: {error}")
            raise SourceUnavailable(f"RDMA: the queue pair cannot be connected: {error}") from error

    async def read(
        self, *, address: int, local_key: int, remote_address: int, remote_key: int, length_bytes: int
    ) -> None:
        """Fill local memory from remote memory. Raises SourceUnavailable; the queue is gone then.

        Cancellation waits shortly for the READ to end, and destroys the queue pair if it does not.
        """
        if self.failure is not None:
            raise SourceUnavailable(f"RDMA: {self.failure}")
        transfer = _Transfer()
        number = self._new_transfer(self)
        self._transfers[number] = transfer
        try:
            self._post(number, address, local_key, remote_address, remote_key, length_bytes)
            with trio.move_on_after(self._timeout_s):
                await transfer.done.wait()
            if not transfer.done.is_set():
                self.close(f"a READ did not end within {self._timeout_s:g} s")
        except trio.Cancelled:
            with trio.move_on_after(_CANCEL_GRACE_S, shield=True):
                await transfer.done.wait()
            if not transfer.done.is_set():
                del self._transfers[number]  # nobody waits for it
                self.close("a READ was given up")
            raise
        finally:
            self._transfers.pop(number, None)
        if not transfer.read:
            raise SourceUnavailable(f"RDMA: {self.failure}")

    def _post(
        self, number: int, address: int, local_key: int, remote_address: int, remote_key: int, length_bytes: int
    ) -> None:
        for start in range(0, length_bytes, self._part_bytes):
            part_bytes = min(self._part_bytes, length_bytes - start)
            try:
                self._pair.post_read(
                    transfer=number,
                    address=address + start,
                    local_key=local_key,
                    remote_address=remote_address + start,
                    remote_key=remote_key,
                    length_bytes=part_bytes,
                    # They complete in order: the last one says that all have.
                    signaled=start + part_bytes == length_bytes,
                )
            except OSError as error:
                self.close(str(error))
                return

    def completed(self, completion: Completion) -> None:
        """A READ of this queue has ended."""
        if completion.status == SUCCESS:
            transfer = self._transfers.pop(completion.transfer, None)
            if transfer is not None:
                transfer.read = True
                transfer.done.set()
        elif completion.status != FLUSHED or self.failure is None:
            self.close(status_text(completion.status))

    def close(self, reason: str = "closed") -> None:
        """Destroy the queue pair; everyone who waits for a READ gets SourceUnavailable. May be called again."""
        if self.failure is not None:
            return
        self.failure = reason
        self.failed_reads = len(self._transfers)
        self._destroy(self, self._pair)
        for transfer in self._transfers.values():
            transfer.done.set()
        self._transfers.clear()
        self.gone.set()
