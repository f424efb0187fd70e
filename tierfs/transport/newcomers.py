"""Peers that hold a place and have not said yet what they want, or who they are: when all places are taken, the oldest
of them gives its own up. So nobody keeps the others out by connecting and then doing nothing, or as little as possible.

The server, the control socket and the metrics use it, on the trio thread.

    arrive ──► newcomer ── settle ──► has its place as long as it likes
                  └─── push_out, by who comes after it
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio


@dataclass(slots=True, eq=False)
class Newcomer:
    """One of them."""

    who: str
    since_s: float
    scope: trio.CancelScope
    _all: dict["Newcomer", None]

    def settle(self) -> None:
        """It has said what it wants: it is not pushed out any more."""
        self._all.pop(self, None)


class Newcomers:
    """Those of one listener. ``grace_s``: nobody is pushed out who came less than that ago."""

    def __init__(self, *, grace_s: float = 0.0) -> None:
        self._grace_s = grace_s
        self._all: dict[Newcomer, None] = {}  # oldest first
        self.pushed_out = 0

    @contextmanager
    def arrive(self, who: str = "") -> Iterator[Newcomer]:
        """For the whole life of a peer; what is inside is cancelled, and this returns, when it is pushed out."""
        newcomer = Newcomer(who, trio.current_time(), trio.CancelScope(), self._all)
        self._all[newcomer] = None
        try:
            with newcomer.scope:
                yield newcomer
        finally:
            newcomer.settle()

    def push_out(self, who: str | None = None) -> bool:
        """End the oldest one (``who``: of that name) that has had its time; whether there was one. Its place is free
        once it has run."""
        for newcomer in self._all:
            if trio.current_time() - newcomer.since_s < self._grace_s:
                return False
            if who is None or newcomer.who == who:
                newcomer.settle()
                newcomer.scope.cancel()
                self.pushed_out += 1
                return True
        return False
