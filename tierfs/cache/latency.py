"""How long reads took, by the farthest place their bytes came from: memory, hot, warm, source.

A request of the kernel is served in one or several calls of the block cache. fuse/operations.py begins a ``Request``
in the task that answers it; the cache says there which places it had to go to, and nothing where memory had the bytes.
What must hold: both cost a few microseconds at most, for every read pays them.
"""

from bisect import bisect_left
from contextvars import ContextVar

PLACES = ("memory", "hot", "warm", "source")  # nearest first
BOUNDS_S = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    30.0, 60.0,
)  # fmt: skip
_DISTANCE = {place: distance for distance, place in enumerate(PLACES)}


class Request:
    """One read that is being answered."""

    __slots__ = ("_distance",)

    def __init__(self) -> None:
        self._distance = 0

    @property
    def place(self) -> str:
        """The farthest place so far."""
        return PLACES[self._distance]

    def came_from(self, place: str) -> None:
        """Some of its bytes came from there."""
        distance = _DISTANCE[place]
        if distance > self._distance:
            self._distance = distance


_current: ContextVar[Request | None] = ContextVar("tierfs_request", default=None)


def begin() -> Request:
    """The read that this task answers from now on."""
    request = Request()
    _current.set(request)
    return request


def came_from(place: str) -> None:
    """Bytes for the read that this task answers, if it answers one, came from that place."""
    request = _current.get()
    if request is not None:
        request.came_from(place)


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


class Latencies:
    """Reads that were answered with bytes, since the start of the daemon; a histogram for each place."""

    def __init__(self) -> None:
        self.by_place = {place: Histogram() for place in PLACES}

    def add(self, place: str, seconds: float) -> None:
        """One more read."""
        self.by_place[place].add(seconds)
