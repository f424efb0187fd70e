"""Block digests remembered across restarts, in one SQLite file per export outside the export.

The directory source is the only caller, from one thread at a time; everything here blocks.

A row is believed only if path, inode, size, mtime_ns and ctime_ns are those of the file now, and if its checksum says
that it is what was written: a wrong digest would make a good file unreadable. Nothing here is precious: a store that
cannot be used is moved aside and begun anew, and the files are digested again.
"""

import logging
import os
import sqlite3
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import xxhash

from tierfs.blocks.ids import ID_BYTES
from tierfs.blocks.spans import block_count
from tierfs.catalog.private import keep_private
from tierfs.catalog.scan import FileFacts

log = logging.getLogger(__name__)

_FORMAT = 1
_BUSY_TIMEOUT_S = 5.0
KEEP_GONE_S = 86400.0  # a file system that is not mounted for a while must not cost a second digest of everything

_SCHEMA = """
CREATE TABLE IF NOT EXISTS digests (
    path BLOB PRIMARY KEY, inode INTEGER, size_bytes INTEGER, mtime_ns INTEGER, ctime_ns INTEGER,
    block_bytes INTEGER, digests BLOB, checksum BLOB, gone_s REAL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS generation (only INTEGER PRIMARY KEY CHECK (only = 0), number INTEGER, tree BLOB);
"""
_SELECT = "SELECT inode, size_bytes, mtime_ns, ctime_ns, block_bytes, digests, checksum FROM digests WHERE path = ?"
_T = TypeVar("_T")


def store_path(state_directory: Path, export: str) -> Path:
    """Where the store of an export lies; readable where the name allows it, and always its own."""
    readable = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in export)[:40]
    name = export.encode("utf-8", "surrogateescape")
    return state_directory / f"digests-{readable}-{xxhash.xxh3_64_hexdigest(name)}.sqlite"


class DigestStore:
    """The digests and the generation counter of one export.

    Every method raises OSError or sqlite3.Error only for a medium that does not work (full, read-only, locked by
    another process for longer than five seconds); a corrupt store heals itself and answers as an empty one.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the store in this file; its directory is created."""
        self._path = path
        self._first_generation = 1
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._connection = self._open()

    def lookup(self, files: Iterable[FileFacts], block_bytes: int) -> dict[bytes, bytes]:
        """The digests of those files that are remembered just as they are now, by path.

        The digests are concatenated, from block 0 on; fewer than the file has blocks where the work was interrupted.
        """

        def body(connection: sqlite3.Connection) -> dict[bytes, bytes]:
            found: dict[bytes, bytes] = {}
            cursor = connection.cursor()
            for facts in files:
                row = cursor.execute(_SELECT, (facts.path,)).fetchone()
                if row is None or row[:5] != (*_stat(facts), block_bytes):
                    continue
                digests = bytes(row[5])
                whole = block_count(facts.size_bytes, block_bytes) * ID_BYTES
                sound = len(digests) <= whole and len(digests) % ID_BYTES == 0
                if sound and row[6] == _checksum(facts, block_bytes, digests):
                    found[facts.path] = digests
            return found

        return self._healed(body)

    def remember(self, rows: Sequence[tuple[FileFacts, bytes]], block_bytes: int) -> None:
        """Remember the digests (concatenated, from block 0 on) of these files, in one transaction."""

        def body(connection: sqlite3.Connection) -> None:
            connection.executemany(
                "INSERT OR REPLACE INTO digests VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0)",
                [
                    (facts.path, *_stat(facts), block_bytes, digests, _checksum(facts, block_bytes, digests))
                    for facts, digests in rows
                ],
            )

        self._healed(body)

    def prune(self, live: set[bytes], *, now_s: float, keep_s: float = KEEP_GONE_S) -> int:
        """Forget the files that have been gone for ``keep_s``; ``live`` holds all paths there are. How many went."""

        def body(connection: sqlite3.Connection) -> int:
            rows = connection.execute("SELECT path, gone_s FROM digests").fetchall()
            gone = [(now_s, path) for path, gone_s in rows if not gone_s and path not in live]
            back = [(0.0, path) for path, gone_s in rows if gone_s and path in live]
            connection.executemany("UPDATE digests SET gone_s = ? WHERE path = ?", gone + back)
            return connection.execute(
                "DELETE FROM digests WHERE gone_s != 0 AND gone_s <= ?", (now_s - keep_s,)
            ).rowcount

        return self._healed(body)

    def generation(self, tree: bytes, *, at_least: int = 1) -> int:
        """The generation of this tree (a digest of it): the same as last time if it is the same, else the next one.

        ``at_least`` is one more than the last one told in this life, where there was one.

        Durable when it returns: a generation that was ever told never comes back as another tree.
        """

        def body(connection: sqlite3.Connection) -> int:
            row = connection.execute("SELECT number, tree FROM generation").fetchone()
            if row is not None and row[1] == tree and row[0] >= at_least:
                return int(row[0])
            number = max(at_least, self._first_generation if row is None else int(row[0]) + 1)
            connection.execute("INSERT OR REPLACE INTO generation VALUES (0, ?, ?)", (number, tree))
            return number

        return self._healed(body)

    def close(self) -> None:
        """Close the file. Everything remembered was committed before."""
        self._connection.close()

    def _healed(self, body: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run ``body`` in one transaction; a second time in a new store where the first turns out to be corrupt."""
        try:
            with self._connection:
                return body(self._connection)
        except sqlite3.DatabaseError as error:
            if not _is_corruption(error):
                raise
            self._connection.close()
            self._move_aside(error)
            self._connection = self._open()
            with self._connection:
                return body(self._connection)

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.DatabaseError as error:
            if not _is_corruption(error):
                raise
            self._move_aside(error)
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        keep_private(self._path)
        connection = sqlite3.connect(self._path, timeout=_BUSY_TIMEOUT_S, check_same_thread=False)
        try:
            found = connection.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, _FORMAT):
                raise sqlite3.DatabaseError(f"format {found} where {_FORMAT} was expected")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            with connection:
                connection.executescript(_SCHEMA)
                connection.execute(f"PRAGMA user_version = {_FORMAT}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _move_aside(self, error: sqlite3.DatabaseError) -> None:
        """Keep the bad file for a person to look at (only the latest one), and clear the way for a new one."""
        aside = self._path.with_name(self._path.name + ".corrupt")
        log.warning("digest_store_corrupt path=%s moved_to=%s error=%s", self._path, aside, error)
        os.replace(self._path, aside)
        for suffix in ("-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        # The counter is lost with it, and no generation may be told twice. Seconds run ahead of any count of ours.
        self._first_generation = int(time.time())


def _is_corruption(error: sqlite3.DatabaseError) -> bool:
    """A full disk, a lock or a read-only medium is an OperationalError and says nothing about the contents."""
    return type(error) is sqlite3.DatabaseError


def _stat(facts: FileFacts) -> tuple[int, int, int, int]:
    # SQLite has signed integers only, and some file systems use all 64 bits of an inode number.
    inode = facts.inode - (1 << 64) if facts.inode >= 1 << 63 else facts.inode
    return inode, facts.size_bytes, facts.mtime_ns, facts.ctime_ns


def _checksum(facts: FileFacts, block_bytes: int, digests: bytes) -> bytes:
    numbers = struct.pack("<qQqqQ", *_stat(facts), block_bytes)
    return xxhash.xxh3_64_digest(numbers + facts.path + b"\0" + digests)
