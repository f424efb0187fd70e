"""Loads on their way: one per block however many readers wait, and slots that let demand go before prefetch.

A Load belongs to the cache's nursery, not to the reader that caused it: a reader that goes away changes nothing for
the others. It runs on as long as somebody waits; a prefetch nobody waits for gives up at its first trouble.
"""

from collections import deque
from dataclasses import dataclass, field

import trio

from tierfs.blocks.errors import TierfsError
from tierfs.cache.memory import BlockKey, MemoryBlock
from tierfs.policy.budget import prefetch_fetches


@dataclass(eq=False, slots=True)
class Load:
    """One block on its way into memory. ``key`` is what it is known by now: a content id may become known meanwhile."""

    key: BlockKey
    demand: bool
    done: trio.Event = field(default_factory=trio.Event)
    waiters: int = 0
    block: MemoryBlock | None = None
    error: TierfsError | None = None
    ticket: "Ticket | None" = None
    place: str = "source"  # or the tier that had it, once it is loaded
    hurry: trio.Event = field(default_factory=trio.Event)  # ends the back-off that is under way

    def join(self) -> None:
        """A reader waits from now on: the load is demand, and moves ahead of prefetches that queue for a slot."""
        self.waiters += 1
        self.hurry.set()
        self.demand = True
        if self.ticket is not None:
            self.ticket.promote()

    def leave(self) -> None:
        """That reader no longer waits."""
        self.waiters -= 1


class Ticket:
    """A place in the queue for a slot, and the slot once it is granted. The kind it was granted as stays."""

    __slots__ = ("demand", "granted", "slots")

    def __init__(self, slots: "Slots", *, demand: bool) -> None:
        self.slots = slots
        self.demand = demand
        self.granted = trio.Event()

    def promote(self) -> None:
        """Move to the demand queue, if still waiting in the other one."""
        if not self.demand and not self.granted.is_set():
            self.slots._promote(self)

    def give_back(self) -> None:
        """Leave the queue, or give the slot to the next one."""
        self.slots._give_back(self)


class Slots:
    """At most ``limit`` loads at once. Demand goes first, and one slot stays free of prefetch for the next miss."""

    def __init__(self, limit: int) -> None:
        assert limit > 0
        self.limit = limit
        self._demand: deque[Ticket] = deque()
        self._prefetch: deque[Ticket] = deque()
        self._held = 0
        self._held_prefetch = 0

    def queue(self, *, demand: bool) -> Ticket:
        """A place in the queue. Never waits, so that blocks are loaded in the order in which they were wanted."""
        ticket = Ticket(self, demand=demand)
        (self._demand if demand else self._prefetch).append(ticket)
        self._grant()
        return ticket

    def _promote(self, ticket: Ticket) -> None:
        self._prefetch.remove(ticket)
        self._demand.append(ticket)
        ticket.demand = True
        self._grant()

    def _give_back(self, ticket: Ticket) -> None:
        if ticket.granted.is_set():
            self._held -= 1
            self._held_prefetch -= not ticket.demand
            self._grant()
        else:
            (self._demand if ticket.demand else self._prefetch).remove(ticket)

    def _grant(self) -> None:
        while self._held < self.limit:
            if self._demand:
                ticket = self._demand.popleft()
            elif self._prefetch and prefetch_fetches(
                slots=self.limit,
                demand_fetches=self._held - self._held_prefetch,
                prefetch_fetches=self._held_prefetch,
            ):
                ticket = self._prefetch.popleft()
                self._held_prefetch += 1
            else:
                return
            self._held += 1
            ticket.granted.set()
