"""Databases are for their owner alone, those of older versions as well."""

import os
import sqlite3
import stat
from pathlib import Path

import pytest

from tierfs.catalog.private import keep_private


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture(autouse=True)
def open_umask() -> object:
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_new_database_and_all_that_sqlite_puts_beside_it_is_private(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    keep_private(path)
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE t (x)")
        modes = {found.name: mode(found) for found in tmp_path.iterdir()}
    database.close()
    assert len(modes) > 1 and set(modes.values()) == {0o600}, modes


def test_an_old_one_becomes_private_and_keeps_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    path.write_bytes(b"rows")
    (tmp_path / "old.db-wal").write_bytes(b"more")
    keep_private(path)
    assert {found.name: mode(found) for found in tmp_path.iterdir()} == {"old.db": 0o600, "old.db-wal": 0o600}
    assert path.read_bytes() == b"rows"


def test_what_is_no_file_of_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch(mode=0o644)
    (tmp_path / "link.db").symlink_to(tmp_path / "elsewhere")
    keep_private(tmp_path / "link.db")
    keep_private(tmp_path / "no-such-directory" / "x.db")
    os.mkfifo(tmp_path / "fifo.db", 0o644)
    keep_private(tmp_path / "fifo.db")  # and does not wait
    assert mode(tmp_path / "elsewhere") == 0o644
