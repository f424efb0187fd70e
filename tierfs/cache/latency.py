"""How long reads took, by the farthest place their bytes came from: memory, hot, warm, source.

A request of the kernel is served in one or several calls of the block cache. fuse/operations.py begins a ``Request``
in the task that answers it; the cache says there which places it had to go to, and nothing where memory had the bytes.
What must hold: both cost a few microseconds at most, for every read pays them.
"""

from contextvars import ContextVar

from tierfs.blocks.histogram import Histogram

PLACES = ("memory", "hot", "warm", "source")  # nearest first
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


class Latencies:
    """Reads that were answered with bytes, since the start of the daemon; a histogram for each place."""

    def __init__(self) -> None:
        self.by_place = {place: Histogram() for place in PLACES}

    def add(self, place: str, seconds: float) -> None:
        """One more read."""
        self.by_place[place].add(seconds)
