"""Open objects within a descriptor budget: least recently used first out. Called by the local tiers,
on the trio thread.

What must hold: a descriptor that somebody uses (a thread that reads, writes or syncs) is never closed under them.
Retiring an object only marks it; the last user closes it. So a read that races an eviction ends on the old file.
What the channel was lent of an object is taken back before the object is closed, on the trio thread.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable

from tierfs.tiers.interface import Lender, LentFile
from tierfs.tiers.objects import OpenObject


class Descriptors:
    """An LRU of OpenObject by any hashable owner. ``on_idle`` is told of a retired object that its last user left."""

    def __init__(self, limit: int, *, on_idle: Callable[[OpenObject], None]) -> None:
        self._limit = limit
        self._open: OrderedDict[Hashable, OpenObject] = OrderedDict()
        self._on_idle = on_idle
        self.lender: Lender | None = None  # None: nothing is lent

    def __len__(self) -> int:
        return len(self._open)

    def borrow(self, owner: Hashable) -> OpenObject | None:
        """The open object, held until ``give_back``; None when it is not open."""
        opened = self._open.get(owner)
        if opened is not None:
            self._open.move_to_end(owner)
            opened.users += 1
        return opened

    def add(self, owner: Hashable, opened: OpenObject) -> OpenObject:
        """Take over a freshly opened object, and borrow it. If another task was faster, theirs is used."""
        known = self.borrow(owner)
        if known is not None:
            opened.close()
            return known
        opened.users += 1
        self._open[owner] = opened
        for candidate, idle in list(self._open.items()):
            if len(self._open) <= self._limit:
                break
            if idle.users == 0:
                del self._open[candidate]
                self.take_back(idle)
                idle.close()
        return opened

    def give_back(self, opened: OpenObject) -> None:
        """The counterpart of borrow and add."""
        assert opened.users > 0
        opened.users -= 1
        if opened.retired and opened.users == 0:
            self._on_idle(opened)

    def retire(self, owner: Hashable) -> OpenObject | None:
        """Forget the owner's object. The caller closes it once its users are gone: see ``on_idle``."""
        opened = self._open.pop(owner, None)
        if opened is not None:
            opened.retired = True
        return opened

    def take_back(self, opened: OpenObject) -> None:
        """An object without users is about to be closed: the channel shall close it too."""
        assert opened.users == 0
        lent, opened.lent = opened.lent, None
        if lent is not None and self.lender is not None:
            self.lender.take_back(lent)

    def owner(self, lent: LentFile) -> Hashable | None:
        """Whose open object the channel knows by this; None when it was taken back, or is about to be."""
        for owner, opened in self._open.items():
            known = opened.lent
            if known is not None and (known.slot, known.generation) == (lent.slot, lent.generation):
                return owner
        return None

    def close(self) -> None:
        """Close everything that nobody uses; what is still used is retired."""
        for owner in list(self._open):
            opened = self.retire(owner)
            if opened is not None and opened.users == 0:
                self.take_back(opened)
                opened.close()
