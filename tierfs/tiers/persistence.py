"""Where a device keeps its residency: asked of the medium, never pretended. Called by device.py, in a thread.

    not mapped (warm)                    SQLite beside the objects (residency.py)
    mapped, on a DAX file system         a libpmemobj pool beside the objects (pool_residency.py);
                                         SQLite where libpmemobj is not installed or a new pool finds no space
    mapped, on a tmpfs                   nowhere: the objects end with the memory
    mapped, on any other file system     SQLite

What must hold: one of the two is there at a time. What comes after the other takes over what it held where it can, and
removes it, so that nothing stale is ever believed later.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from tierfs.blocks.ids import ObjectKey
from tierfs.policy.eviction import Heat
from tierfs.tiers.pmem.library import unavailable
from tierfs.tiers.pmem.memory import maps_sync
from tierfs.tiers.pool_residency import PoolResidency
from tierfs.tiers.residency import Residency, Stored, StoredObject

_log = logging.getLogger(__name__)

Wanted = Literal["asked", "pool"]  # "pool": whatever the medium, for tests on a machine with no persistent memory
_DATABASE, _POOL = "residency.db", "residency.pool"


class PersistedResidency(Protocol):
    """What a device asks of its residency. Every method blocks and raises sqlite3.Error or OSError when the device
    fails; see residency.py for what each of them promises."""

    def open(self) -> Stored:
        """Everything that is resident."""

    def commit(self, objects: Iterable[StoredObject]) -> Collection[ObjectKey]:
        """Blocks became durable. Returns the names for which there was no room: nothing new of them is stored."""

    def remove_objects(self, names: Sequence[ObjectKey]) -> None:
        """Durably forget objects."""

    def remove_blocks(self, name: ObjectKey, blocks: Sequence[int]) -> None:
        """Durably forget blocks."""

    def hand_out(self, name: ObjectKey) -> None:
        """Somebody may map this object."""

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
        """What may be saved late."""

    def close(self, *, clean: bool) -> None:
        """Close, with the clean-stop mark or without."""


@dataclass(frozen=True)
class Persistence:
    """What was found: the opened residency, what it held, and what to tell of it."""

    residency: PersistedResidency | None
    stored: Stored
    medium: str  # pmem, tmpfs (volatile), or directory
    kind: str  # libpmemobj pool, sqlite, none
    reason: str = ""  # why it is not the pool, where one is what a mapped tier is for


def open_persistence(
    root: Path, *, mapped: bool, medium: str, wanted: Wanted, boot: str, capacity_bytes: int, block_bytes: int
) -> Persistence:
    """Choose and open. ``medium``: of the object store. Raises TierFailed, OSError, sqlite3.Error."""
    if mapped and medium == "tmpfs" and wanted == "asked":
        reason = "a tmpfs: nothing outlives the machine, and nothing is kept for the next run"
        return Persistence(None, Stored(), "tmpfs (volatile)", "none", reason)
    dax = mapped and medium != "tmpfs" and maps_sync(root)
    told = "pmem" if dax else "tmpfs (volatile)" if medium == "tmpfs" else "directory"
    if not mapped:
        return _open_database(root, boot, told, "")
    if not (dax or wanted == "pool"):
        return _open_database(root, boot, told, "no DAX file system: files cannot be mapped MAP_SYNC here")
    reason = unavailable()
    if reason:
        _log.warning("residency_not_in_a_pool path=%s reason=%r", root, reason)
        return _open_database(root, boot, told, reason)
    pool = PoolResidency(root / _POOL, boot=boot, capacity_bytes=capacity_bytes, block_bytes=block_bytes)
    try:
        stored = pool.open()
        if (root / _DATABASE).exists():
            stored = _take_over_database(root / _DATABASE, boot, pool, stored)
    except BaseException as error:
        pool.close(clean=False)
        if not isinstance(error, OSError) or error.errno != errno.ENOSPC or (root / _POOL).exists():
            raise
        # A directory that was full before it got a pool: its objects are worth more than the pool.
        reason = f"no space for a pool: {error.strerror}"
        _log.warning("residency_not_in_a_pool path=%s reason=%r", root, reason)
        return _open_database(root, boot, told, reason)
    return Persistence(pool, stored, told, "libpmemobj pool")


def _open_database(root: Path, boot: str, medium: str, reason: str) -> Persistence:
    if (root / _POOL).exists():
        # It could not be kept up to date from here on. Its objects are swept and fetched again.
        _log.warning("residency_pool_removed pool=%s reason=%r", root / _POOL, reason)
        _remove(root / _POOL)
    database = Residency(root / _DATABASE, boot=boot)
    return Persistence(database, database.open(), medium, "sqlite", reason)


def _take_over_database(path: Path, boot: str, pool: PoolResidency, stored: Stored) -> Stored:
    """An earlier run had no pool here. A pool that holds something has taken over already, and was cut off after it."""
    if not stored.objects:
        database = Residency(path, boot=boot)
        try:
            stored = database.open()
        finally:
            database.close(clean=False)
        pool.take_over(stored)
        _log.warning("residency_moved_into_pool database=%s objects=%d", path, len(stored.objects))
    for suffix in ("-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}{suffix}")
    _remove(path)
    return stored


def _remove(path: Path) -> None:
    """Durably."""
    os.unlink(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
