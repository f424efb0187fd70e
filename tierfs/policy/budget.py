"""The one prefetch budget of the daemon: how many blocks prefetch may take now, so that demand never waits for it.

The prefetcher asks before it starts a block. Pure arithmetic over counts the cache has at hand; nothing is remembered.

      0                                                             pool_blocks
      ├── demand ──┼── prefetched, unread or on its way ──┼── free ──┼─ reserve ─┤
                   └───────────── at most share × pool ──────────────┘

What must hold: prefetch never takes the last ``reserve`` blocks that demand left, never more than its share of the
pool. The pool may be all demand's; prefetch then gets nothing. Streams take turns in the prefetcher.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig:
    """Prefetch may hold at most ``share_percent`` of the pool; ``reserve_percent`` of it stays free for demand."""

    share_percent: int = 75
    reserve_percent: int = 12

    def __post_init__(self) -> None:
        assert 0 <= self.share_percent <= 100
        assert 0 <= self.reserve_percent <= 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The pool as it is now. ``unread_blocks`` counts prefetched blocks nobody read yet and those on their way."""

    pool_blocks: int
    demand_blocks: int
    unread_blocks: int

    def __post_init__(self) -> None:
        assert min(self.pool_blocks, self.demand_blocks, self.unread_blocks) >= 0


def _room(config: BudgetConfig, usage: Usage) -> int:
    """What prefetch may hold in all, beside this demand."""
    share = usage.pool_blocks * config.share_percent // 100
    # Rounded up: even a pool of a few blocks keeps one for demand.
    reserve = -(-usage.pool_blocks * config.reserve_percent // 100)
    return max(0, min(share, usage.pool_blocks - usage.demand_blocks - reserve))


def prefetch_blocks(config: BudgetConfig, usage: Usage) -> int:
    """How many more blocks prefetch may take now, for all streams together; 0 when there is no room."""
    return max(0, _room(config, usage) - usage.unread_blocks)


def prefetch_fetches(*, slots: int, demand_fetches: int, prefetch_fetches: int) -> int:
    """How many prefetches may start now at a source that carries ``slots`` fetches at once.

    One slot stays free for the next miss, and demand under way takes its slots away from prefetch. A source with a
    single slot prefetches while no demand is under way.
    """
    assert slots >= 1 and demand_fetches >= 0 and prefetch_fetches >= 0
    kept = 1 if slots > 1 else 0
    return max(0, slots - kept - demand_fetches - prefetch_fetches)


class RateBudget:
    """How fast prefetch may go: ``bytes_per_s`` on average, up to a second's worth at once. Demand is not counted."""

    def __init__(self, bytes_per_s: int) -> None:
        assert bytes_per_s > 0
        self._bytes_per_s = bytes_per_s
        self._left_bytes = float(bytes_per_s)
        self._counted_s = -math.inf

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next block may start; 0 when it may now. A block may be larger than what is left."""
        elapsed_s = min(1.0, max(0.0, now_s - self._counted_s))
        self._left_bytes = min(float(self._bytes_per_s), self._left_bytes + elapsed_s * self._bytes_per_s)
        self._counted_s = now_s
        return 0.0 if self._left_bytes > 0 else (1 - self._left_bytes) / self._bytes_per_s

    def take(self, length_bytes: int) -> None:
        """A block of that length was started."""
        self._left_bytes -= length_bytes
