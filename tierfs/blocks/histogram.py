"""How often something took how long: what the mount's reads and the server's requests are counted in. Pure."""

from bisect import bisect_left

BOUNDS_S = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    30.0, 60.0,
)  # fmt: skip


class Histogram:
    """Counts of durations. ``counts[n]`` are those of at most ``BOUNDS_S[n]`` and more than the bound before; the last
    one is of all that are longer.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds
