"""What a local tier remembers to decide placement: heat, pins, and which key belongs to which model.

Called by local.py, on the trio thread. The rules themselves are pure: policy/eviction.py and policy/watermarks.py.
Keys given here are canonical (see Index), entries are those of the index.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Set

from tierfs.blocks.ids import ObjectKey
from tierfs.policy.eviction import Candidate, HeatTable, choose_victims
from tierfs.policy.watermarks import Watermarks
from tierfs.tiers.index import Entry

_REFUSED_S = 1.0  # how long "no room for this model" is remembered; looking costs a pass over all objects
_KEYS_KNOWN = 65536  # keys whose model is remembered, so that opens of what is not here are counted


class Placement:
    """The memory behind the placement of one tier."""

    def __init__(self) -> None:
        self.heats = HeatTable()
        self._pins: dict[ObjectKey, int] = {}
        self._kept: dict[ObjectKey, int] = {}  # of these, pinned by an operator
        self._models: OrderedDict[ObjectKey, bytes] = OrderedDict()
        self._early: OrderedDict[ObjectKey, float] = OrderedDict()  # opens of keys whose model is not known yet
        self._refused: dict[bytes, float] = {}

    def pin(self, key: ObjectKey) -> None:
        """Somebody uses it."""
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: ObjectKey) -> None:
        """The counterpart of pin."""
        count = self._pins.pop(key, 0) - 1
        assert count >= 0
        if count:
            self._pins[key] = count
        self._refused.clear()

    def keep(self, key: ObjectKey) -> None:
        """An operator has pinned it."""
        self.pin(key)
        self._kept[key] = self._kept.get(key, 0) + 1
        self._refused.clear()

    def let_go(self, key: ObjectKey) -> None:
        """The counterpart of keep."""
        count = self._kept.pop(key) - 1
        if count:
            self._kept[key] = count
        self.unpin(key)

    def kept(self, key: ObjectKey) -> bool:
        """Whether an operator has pinned it."""
        return key in self._kept

    def pinned(self, key: ObjectKey) -> bool:
        """Whether somebody uses it."""
        return key in self._pins

    def touch(self, key: ObjectKey, entry: Entry | None, now_s: float) -> None:
        """The content was opened. Where its model is not known yet, that counts when its first block is offered."""
        model = entry.model if entry is not None else self._models.get(key)
        if model is not None:
            self.heats.touch(model, key, now_s)
            self._refused.clear()
            return
        self._early[key] = now_s
        if len(self._early) > _KEYS_KNOWN:
            self._early.popitem(last=False)

    def learn_model(self, key: ObjectKey, model: bytes) -> None:
        """A block of that content was offered: this is its model."""
        self._models[key] = model
        self._models.move_to_end(key)
        if len(self._models) > _KEYS_KNOWN:
            self._models.popitem(last=False)
        touched_s = self._early.pop(key, None)
        if touched_s is not None:
            self.heats.touch(model, key, touched_s)
            self._refused.clear()

    def alias(self, version: ObjectKey, content: ObjectKey) -> None:
        """What was known of the version is known of the content."""
        if version in self._pins:
            self._pins[content] = self._pins.get(content, 0) + self._pins.pop(version)
        if version in self._kept:
            self._kept[content] = self._kept.get(content, 0) + self._kept.pop(version)
        if version in self._models:
            self._models.setdefault(content, self._models.pop(version))
        if version in self._early:
            self._early.setdefault(content, self._early.pop(version))

    def room_changed(self) -> None:
        """Space was given up: what found no room may look again."""
        self._refused.clear()

    def victims(
        self,
        entries: Iterable[Entry],
        watermarks: Watermarks,
        *,
        used_bytes: int,
        cost_bytes: int,
        model: bytes | None,
        mapped: Set[bytes],
        now_s: float,
        urgent: bool = False,
    ) -> list[Entry] | None:
        """What must go before ``cost_bytes`` of that model may come; None where the rules find no room.

        ``mapped``: models that somebody is known to map: of these, what was handed out stays. ``urgent``: what comes
        was pinned by an operator.

        Without a model: what must go to get below the marks again, as far as the rules allow.
        """
        needed_bytes = watermarks.needed_bytes(used_bytes, cost_bytes)
        if not needed_bytes:
            return []
        if model is not None and not urgent and abs(now_s - self._refused.get(model, -math.inf)) < _REFUSED_S:
            return None
        by_key = {entry.key: entry for entry in entries if entry.device.evictable}
        victims = choose_victims(
            (
                Candidate(
                    key,
                    entry.model,
                    entry.allocated_bytes,
                    entry.last_use_s,
                    pinned=key in self._pins or (entry.handed_out and entry.model in mapped),
                )
                for key, entry in by_key.items()
            ),  # fmt: skip
            self.heats,
            needed_bytes=needed_bytes,
            wanted_bytes=watermarks.wanted_bytes(used_bytes, cost_bytes),
            now_s=now_s,
            incoming=model,
            urgent=urgent,
        )
        if model is not None and not victims:
            self._refused[model] = now_s
            return None
        return [by_key[victim.key] for victim in victims]
