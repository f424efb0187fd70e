"""What enters the hot tier by being read: everything, what is loaded a second time, or what is pinned.

Memory is small; a model that is loaded once and never again should not push out one that is restarted every minute.
`tierfs warm --tier hot` brings a model in whatever the mode says, and so does `tierfs pin --tier hot`.
"""

from collections import OrderedDict
from typing import Literal

from tierfs.blocks.ids import ObjectKey

Mode = Literal["first", "second", "pinned"]

_SAME_LOAD_S = 5.0  # a loader opens one file several times within seconds (llama.cpp: four times)
_KEYS_MAX = 65536


class HotAdmission:
    """Counts loads of contents; see the head of this file."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode  # may change at any time
        self._opened: OrderedDict[ObjectKey, tuple[int, float]] = OrderedDict()  # loads, start of the last one

    def opened(self, key: ObjectKey, now_s: float) -> None:
        """A content was opened."""
        loads, since_s = self._opened.pop(key, (0, -_SAME_LOAD_S))
        if now_s - since_s >= _SAME_LOAD_S:
            loads, since_s = loads + 1, now_s
        self._opened[key] = (loads, since_s)
        if len(self._opened) > _KEYS_MAX:
            self._opened.popitem(last=False)

    def admits(self, key: ObjectKey, *, pinned: bool = False) -> bool:
        """Whether a block of that content may enter."""
        if self.mode == "second":
            return self._opened.get(key, (0, 0.0))[0] >= 2
        return self.mode == "first" or pinned
