"""Watermarks: between which fill levels a local tier is kept. Pure; called by the local tiers.

    0 ─────────────────────── low ──── high ─── capacity
      admit freely                │       │        never crossed; above it (a smaller one was configured) reclaim to low
                                  │       an incoming block must make room from here on …
                                  … and makes it down to here

Capacity is a hard limit. The gap between high and capacity is room for what a file system allocates beside the data;
the gap between low and high makes reclaim work in few, larger steps.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Capacity in bytes, and the two marks as parts of it. Raises ValueError unless 0 < low <= high <= 1."""

    capacity_bytes: int
    high: float = 0.95
    low: float = 0.90

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high <= 1:
            raise ValueError(f"watermarks must be 0 < low <= high <= 1, not low {self.low} and high {self.high}")
        if self.capacity_bytes < 0:
            raise ValueError(f"a capacity of {self.capacity_bytes} bytes is negative")

    @property
    def high_bytes(self) -> int:
        """Above this, reclaim."""
        return int(self.capacity_bytes * self.high)

    @property
    def low_bytes(self) -> int:
        """Reclaim down to this."""
        return int(self.capacity_bytes * self.low)

    def needed_bytes(self, used_bytes: int, incoming_bytes: int = 0) -> int:
        """How much must go before ``incoming_bytes`` may come; 0 when there is room under the high mark."""
        return max(0, used_bytes + incoming_bytes - self.high_bytes)

    def wanted_bytes(self, used_bytes: int, incoming_bytes: int = 0) -> int:
        """How much should go once anything must: down to the low mark."""
        return max(0, used_bytes + incoming_bytes - self.low_bytes)
