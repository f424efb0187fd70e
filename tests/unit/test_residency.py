"""The database of residency: what it keeps, what an unclean stop takes away, what damage does."""

import contextlib
import sqlite3
from pathlib import Path

import pytest

from tierfs.blocks.ids import BlockDigest, ObjectKey
from tierfs.policy.eviction import Heat
from tierfs.tiers.residency import Residency, Stored, StoredObject, boot_id

A, B, C = (ObjectKey(letter * 16) for letter in (b"a", b"b", b"c"))
DIGEST = BlockDigest(b"d" * 16)


def stored(name: ObjectKey = A, blocks: int = 3) -> StoredObject:
    rows = [(number, DIGEST) for number in range(blocks)]
    return StoredObject(name, name, 10 * 4096, 4096, b"p\xff\n", b"model", 99, 1.5, rows)


@contextlib.contextmanager
def opened(path: Path, *, boot: str = "boot-1", clean: bool = True):  # type: ignore[no-untyped-def]
    residency = Residency(path / "r.db", boot=boot)
    yield residency, residency.open()
    residency.close(clean=clean)


def verified(path: Path) -> list[int]:
    with contextlib.closing(sqlite3.connect(path / "r.db")) as db:
        return [flag for (flag,) in db.execute("SELECT verified FROM blocks ORDER BY object, block")]


def test_what_was_committed_comes_back(tmp_path: Path) -> None:
    with opened(tmp_path) as (residency, found):
        assert found == Stored()
        one = stored()
        one.aliases = [B]
        residency.commit([one])
        more = stored()
        more.blocks = [(7, DIGEST)]
        residency.commit([more, stored(C, 1)])
        residency.save(models=[(b"model", Heat(2.0, 3.0, 4.0))], used=[(A, 8.5)])
    with opened(tmp_path) as (residency, found):
        assert not found.unclean
        by_name = {item.name: item for item in found.objects}
        assert [block for block, _ in by_name[A].blocks] == [0, 1, 2, 7]
        assert (by_name[A].path, by_name[A].model, by_name[A].last_use_s) == (b"p\xff\n", b"model", 8.5)
        assert by_name[A].aliases == [B]
        assert by_name[A].sound()
        assert found.models == [(b"model", Heat(2.0, 3.0, 4.0))]


def test_key_of_an_object_changes_when_its_content_is_known(tmp_path: Path) -> None:
    with opened(tmp_path) as (residency, _):
        residency.commit([stored()])
        residency.save(keys=[(A, B, A), (A, B, C)])
    with opened(tmp_path) as (residency, found):
        (item,) = found.objects
        assert (item.name, item.key, sorted(item.aliases)) == (A, B, [A, C])


def test_removed_is_gone_and_leaves_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, clean=False) as (residency, _):
        residency.commit([stored(A), stored(B)])
        residency.save(keys=[(A, C, A)])
        residency.remove_blocks(B, [0, 2])
        residency.remove_objects([A, C])
    with opened(tmp_path) as (_, found):
        (item,) = found.objects
        assert (item.name, item.blocks) == (B, [(1, DIGEST)])
    with contextlib.closing(sqlite3.connect(tmp_path / "r.db")) as db:
        assert db.execute("SELECT count(*) FROM aliases").fetchone() == (0,)
        assert db.execute("SELECT count(*) FROM blocks").fetchone() == (1,)


STOPS = [
    ("clean", "same boot", True, "boot-1", [1, 1, 1]),
    ("clean", "another boot", True, "boot-2", [1, 1, 1]),
    ("killed", "same boot", False, "boot-1", [1, 1, 1]),
    ("killed", "another boot", False, "boot-2", [0, 0, 0]),
]


@pytest.mark.parametrize(("stop", "start", "clean", "boot", "expected"), STOPS)
def test_only_another_boot_without_a_clean_mark_loses_verified(
    tmp_path: Path, stop: str, start: str, clean: bool, boot: str, expected: list[int]
) -> None:
    with opened(tmp_path, clean=clean) as (residency, _):
        residency.commit([stored()])
    with opened(tmp_path, boot=boot) as (residency, found):
        assert found.unclean == (expected == [0, 0, 0])
        assert len(found.objects[0].blocks) == 3  # resident all the same
    assert verified(tmp_path) == expected


def test_verified_again_is_kept(tmp_path: Path) -> None:
    with opened(tmp_path, clean=False) as (residency, _):
        residency.commit([stored()])
    with opened(tmp_path, boot="boot-2") as (residency, _):
        residency.save(verified=[(A, 1)])
    assert verified(tmp_path) == [0, 1, 0]


def test_clean_mark_lasts_for_one_start(tmp_path: Path) -> None:
    with opened(tmp_path, clean=True) as (residency, _):
        residency.commit([stored()])
    with opened(tmp_path, boot="boot-2", clean=False):
        pass
    with opened(tmp_path, boot="boot-3") as (_, found):
        assert found.unclean


def test_failed_transaction_leaves_nothing_of_itself(tmp_path: Path) -> None:
    with opened(tmp_path) as (residency, _):
        residency.commit([stored(A, 1)])
        bad = stored(B, 2)
        bad.blocks[1] = (1, None)  # type: ignore[call-overload]
        with pytest.raises(sqlite3.Error):
            residency.commit([bad])
        residency.commit([stored(C, 1)])
    with opened(tmp_path) as (_, found):
        assert {item.name for item in found.objects} == {A, C}


def test_damaged_database_is_moved_aside(tmp_path: Path) -> None:
    with opened(tmp_path) as (residency, _):
        residency.commit([stored()])
    (tmp_path / "r.db").write_bytes(b"no database at all" * 1000)
    with opened(tmp_path) as (residency, found):
        assert found.objects == []
        assert found.replaced == str(tmp_path / "r.db.corrupt")
        residency.commit([stored()])
    with opened(tmp_path) as (_, found):
        assert len(found.objects) == 1


def test_database_that_cannot_be_opened_is_not_thrown_away(tmp_path: Path) -> None:
    (tmp_path / "r.db").mkdir()
    with pytest.raises(sqlite3.OperationalError):
        Residency(tmp_path / "r.db", boot="b").open()
    assert (tmp_path / "r.db").is_dir()


@pytest.mark.parametrize(
    "change", [{"name": b"short"}, {"key": b""}, {"block_bytes": 0}, {"size_bytes": 0}, {"size_bytes": 4096}]
)
def test_rows_that_make_no_sense_are_not_sound(change: dict[str, object]) -> None:
    item = stored()
    assert item.sound()
    for name, value in change.items():
        setattr(item, name, value)
    assert not item.sound()


def test_boot_id_is_the_kernel_s() -> None:
    assert boot_id() == boot_id()
    assert len(boot_id()) == 36


def test_handed_out_survives_a_kill_and_later_blocks(tmp_path: Path) -> None:
    residency = Residency(tmp_path / "r.db", boot="boot-1")
    residency.open()
    residency.commit([stored(A), stored(B)])
    residency.hand_out(A)
    for suffix in ("", "-wal"):  # what a killed process leaves
        (tmp_path / f"killed.db{suffix}").write_bytes((tmp_path / f"r.db{suffix}").read_bytes())
    killed = Residency(tmp_path / "killed.db", boot="boot-1")
    assert {item.name: item.handed_out for item in killed.open().objects} == {A: True, B: False}
    killed.close(clean=False)
    residency.commit([stored(A, 4)])
    with pytest.raises(sqlite3.Error):
        residency.hand_out(C)
    residency.close(clean=True)
    with opened(tmp_path) as (_, found):
        assert {item.name: item.handed_out for item in found.objects} == {A: True, B: False}


# As format 1 made it; written down here, since what old directories hold does not change any more.
_FORMAT_1 = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID, STRICT;
CREATE TABLE objects (
    id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, key BLOB NOT NULL, size_bytes INTEGER NOT NULL,
    block_bytes INTEGER NOT NULL, path BLOB NOT NULL, model BLOB NOT NULL, model_bytes INTEGER NOT NULL,
    last_use_s REAL NOT NULL, mtime_ns INTEGER NOT NULL DEFAULT 0, ctime_ns INTEGER NOT NULL DEFAULT 0) STRICT;
CREATE TABLE aliases (alias BLOB PRIMARY KEY, object INTEGER NOT NULL) WITHOUT ROWID, STRICT;
CREATE INDEX aliases_object ON aliases (object);
CREATE TABLE blocks (
    object INTEGER NOT NULL, block INTEGER NOT NULL, digest BLOB NOT NULL, verified INTEGER NOT NULL,
    PRIMARY KEY (object, block)) WITHOUT ROWID, STRICT;
CREATE TABLE models (
    model BLOB PRIMARY KEY, loads REAL NOT NULL, counted_s REAL NOT NULL, last_use_s REAL NOT NULL
    ) WITHOUT ROWID, STRICT;
"""


def test_database_of_format_1_is_migrated_with_all_it_holds(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "r.db")) as db, db:
        db.executescript(_FORMAT_1)
        db.execute("INSERT INTO meta VALUES ('boot', 'boot-1'), ('clean', '1')")
        db.execute("INSERT INTO objects VALUES (5, ?, ?, 40960, 4096, x'70', x'6d', 99, 1.5, 11, 12)", (A, B))
        db.execute("INSERT INTO blocks VALUES (5, 3, ?, 1)", (DIGEST,))
    for _ in range(2):  # the second run finds it migrated
        with opened(tmp_path) as (_, found):
            assert found.replaced == ""
            (item,) = found.objects
            assert (item.name, item.key, item.stamp, item.handed_out) == (A, B, (11, 12), False)
            assert (item.blocks, item.verified, item.last_use_s) == ([(3, DIGEST)], [3], 1.5)
    with opened(tmp_path) as (residency, _):
        residency.hand_out(A)
    with opened(tmp_path) as (_, found):
        assert found.objects[0].handed_out
