"""Which objects leave a local tier when room is needed. Pure: the clock is an argument. Called by the local tiers.

The unit of placement is the model, the unit of eviction the whole object.

heat of a model   the number of its loads, halved every half-life.
load              opens of the model's objects until one of them is opened again, later than ``same_load_s`` after its
                  last open: shards opened one after another are one load, and so are the four opens llama.cpp makes of
                  one file, and the ranks of one job.

Rules, for room asked by an incoming model:
1. An object in use (pinned), and every object of the incoming model itself, stays. So a model larger than the tier
   keeps what it has, and its second pass hits for that.
2. Only models colder than the incoming one, or not used for a half-life, give way. A scan over many models once each
   (heat 1) displaces other such models, never one that was loaded repeatedly. And one that was loaded repeatedly
   gives way only to one hotter by more than a load. Of models loaded equally often the one that is being loaded is
   hotter by up to that much, the others' last load being longer ago: else those that do not fit together would evict
   each other in turn.
3. Coldest model first; within a model the object used longest ago first.
4. For what an operator has pinned (urgent) everything gives way that is not pinned, other objects of its own model
   too: they may be of the version it replaces.
5. Nothing is evicted in vain: if the rules cannot free what is needed, nothing goes and the incoming block bypasses.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tierfs.blocks.ids import ObjectKey

HALF_LIFE_S = 3600.0
SAME_LOAD_S = 5.0
HYSTERESIS_LOADS = 1.0
# Below this a model is as good as never loaded: ten half-lives after its last load.
FORGOTTEN_HEAT = 1 / 1024


@dataclass(frozen=True, slots=True)
class Heat:
    """The heat of one model: ``loads`` as of ``counted_s``; ``last_use_s`` is its last open."""

    loads: float
    counted_s: float
    last_use_s: float

    def at(self, now_s: float, half_life_s: float) -> float:
        """The heat now. A clock that went backwards does not heat anything up."""
        return self.loads * math.exp2(-max(0.0, now_s - self.counted_s) / half_life_s)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One object of the tier, as the policy sees it."""

    key: ObjectKey
    model: bytes
    used_bytes: int
    last_use_s: float
    pinned: bool = False


class HeatTable:
    """The heat of every model known to a tier. Not thread safe; belongs to the tier."""

    def __init__(self, *, half_life_s: float = HALF_LIFE_S, same_load_s: float = SAME_LOAD_S) -> None:
        self.half_life_s = half_life_s
        self._same_load_s = same_load_s
        self._heats: dict[bytes, Heat] = {}
        self._opened: dict[bytes, dict[ObjectKey, float]] = {}  # objects opened in the current load of a model

    def restore(self, model: bytes, heat: Heat) -> None:
        """Take over what an earlier run counted; of two records the later one counts."""
        known = self._heats.get(model)
        if known is None or known.last_use_s < heat.last_use_s:
            self._heats[model] = heat

    def touch(self, model: bytes, key: ObjectKey, now_s: float) -> None:
        """An object of that model was opened."""
        opened = self._opened.setdefault(model, {})
        heat = self._heats.get(model)
        before = opened.get(key)
        again = before is not None and now_s - before > self._same_load_s
        stale = heat is not None and now_s - heat.last_use_s > self.half_life_s
        if heat is None or again or stale or not opened:
            opened.clear()
            loads = 1.0 if heat is None else heat.at(now_s, self.half_life_s) + 1.0
            self._heats[model] = Heat(loads, now_s, now_s)
        else:
            self._heats[model] = Heat(heat.loads, heat.counted_s, now_s)
        opened[key] = now_s

    def heat(self, model: bytes, now_s: float) -> float:
        """The heat of that model now; 0.0 for one never loaded."""
        heat = self._heats.get(model)
        return 0.0 if heat is None else heat.at(now_s, self.half_life_s)

    def last_use_s(self, model: bytes) -> float:
        """When an object of that model was last opened; 0.0 for one never loaded."""
        heat = self._heats.get(model)
        return 0.0 if heat is None else heat.last_use_s

    def items(self) -> list[tuple[bytes, Heat]]:
        """Everything, for persistence."""
        return list(self._heats.items())

    def forget_cold(self, now_s: float, keep: set[bytes]) -> None:
        """Drop models that have cooled down, other than those in ``keep``: bounds the table."""
        for model, heat in list(self._heats.items()):
            if model not in keep and heat.at(now_s, self.half_life_s) < FORGOTTEN_HEAT:
                del self._heats[model]
                self._opened.pop(model, None)


def choose_victims(
    candidates: Iterable[Candidate],
    heats: HeatTable,
    *,
    needed_bytes: int,
    wanted_bytes: int,
    now_s: float,
    incoming: bytes | None = None,
    urgent: bool = False,
) -> list[Candidate]:
    """The objects to evict, in order, so that ``wanted_bytes`` become free, or as near to that as the rules allow.

    With an ``incoming`` model the answer is empty unless at least ``needed_bytes`` can be freed. Without one (the tier
    is over its high mark by itself) every object not pinned is a candidate and what can be freed is freed.
    """
    # A model that comes in without a counted load (a prefetch, `tierfs warm`) counts as being loaded now.
    limit = float("inf") if incoming is None or urgent else max(1.0, heats.heat(incoming, now_s))
    order: list[tuple[float, float, float, bytes, Candidate]] = []
    for candidate in candidates:
        if candidate.pinned or (candidate.model == incoming and not urgent) or candidate.used_bytes <= 0:
            continue
        heat = heats.heat(candidate.model, now_s)
        last_use_s = heats.last_use_s(candidate.model)
        margin = HYSTERESIS_LOADS if heat > 1.0 else 0.0
        if heat + margin < limit or now_s - last_use_s > heats.half_life_s:
            order.append((heat, last_use_s, candidate.last_use_s, candidate.key, candidate))
    order.sort(key=lambda item: item[:4])
    victims: list[Candidate] = []
    freed_bytes = 0
    for *_, candidate in order:
        if freed_bytes >= wanted_bytes:
            break
        victims.append(candidate)
        freed_bytes += candidate.used_bytes
    if incoming is not None and freed_bytes < needed_bytes:
        return []
    return victims
