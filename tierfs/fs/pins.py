"""What is pinned: content that stays in a tier whatever else wants room there, and is brought there when it is not.

Built by app/mount before the tiers run, told of each generation, asked by the control interface.

    pin: a path and a tier ─ follow(tree) ─► the versions at that path now ─► tier.keep
                                                    └ not resident, and pinned with ``warm`` ─► run(): mover, one by one

What must hold: a pin is durable before it counts; what is published at the path later is pinned before the version it
replaces is let go; all pins of a tier together fit under its high mark when one is made. A generation may outgrow it
later: then what came first stays, and the list says what is missing.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import trio

from tierfs.blocks.errors import ControlError, NotFound
from tierfs.blocks.ids import ObjectKey, VersionId
from tierfs.blocks.units import format_bytes
from tierfs.cache import mover
from tierfs.cache.block_cache import BlockCache, FileFacts
from tierfs.catalog.pin_store import Pin, PinStore
from tierfs.catalog.schema import Kind
from tierfs.fs.tree import Tree
from tierfs.tiers.interface import LocalTier

log = logging.getLogger(__name__)

_AGAIN_S = 30.0  # until what could not be brought is tried again
_ROUNDS = 3  # what fills a tier to its mark may find no room while blocks that are being written are counted twice
_PINS_MAX = 10_000


@dataclass(frozen=True)
class PinState:
    """One pin and how far it is fulfilled. ``kind``: file, model, directory, or empty where nothing is at the path.

    ``state``: resident, coming, missing (see ``reason``), as read (pinned without warming), absent, no tier.
    """

    pin: Pin
    kind: str
    files: int
    size_bytes: int
    resident_bytes: int
    state: str
    reason: str = ""


class Pins:
    """See the head of this file. ``pins``: what the store held."""

    def __init__(self, tiers: Sequence[LocalTier], store: PinStore, pins: Iterable[Pin] = ()) -> None:
        self._tiers = {tier.name: tier for tier in tiers}
        self._store = store
        self._files: dict[Pin, list[FileFacts]] = {pin: [] for pin in pins}
        self._held: dict[str, dict[VersionId, Pin]] = {tier.name: {} for tier in tiers}
        self._tree: Tree | None = None
        self._cache: BlockCache | None = None
        self._changing = trio.Lock()  # held while the store is written, nothing else
        self._bringing: set[Pin] = set()
        self._trouble: dict[Pin, str] = {}
        self._again_s: dict[Pin, float] = {}
        self._wake = trio.Event()

    def follow(self, tree: Tree) -> None:
        """Another generation is in place: pin what is at the paths now, and let go of what was. Never waits."""
        self._tree = tree
        for pin in self._files:
            self._files[pin] = _files_at(tree, pin.path)
        self._trouble.clear()
        self._again_s.clear()
        self._apply()
        for name, tier in self._tiers.items():
            pinned_bytes, high_bytes = self.pinned_bytes(name), tier.statistics().high_bytes
            if self._cache is not None and pinned_bytes > high_bytes:
                log.warning("pins_exceed_tier tier=%s pinned_bytes=%d room_bytes=%d", name, pinned_bytes, high_bytes)

    def is_pinned(self, version: VersionId) -> bool:
        """Whether that version is pinned, in whatever tier."""
        return any(version in held for held in self._held.values())

    def pin_of(self, tier: str, version: VersionId) -> Pin | None:
        """What pins that version in that tier."""
        return self._held.get(tier, {}).get(version)

    def pinned_bytes(self, tier: str) -> int:
        """The size of all that is pinned in that tier, resident or not; equal contents once."""
        return self._size(pin for pin in self._files if pin.tier == tier)

    def states(self, pins: Iterable[Pin] | None = None) -> list[PinState]:
        """These pins, or all, by path."""
        chosen = self._files if pins is None else pins
        return [self._state(pin) for pin in sorted(chosen, key=lambda pin: (pin.path, pin.tier))]

    async def add(self, paths: Sequence[bytes], tier_name: str, *, warm: bool) -> list[Pin]:
        """Pin these paths; durable on return. Raises NotFound, and ControlError where they do not fit: none is then."""
        assert self._tree is not None
        tier = self._tiers[tier_name]
        async with self._changing:
            new = {
                pin: _files_at(self._tree, pin.path) for pin in (Pin(_clean(path), tier_name, warm) for path in paths)
            }
            for pin in new:
                if self._tree.resolve(pin.path) is None:
                    raise NotFound(f"no such path: {_name(pin.path)}")
            replaced = {Pin(pin.path, tier_name, not warm) for pin in new}
            kept = {pin: files for pin, files in self._files.items() if pin not in replaced}
            if len(kept | new) > _PINS_MAX:
                raise ControlError(
                    f"there are {len(kept)} pins, and no more than {_PINS_MAX} are taken: pin directories"
                )
            self._check_room(tier, kept, new)
            await trio.to_thread.run_sync(self._store.replace, list(kept | new))
            # Another generation may have come meanwhile.
            self._files = {pin: _files_at(self._tree, pin.path) for pin in kept | new}
            self._apply()
        for pin in new:
            log.info("pinned path=%r tier=%s warm=%s", pin.path, pin.tier, pin.warm)
        return list(new)

    async def remove(self, paths: Sequence[bytes], tier_name: str | None) -> list[Pin]:
        """Let go of the pins of these paths; durable on return. Raises ControlError for a path that has none."""
        async with self._changing:
            gone: set[Pin] = set()
            for path in map(_clean, paths):
                found = {pin for pin in self._files if pin.path == path and tier_name in (None, pin.tier)}
                if not found:
                    raise ControlError(f"{_name(path)} is not pinned{self._holder_of(path, tier_name)}")
                gone |= found
            await trio.to_thread.run_sync(self._store.replace, [pin for pin in self._files if pin not in gone])
            self._files = {pin: files for pin, files in self._files.items() if pin not in gone}
            self._apply()
        for pin in gone:
            self._trouble.pop(pin, None)
            self._again_s.pop(pin, None)
            log.info("unpinned path=%r tier=%s", pin.path, pin.tier)
        return sorted(gone, key=lambda pin: (pin.path, pin.tier))

    async def bring(self, pins: Sequence[Pin], progress: mover.WarmProgress) -> None:
        """Bring what these pins (of one tier) lack, counting as mover.warm does. Cancelled: run() goes on with it."""
        assert self._cache is not None
        files = {file.version: file for pin in pins for file in self._files.get(pin, ())}
        progress.total_bytes = sum(file.size_bytes for file in files.values())
        self._bringing.update(pins)
        try:
            for _ in range(_ROUNDS):
                progress.done_bytes = progress.bypassed_bytes = 0
                await mover.warm(self._cache, list(files.values()), self._tiers[pins[0].tier], progress)
                if not progress.bypassed_bytes or progress.failed_bytes:
                    break
            for pin in pins:
                self._again_s[pin] = trio.current_time() + _AGAIN_S
                self._trouble[pin] = progress.trouble or (
                    f"no room for {format_bytes(progress.bypassed_bytes)}" if progress.bypassed_bytes else ""
                )
        finally:
            self._bringing.difference_update(pins)
            self._wake.set()

    async def run(self, cache: BlockCache, *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Bring what is pinned and missing, one pin after another, for ever. Cancellation keeps what was brought."""
        self._cache = cache
        task_status.started()
        while True:
            self._wake = trio.Event()
            for pin in list(self._files):
                if pin in self._files and pin.warm and pin not in self._bringing and self._is_due(pin):
                    before = self._trouble.get(pin, "")
                    await self.bring([pin], mover.WarmProgress())
                    trouble = self._trouble.get(pin, "")
                    if trouble and trouble != before:
                        log.warning("pin_incomplete path=%r tier=%s reason=%r", pin.path, pin.tier, trouble)
            with trio.move_on_after(_AGAIN_S):
                await self._wake.wait()

    def _is_due(self, pin: Pin) -> bool:
        if pin.tier not in self._tiers or trio.current_time() < self._again_s.get(pin, 0.0):
            return False
        return self._resident(pin) < sum(file.size_bytes for file in self._files[pin])

    def _apply(self) -> None:
        for name, tier in self._tiers.items():
            wanted = {file.version: pin for pin, files in self._files.items() if pin.tier == name for file in files}
            held, self._held[name] = self._held[name], wanted
            for version in wanted.keys() - held.keys():
                tier.keep(ObjectKey(version))
            for version in held.keys() - wanted.keys():
                tier.let_go(ObjectKey(version))
        self._wake.set()

    def _check_room(
        self, tier: LocalTier, kept: Mapping[Pin, list[FileFacts]], new: Mapping[Pin, list[FileFacts]]
    ) -> None:
        before = {
            self._key(file): file.size_bytes for pin, files in kept.items() if pin.tier == tier.name for file in files
        }
        added = {self._key(file): file.size_bytes for files in new.values() for file in files}
        total_bytes = sum((before | added).values())
        statistics = tier.statistics()
        if total_bytes > statistics.high_bytes:
            raise ControlError(
                f"{', '.join(_name(pin.path) for pin in new)}: {format_bytes(sum(added.values()))} do not fit: the"
                f" {tier.name} tier can keep {format_bytes(statistics.high_bytes)} (capacity"
                f" {format_bytes(statistics.capacity_bytes)}), and {format_bytes(sum(before.values()))} are pinned"
                " there already; raise its capacity, or unpin something"
            )

    def _size(self, pins: Iterable[Pin]) -> int:
        return sum({self._key(file): file.size_bytes for pin in pins for file in self._files[pin]}.values())

    def _key(self, file: FileFacts) -> ObjectKey:
        return ObjectKey(file.version) if self._cache is None else self._cache.key(file.version)

    def _resident(self, pin: Pin) -> int:
        tier = self._tiers[pin.tier]
        return sum(tier.resident_bytes(ObjectKey(file.version)) for file in self._files[pin])

    def _state(self, pin: Pin) -> PinState:
        files = self._files[pin]
        size_bytes = sum(file.size_bytes for file in files)
        resident_bytes = self._resident(pin) if pin.tier in self._tiers else 0
        kind = "" if self._tree is None else kind_of(self._tree, pin.path)
        reason = self._trouble.get(pin, "")
        if not kind:
            state = "absent"
        elif pin.tier not in self._tiers:
            state, reason = "no tier", f"this mount's configuration has no {pin.tier} tier"
        elif resident_bytes >= size_bytes:
            state, reason = "resident", ""
        elif reason and pin not in self._bringing:
            state = "missing"
        else:
            state = "coming" if pin.warm else "as read"
        return PinState(pin, kind, len(files), size_bytes, resident_bytes, state, reason)

    def _holder_of(self, path: bytes, tier_name: str | None) -> str:
        above = [
            pin
            for pin in self._files
            if (not pin.path or path.startswith(pin.path + b"/")) and tier_name in (None, pin.tier)
        ]
        return f" by itself, but with {_name(above[0].path)}" if above else "; `tierfs pin` lists what is"


def kind_of(tree: Tree, path: bytes) -> str:
    """What a path names: file, model, directory; empty where nothing is there."""
    node = tree.resolve(path)
    if node is None:
        return ""
    if node.entry.kind is Kind.FILE:
        return "file"
    place = tree.path(node)
    models = {tree.facts(file).model for file in tree.files_below(node)}
    return "model" if models == {place} else "directory"


def _files_at(tree: Tree, path: bytes) -> list[FileFacts]:
    node = tree.resolve(path)
    return [] if node is None else [tree.facts(file) for file in tree.files_below(node)]


def _clean(path: bytes) -> bytes:
    return b"/".join(part for part in path.split(b"/") if part not in (b"", b"."))


def _name(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace") or "."
