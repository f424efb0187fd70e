"""Residency of one device in a libpmemobj pool, on the persistent memory that holds the objects. Called by device.py
in a thread, one call at a time, in place of the SQLite database of residency.py: the same methods, the same promises.

    commit:  records into free slots, persistent ─► one transaction sets their bits ─► resident for the next run
    remove:  one transaction clears the bits ─► the file may go ─► the slots are free again

What must hold, beside what residency.py says:
- a slot is written only while its bit is clear (pool_change.py); so an undo log holds bitmaps and 64-byte states, and
  is bounded;
- what this process remembers of the pool changes only after the commit;
- nothing is allocated in the pool after it was made. What finds no slot is refused (``commit`` says which objects),
  and the tier bypasses it and evicts something colder;
- what the pool says is taken from slots whose checksum holds; others are dropped, which costs a refetch.

A pool that is too small for what is configured now is replaced by a larger one, by rename, with all it holds.
"""

import contextlib
import errno
import heapq
import logging
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tierfs.blocks.errors import TierFailed
from tierfs.blocks.ids import BlockDigest, ObjectKey
from tierfs.policy.eviction import Heat
from tierfs.tiers.pmem.library import PmemError
from tierfs.tiers.pmem.pool import Pool
from tierfs.tiers.pool_change import Bits, Change
from tierfs.tiers.pool_layout import (
    ALIAS,
    HEADER_BYTES,
    LAYOUT_NAME,
    MARK_BYTES,
    MARK_OFFSET,
    MODEL_TEXT_BYTES,
    RECORD_BYTES,
    VERSION,
    Damaged,
    Layout,
    ObjectSlot,
    Sizes,
    State,
    pack_mark,
    pack_model,
    pack_object,
    pack_record,
    pack_state,
    record_slot,
    unpack_mark,
    unpack_model,
    unpack_object,
    unpack_record,
    version_of,
)
from tierfs.tiers.residency import Stored, StoredObject

_log = logging.getLogger(__name__)

# These say that the pool itself is no good, not that the device failed just now: another one takes its place.
_DAMAGE = frozenset((errno.EINVAL, errno.EIO))
_SAVED_AT_ONCE = 512  # states in one transaction: bounds its undo log


@dataclass
class _Known:
    """An object of the pool: its slot, its state as it was saved, and its records by block and by alias."""

    slot: int
    name: ObjectKey
    state: State
    blocks: dict[int, int] = field(default_factory=dict)
    aliases: dict[ObjectKey, int] = field(default_factory=dict)


class PoolResidency:
    """The pool of one device. Every method blocks; OSError (PmemError) means that the device failed.

    ``capacity_bytes``: of the tier, as far as this device can hold it.
    """

    def __init__(self, path: Path, *, boot: str, capacity_bytes: int, block_bytes: int) -> None:
        self._path = path
        self._boot = boot
        self._sizes = Sizes.wanted(capacity_bytes=capacity_bytes, block_bytes=block_bytes)
        self._pool: Pool | None = None

    def open(self) -> Stored:
        """Open the pool, or make it, and read everything: a scan of the pool, never of the data. One that cannot be
        read is moved aside and an empty one takes its place.

        Raises TierFailed for a pool of a newer version, OSError when the device itself fails.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._new_path)
        replaced = ""
        if self._path.exists():
            try:
                return self._load()
            except (PmemError, Damaged) as error:
                self._close()
                if isinstance(error, PmemError) and error.errno not in _DAMAGE:
                    raise
                replaced = str(self._path.with_name(self._path.name + ".corrupt"))
                os.replace(self._path, replaced)
                _log.error("residency_unreadable pool=%s moved_to=%s reason=%r", self._path, replaced, str(error))
        self._make(Stored())
        return Stored(replaced=replaced)

    def take_over(self, stored: Stored) -> None:
        """Put into this pool, empty till now, what another residency held; what finds no slot goes from ``stored``."""
        refused: set[ObjectKey] = set()
        for one in stored.objects:
            refused |= self._put([one], verified=set(one.verified))
        stored.objects = [one for one in stored.objects if one.name not in refused]
        self._save_models(stored.models)

    def commit(self, objects: Iterable[StoredObject]) -> Collection[ObjectKey]:
        """Add these objects' blocks (durable already, from verified buffers) in one transaction.

        Returns the names of those that found no slot: nothing new of them is stored.
        """
        return self._put(objects, verified=None)

    def remove_objects(self, names: Sequence[ObjectKey]) -> None:
        """Durably forget these objects; only then may their files be unlinked."""
        gone = [self._objects[name] for name in dict.fromkeys(names) if name in self._objects]
        with self._change() as change:
            for known in gone:
                change.drop(self._object_bits, known.slot)
                for record in (*known.blocks.values(), *known.aliases.values()):
                    self._drop_record(change, record)
        for known in gone:
            del self._objects[known.name]
            for alias in known.aliases:
                del self._aliases[alias]

    def remove_blocks(self, name: ObjectKey, blocks: Sequence[int]) -> None:
        """Durably forget these blocks of one object."""
        known = self._objects.get(name)
        gone = [] if known is None else [block for block in dict.fromkeys(blocks) if block in known.blocks]
        with self._change() as change:
            for block in gone:
                assert known is not None
                self._drop_record(change, known.blocks[block])
        for block in gone:
            assert known is not None
            del known.blocks[block]

    def hand_out(self, name: ObjectKey) -> None:
        """Remember, across the death of this process, that somebody may map this object's file."""
        known = self._objects.get(name)
        if known is None:
            raise PmemError(errno.EINVAL, f"no object {name.hex()} in the pool", str(self._path))
        self._save_states([(known, replace(known.state, handed_out=True))])

    def save(
        self,
        *,
        unverified: Iterable[ObjectKey] = (),
        verified: Iterable[tuple[ObjectKey, int]] = (),
        keys: Iterable[tuple[ObjectKey, ObjectKey, ObjectKey]] = (),
        used: Iterable[tuple[ObjectKey, float]] = (),
        stamps: Iterable[tuple[ObjectKey, tuple[int, int]]] = (),
        models: Iterable[tuple[bytes, Heat]] | None = None,
    ) -> None:
        """What may be saved late, in this order, so that no stamp is saved before the blocks it is about: see
        residency.py. Several transactions."""
        with self._change() as change:
            for name in unverified:
                known = self._objects.get(name)
                for record in known.blocks.values() if known is not None else ():
                    change.mark(self._verified_bits, record, False)
            for name, block in verified:
                known = self._objects.get(name)
                if known is not None and block in known.blocks:
                    change.mark(self._verified_bits, known.blocks[block], True)
        for name, key, alias in keys:
            self._save_key(name, key, alias)
        states: dict[ObjectKey, State] = {}
        for name, last_use_s in used:
            if name in self._objects:
                states[name] = replace(states.get(name, self._objects[name].state), last_use_s=last_use_s)
        for name, stamp in stamps:
            if name in self._objects:
                states[name] = replace(states.get(name, self._objects[name].state), stamp=stamp)
        self._save_states([(self._objects[name], state) for name, state in states.items()])
        if models is not None:
            self._save_models(models)

    def close(self, *, clean: bool) -> None:
        """Close; ``clean`` leaves the mark that nothing was cut off."""
        try:
            if clean and self._pool is not None:
                self._write_mark(clean=True)
        finally:
            self._close()

    # -- opening

    @property
    def _new_path(self) -> Path:
        return self._path.with_name(self._path.name + ".new")

    def _make(self, stored: Stored) -> None:
        """Make the pool under another name, fill it, and give it its name: it is whole or not there."""
        layout = Layout(self._sizes)
        self._pool = pool = Pool.create(
            self._new_path, LAYOUT_NAME, pool_bytes=layout.pool_bytes, root_bytes=layout.root_bytes
        )
        try:
            pool.write_persist(0, layout.pack_header())
            self._adopt(pool, layout)
            self.take_over(stored)
            self._write_mark(clean=False)
            os.rename(self._new_path, self._path)
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except BaseException:
            self._close()
            with contextlib.suppress(OSError):
                os.unlink(self._new_path)
            raise

    def _load(self, *, may_grow: bool = True) -> Stored:
        self._pool = pool = Pool.open(self._path, LAYOUT_NAME)
        header = pool.read(0, min(HEADER_BYTES, pool.root_bytes))
        version = version_of(header)
        if version > VERSION:
            self._close()
            raise TierFailed(
                f"residency pool {self._path} has version {version}, this tierfs knows up to {VERSION}: "
                "upgrade tierfs, or use another directory"
            )
        self._adopt(pool, Layout.from_header(header, root_bytes=pool.root_bytes))
        boot, clean = unpack_mark(pool.read(MARK_OFFSET, MARK_BYTES))
        unclean = not clean and boot != self._boot
        if unclean:
            # No undo log: until the new mark is written below, the next start would do it again.
            pool.clear_persist(self._layout.verified.bits_offset, self._layout.verified.bits_bytes)
            self._verified_bits.data[:] = bytes(len(self._verified_bits.data))
        stored = self._scan(pool)
        stored.unclean = unclean
        if may_grow and self._sizes.united(self._layout.sizes) != self._layout.sizes:
            return self._grow(stored)
        self._write_mark(clean=False)
        return stored

    def _grow(self, stored: Stored) -> Stored:
        before = self._layout.sizes
        self._sizes = self._sizes.united(before)
        self._close()
        try:
            self._make(stored)
        except OSError as error:
            _log.warning("residency_pool_too_small pool=%s objects=%d records=%d reason=%r: what finds no slot in it "
                         "bypasses this tier", self._path, before.objects, before.records, str(error))  # fmt: skip
            return self._load(may_grow=False)
        _log.info("residency_pool_grown pool=%s objects=%d records=%d", self._path, self._sizes.objects,
                  self._sizes.records)  # fmt: skip
        return stored

    def _adopt(self, pool: Pool, layout: Layout) -> None:
        self._layout = layout
        self._object_bits = Bits(layout.objects, pool)
        self._model_bits = Bits(layout.models, pool)
        self._record_bits = Bits(layout.records, pool)
        self._verified_bits = Bits(layout.verified, pool, marks=True)
        self._objects: dict[ObjectKey, _Known] = {}
        self._aliases: dict[ObjectKey, _Known] = {}
        self._models: dict[bytes, tuple[int, Heat]] = {}

    def _scan(self, pool: Pool) -> Stored:
        """Read all slots whose bit is set, and clear the bits of those that make no sense."""
        stored, change, damaged = Stored(), self._change(), 0
        by_slot: dict[int, tuple[_Known, StoredObject]] = {}
        for slot in self._object_bits:
            found = unpack_object(pool.read(self._layout.objects.slot(slot), self._layout.objects.slot_bytes))
            if found is None or found[0].name in self._objects:
                change.drop(self._object_bits, slot)
                damaged += 1
                continue
            one, state = found
            known = self._objects[one.name] = _Known(slot, one.name, state)
            by_slot[slot] = known, StoredObject(
                one.name, state.key, one.size_bytes, one.block_bytes, one.path, one.model, one.model_bytes,
                state.last_use_s, stamp=state.stamp, handed_out=state.handed_out,
            )  # fmt: skip
            stored.objects.append(by_slot[slot][1])
        for record in self._record_bits:
            data = pool.read(self._layout.records.slot(record), RECORD_BYTES)
            owner = by_slot.get(record_slot(data))
            entry = unpack_record(owner[0].name, data) if owner is not None else None
            if owner is None or entry is None or not self._note(*owner, record, *entry):
                self._drop_record(change, record)
                damaged += 1
        for slot in self._model_bits:
            model = unpack_model(pool.read(self._layout.models.slot(slot), self._layout.models.slot_bytes))
            if model is None or model[0] in self._models:
                change.drop(self._model_bits, slot)
                damaged += 1
            else:
                self._models[model[0]] = slot, model[1]
                stored.models.append(model)
        if damaged:
            with change:
                pass
            _log.error("residency_damaged pool=%s dropped_slots=%d", self._path, damaged)
        return stored

    def _note(self, known: _Known, one: StoredObject, record: int, block: int, digest: BlockDigest) -> bool:
        """A record was found; False where there is one like it already."""
        if block == ALIAS:
            alias = ObjectKey(digest)
            if alias in self._aliases:
                return False
            known.aliases[alias] = record
            self._aliases[alias] = known
            one.aliases.append(alias)
            return True
        if block in known.blocks:
            return False
        known.blocks[block] = record
        one.blocks.append((block, digest))
        if record in self._verified_bits:
            one.verified.append(block)
        return True

    # -- changing

    def _put(self, objects: Iterable[StoredObject], *, verified: Collection[int] | None) -> set[ObjectKey]:
        """Store objects in one transaction; ``verified``: which of their blocks are, None for all. Returns the names
        of those for which there was no room."""
        refused: set[ObjectKey] = set()
        staged: dict[ObjectKey, _Known] = {}
        with self._change() as change:
            for one in objects:
                assert one.name not in staged
                before = self._objects.get(one.name)
                if self._record_bits.free < len(one.blocks) or (before is None and not self._object_bits.free):
                    refused.add(one.name)
                    continue
                after = staged[one.name] = self._stage(change, one, before)
                for block, digest in one.blocks:
                    record = self._add_record(change, after, block, digest)
                    assert record is not None
                    change.mark(self._verified_bits, record, verified is None or block in verified)
                    if block in after.blocks:
                        self._drop_record(change, after.blocks[block])
                    after.blocks[block] = record
                for alias in one.aliases:
                    self._stage_alias(change, after, alias)
        for known in staged.values():
            self._settle(known)
        return refused

    def _stage(self, change: Change, one: StoredObject, before: _Known | None) -> _Known:
        if before is not None:
            after = replace(before, blocks=dict(before.blocks), aliases=dict(before.aliases))
            if before.state.key != one.key:
                after.state = replace(before.state, key=one.key)
                change.write(self._layout.state_offset(after.slot), pack_state(after.name, after.state))
            return after
        slot = change.take(self._object_bits)
        assert slot is not None
        after = _Known(slot, one.name, State(one.key, one.last_use_s, one.stamp, one.handed_out))
        identity = ObjectSlot(one.name, one.size_bytes, one.block_bytes, one.path, one.model, one.model_bytes)
        change.fill(self._layout.objects.slot(slot), pack_object(identity, after.state))
        return after

    def _stage_alias(self, change: Change, after: _Known, alias: ObjectKey) -> None:
        """One more key of that object; of another one no more. Where no record is free, the source tells it again."""
        if alias in after.aliases:
            return
        record = self._add_record(change, after, ALIAS, alias)
        if record is not None:
            after.aliases[alias] = record
            owner = self._aliases.get(alias)
            if owner is not None and owner.name != after.name:
                self._drop_record(change, owner.aliases[alias])

    def _settle(self, after: _Known) -> None:
        """The change is committed: what was staged is what is known."""
        for alias in after.aliases:
            owner = self._aliases.get(alias)
            if owner is not None and owner.name != after.name:
                del owner.aliases[alias]
            self._aliases[alias] = after
        self._objects[after.name] = after

    def _add_record(self, change: Change, known: _Known, block: int, digest: bytes) -> int | None:
        record = change.take(self._record_bits)
        if record is not None:
            change.fill(self._layout.records.slot(record), pack_record(known.name, known.slot, block, digest))
        return record

    def _drop_record(self, change: Change, record: int) -> None:
        change.drop(self._record_bits, record)
        change.mark(self._verified_bits, record, False)

    def _save_key(self, name: ObjectKey, key: ObjectKey, alias: ObjectKey) -> None:
        known = self._objects.get(name)
        if known is None:
            return
        with self._change() as change:
            after = replace(known, state=replace(known.state, key=key), aliases=dict(known.aliases))
            change.write(self._layout.state_offset(known.slot), pack_state(name, after.state))
            self._stage_alias(change, after, alias)
        self._settle(after)

    def _save_states(self, states: Iterable[tuple[_Known, State]]) -> None:
        changed = [(known, state) for known, state in states if state != known.state]
        for start in range(0, len(changed), _SAVED_AT_ONCE):
            part = changed[start : start + _SAVED_AT_ONCE]
            with self._change() as change:
                for known, state in part:
                    change.write(self._layout.state_offset(known.slot), pack_state(known.name, state))
            for known, state in part:
                known.state = state

    def _save_models(self, models: Iterable[tuple[bytes, Heat]]) -> None:
        """Exactly these, as far as there is room: the ones used last, and none with a name that is too long."""
        short = (item for item in models if len(item[0]) <= MODEL_TEXT_BYTES)
        wanted = dict(heapq.nlargest(self._layout.models.count, short, key=lambda item: item[1].last_use_s))
        after: dict[bytes, tuple[int, Heat]] = {}
        with self._change() as change:
            for model, (slot, heat) in self._models.items():
                if model not in wanted:
                    change.drop(self._model_bits, slot)
                    continue
                after[model] = slot, wanted[model]
                if heat != wanted[model]:
                    head = pack_model(model, wanted[model])[: -len(model) or None]
                    change.write(self._layout.models.slot(slot), head)
            for model in wanted.keys() - self._models.keys():
                taken = change.take(self._model_bits)
                if taken is not None:  # else the next save finds the slots that are dropped now
                    after[model] = taken, wanted[model]
                    change.fill(self._layout.models.slot(taken), pack_model(model, wanted[model]))
        self._models = after

    def _write_mark(self, *, clean: bool) -> None:
        with self._change() as change:
            change.write(MARK_OFFSET, pack_mark(self._boot, clean=clean))

    def _change(self) -> Change:
        if self._pool is None:
            raise PmemError(errno.EBADF, "the residency pool is closed", str(self._path))
        return Change(self._pool)

    def _close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
