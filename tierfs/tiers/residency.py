"""Residency of one device, persisted: SQLite (WAL) beside the objects; see persistence.py for when. Called by
device.py, in a thread, one call at a time.

What must hold, so that a crash costs refetches and never a wrong byte:
- filling: the data is durable before the row; synchronous=NORMAL, since a row lost to a power cut is only a refetch;
- removing: the row is durably gone (synchronous=FULL) before the file is unlinked;
- after an unclean stop (another boot id, and no clean-stop mark) no block counts as verified any more;
- an object handed out as a file is marked before; synchronous=NORMAL, since no map of it outlives a power cut;
- a stamp (mtime and ctime of the object's file after our own last write) is saved late: one that is missing or another
  than the file's only means that the next run verifies that object's blocks again.

The WAL index is kept in private memory (locking_mode=EXCLUSIVE): a shared mapping of a file on a full or vanished
device would be SIGBUS.
"""

import contextlib
import logging
import os
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tierfs.blocks.ids import ID_BYTES, BlockDigest, ObjectKey
from tierfs.blocks.spans import block_count
from tierfs.catalog.private import keep_private
from tierfs.policy.eviction import Heat

_log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID, STRICT;
CREATE TABLE IF NOT EXISTS objects (
    id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, key BLOB NOT NULL, size_bytes INTEGER NOT NULL,
    block_bytes INTEGER NOT NULL, path BLOB NOT NULL, model BLOB NOT NULL, model_bytes INTEGER NOT NULL,
    last_use_s REAL NOT NULL, mtime_ns INTEGER NOT NULL DEFAULT 0, ctime_ns INTEGER NOT NULL DEFAULT 0,
    handed_out INTEGER NOT NULL DEFAULT 0) STRICT;
CREATE TABLE IF NOT EXISTS aliases (alias BLOB PRIMARY KEY, object INTEGER NOT NULL) WITHOUT ROWID, STRICT;
CREATE INDEX IF NOT EXISTS aliases_object ON aliases (object);
CREATE TABLE IF NOT EXISTS blocks (
    object INTEGER NOT NULL, block INTEGER NOT NULL, digest BLOB NOT NULL, verified INTEGER NOT NULL,
    PRIMARY KEY (object, block)) WITHOUT ROWID, STRICT;
CREATE TABLE IF NOT EXISTS models (
    model BLOB PRIMARY KEY, loads REAL NOT NULL, counted_s REAL NOT NULL, last_use_s REAL NOT NULL
    ) WITHOUT ROWID, STRICT;
"""


# These say that the device failed, not that the database is damaged (by primary result code).
_DEVICE_ERRORS = frozenset(
    (
        sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM,
    )
)  # fmt: skip


NO_STAMP = (0, 0)


def boot_id() -> str:
    """The id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def result_code(error: sqlite3.Error) -> int:
    """The primary result code; SQLITE_ERROR for an error that did not come from the library."""
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code & 0xFF


@dataclass
class StoredObject:
    """One object as the database knows it. ``name`` names its file, ``key`` is what it is known as now."""

    name: ObjectKey
    key: ObjectKey
    size_bytes: int
    block_bytes: int
    path: bytes
    model: bytes
    model_bytes: int
    last_use_s: float
    blocks: list[tuple[int, BlockDigest]] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)  # those of `blocks` that need no other proof
    aliases: list[ObjectKey] = field(default_factory=list)
    stamp: tuple[int, int] = NO_STAMP
    handed_out: bool = False

    def sound(self) -> bool:
        """Whether the rows make sense; a damaged database may hold anything."""
        if len(self.name) != ID_BYTES or len(self.key) != ID_BYTES or self.block_bytes <= 0 or self.size_bytes <= 0:
            return False
        count = block_count(self.size_bytes, self.block_bytes)
        return all(0 <= block < count and len(digest) == ID_BYTES for block, digest in self.blocks)


@dataclass
class Stored:
    """Everything the database holds; ``unclean`` says that the blocks have just lost their `verified`."""

    objects: list[StoredObject] = field(default_factory=list)
    models: list[tuple[bytes, Heat]] = field(default_factory=list)
    unclean: bool = False
    replaced: str = ""  # where an unreadable database was moved to


class Residency:
    """The database of one device. Every method blocks; sqlite3.Error means that the device failed."""

    def __init__(self, path: Path, *, boot: str) -> None:
        self._path = path
        self._boot = boot
        self._db: sqlite3.Connection | None = None

    def open(self) -> Stored:
        """Open and read everything. A database that cannot be read is moved aside and an empty one takes its place.

        Raises sqlite3.Error when the device itself fails.
        """
        keep_private(self._path)
        try:
            return self._load()
        except sqlite3.DatabaseError as error:
            self._close()
            if result_code(error) in _DEVICE_ERRORS:
                raise
            aside = self._move_aside()
            _log.error("residency_unreadable database=%s moved_to=%s reason=%r", self._path, aside, str(error))
            keep_private(self._path)
            stored = self._load()
            stored.replaced = aside
            return stored

    def commit(self, objects: Iterable[StoredObject]) -> Collection[ObjectKey]:
        """Add these objects' blocks (durable already, from verified buffers) in one transaction.

        Returns the names of those for which there was no room: there is for all.
        """
        with self._transaction("NORMAL") as db:
            for stored in objects:
                db.execute(
                    "INSERT INTO objects (name, key, size_bytes, block_bytes, path, model, model_bytes, last_use_s)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET key = excluded.key",
                    (stored.name, stored.key, stored.size_bytes, stored.block_bytes, stored.path, stored.model,
                     stored.model_bytes, stored.last_use_s),
                )  # fmt: skip
                (number,) = db.execute("SELECT id FROM objects WHERE name = ?", (stored.name,)).fetchone()
                db.executemany(
                    "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, 1)",
                    [(number, block, digest) for block, digest in stored.blocks],
                )
                db.executemany(
                    "INSERT OR REPLACE INTO aliases VALUES (?, ?)", [(alias, number) for alias in stored.aliases]
                )
        return ()

    def remove_objects(self, names: Sequence[ObjectKey]) -> None:
        """Durably forget these objects; only then may their files be unlinked."""
        with self._transaction("FULL") as db:
            for name in names:
                for table in ("blocks", "aliases"):
                    db.execute(f"DELETE FROM {table} WHERE object IN (SELECT id FROM objects WHERE name = ?)", (name,))
                db.execute("DELETE FROM objects WHERE name = ?", (name,))

    def remove_blocks(self, name: ObjectKey, blocks: Sequence[int]) -> None:
        """Durably forget these blocks of one object."""
        with self._transaction("FULL") as db:
            db.executemany(
                "DELETE FROM blocks WHERE object = (SELECT id FROM objects WHERE name = ?) AND block = ?",
                [(name, block) for block in blocks],
            )

    def hand_out(self, name: ObjectKey) -> None:
        """Remember, across the death of this process, that somebody may map this object's file."""
        with self._transaction("NORMAL") as db:
            if db.execute("UPDATE objects SET handed_out = 1 WHERE name = ?", (name,)).rowcount != 1:
                raise sqlite3.IntegrityError(f"no object {name.hex()} in {self._path}")

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
        """What may be saved late: objects none of whose blocks counts as verified any more, blocks verified (name,
        block), keys (name, key, another alias), last uses, stamps of the files, heat.
        """
        with self._transaction("NORMAL") as db:
            db.executemany(
                "UPDATE blocks SET verified = 0 WHERE object = (SELECT id FROM objects WHERE name = ?)",
                [(name,) for name in unverified],
            )
            db.executemany(
                "UPDATE blocks SET verified = 1 WHERE object = (SELECT id FROM objects WHERE name = ?) AND block = ?",
                verified,
            )
            for name, key, alias in keys:
                db.execute("UPDATE objects SET key = ? WHERE name = ?", (key, name))
                db.execute("INSERT OR REPLACE INTO aliases SELECT ?, id FROM objects WHERE name = ?", (alias, name))
            db.executemany("UPDATE objects SET last_use_s = ? WHERE name = ?", [(when, name) for name, when in used])
            db.executemany(
                "UPDATE objects SET mtime_ns = ?, ctime_ns = ? WHERE name = ?",
                [(*stamp, name) for name, stamp in stamps],
            )
            if models is not None:
                db.execute("DELETE FROM models")
                db.executemany(
                    "INSERT INTO models VALUES (?, ?, ?, ?)",
                    [(model, heat.loads, heat.counted_s, heat.last_use_s) for model, heat in models],
                )

    def close(self, *, clean: bool) -> None:
        """Close; ``clean`` leaves the mark that nothing was cut off."""
        try:
            if clean and self._db is not None:
                with self._transaction("FULL") as db:
                    db.execute("INSERT OR REPLACE INTO meta VALUES ('clean', '1')")
        finally:
            self._close()

    @contextlib.contextmanager
    def _transaction(self, synchronous: str) -> Iterator[sqlite3.Connection]:
        db = self._db
        if db is None:
            raise sqlite3.OperationalError(f"{self._path} is closed")
        # The pragma has no effect inside a transaction, hence before it.
        db.execute(f"PRAGMA synchronous = {synchronous}")
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
            db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise

    def _load(self) -> Stored:
        db = self._db = sqlite3.connect(
            self._path, timeout=5.0, isolation_level=None, check_same_thread=False, cached_statements=64
        )
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(_SCHEMA)
        self._migrate(db)
        if db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("quick_check found damage")
        meta = dict(db.execute("SELECT name, value FROM meta").fetchall())
        stored = Stored(unclean=bool(meta) and meta.get("clean") != "1" and meta.get("boot") != self._boot)
        with self._transaction("FULL"):
            if stored.unclean:
                db.execute("UPDATE blocks SET verified = 0")
            db.execute("INSERT OR REPLACE INTO meta VALUES ('boot', ?), ('clean', '0')", (self._boot,))
        objects: dict[int, StoredObject] = {}
        for number, *columns in db.execute(
            "SELECT id, name, key, size_bytes, block_bytes, path, model, model_bytes, last_use_s, mtime_ns, ctime_ns,"
            " handed_out FROM objects"
        ):
            objects[number] = StoredObject(*columns[:-3])
            objects[number].stamp = (columns[-3], columns[-2])
            objects[number].handed_out = bool(columns[-1])
        for number, block, digest, verified in db.execute("SELECT object, block, digest, verified FROM blocks"):
            if number in objects:
                objects[number].blocks.append((block, BlockDigest(digest)))
                if verified:
                    objects[number].verified.append(block)
        for alias, number in db.execute("SELECT alias, object FROM aliases"):
            if number in objects:
                objects[number].aliases.append(ObjectKey(alias))
        stored.objects = list(objects.values())
        for model, loads, counted_s, last_use_s in db.execute("SELECT * FROM models"):
            stored.models.append((model, Heat(loads, counted_s, last_use_s)))
        return stored

    @staticmethod
    def _migrate(db: sqlite3.Connection) -> None:
        """Format 1 (see objects.py) had no handed_out: nothing was."""
        if "handed_out" not in {column for _, column, *_ in db.execute("PRAGMA table_info(objects)")}:
            db.execute("ALTER TABLE objects ADD COLUMN handed_out INTEGER NOT NULL DEFAULT 0")

    def _move_aside(self) -> str:
        # One earlier wreck is kept, not a heap of them.
        aside = self._path.with_name(self._path.name + ".corrupt")
        os.replace(self._path, aside)
        for suffix in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._path}{suffix}")
        return str(aside)

    def _close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()
