"""The digest store: what is remembered, what is not believed, and what is forgotten."""

import logging
import sqlite3
from pathlib import Path

import pytest

from tierfs.catalog.digest_store import DigestStore, store_path
from tierfs.catalog.scan import FileFacts

BLOCK = 4096
FACTS = FileFacts(b"a\n\xff/b", 2**64 - 3, 3 * BLOCK, -7, 9)
DIGESTS = bytes(range(48))


def _changed(**changes: object) -> FileFacts:
    fields = {name: getattr(FACTS, name) for name in FACTS.__struct_fields__}
    return FileFacts(**{**fields, **changes})


def test_digests_outlive_the_store_object(tmp_path: Path) -> None:
    store = DigestStore(tmp_path / "state/s.sqlite")
    store.remember([(FACTS, DIGESTS)], BLOCK)
    store.close()
    again = DigestStore(tmp_path / "state/s.sqlite")
    assert again.lookup([FACTS, _changed(path=b"other")], BLOCK) == {FACTS.path: DIGESTS}
    again.close()


@pytest.mark.parametrize(
    "other",
    [
        _changed(path=b"other"),
        _changed(inode=1),
        _changed(size_bytes=3 * BLOCK - 1),
        _changed(mtime_ns=0),
        _changed(ctime_ns=0),
    ],
    ids=["path", "inode", "size", "mtime", "ctime"],
)
def test_a_file_that_differs_in_anything_is_not_remembered(tmp_path: Path, other: FileFacts) -> None:
    store = DigestStore(tmp_path / "s.sqlite")
    store.remember([(FACTS, DIGESTS)], BLOCK)
    assert store.lookup([other], BLOCK) == {}
    store.close()


def test_digests_of_another_block_size_are_not_believed(tmp_path: Path) -> None:
    store = DigestStore(tmp_path / "s.sqlite")
    store.remember([(FACTS, DIGESTS)], BLOCK)
    assert store.lookup([FACTS], 2 * BLOCK) == {}
    store.close()


def test_the_first_digests_of_unfinished_work_are_kept(tmp_path: Path) -> None:
    store = DigestStore(tmp_path / "s.sqlite")
    store.remember([(FACTS, DIGESTS[:16])], BLOCK)
    assert store.lookup([FACTS], BLOCK) == {FACTS.path: DIGESTS[:16]}
    store.close()


def test_a_digest_that_rotted_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    store = DigestStore(path)
    store.remember([(FACTS, DIGESTS)], BLOCK)
    with sqlite3.connect(path) as other:
        other.execute("UPDATE digests SET digests = ?", (bytes(48),))
    other.close()
    assert store.lookup([FACTS], BLOCK) == {}
    store.close()


def test_the_same_tree_has_the_same_generation_and_another_the_next(tmp_path: Path) -> None:
    store = DigestStore(tmp_path / "s.sqlite")
    assert [store.generation(tree) for tree in (b"a", b"a", b"b")] == [1, 1, 2]
    store.close()
    again = DigestStore(tmp_path / "s.sqlite")
    assert again.generation(b"b") == 2
    assert again.generation(b"a") == 3
    assert again.generation(b"c", at_least=10) == 10
    again.close()


@pytest.mark.parametrize("when", ["before opening", "while open"])
def test_a_corrupt_store_is_moved_aside_and_begun_anew(
    tmp_path: Path, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s.sqlite"
    store = DigestStore(path)
    store.remember([(FACTS, DIGESTS)], BLOCK)
    assert store.generation(b"tree") == 1
    store.close()
    if when == "while open":
        store = DigestStore(path)
        store.lookup([], BLOCK)
    with open(path, "r+b") as file:
        file.write(b"not a database at all" * 300)
    with caplog.at_level(logging.WARNING):
        if when == "before opening":
            store = DigestStore(path)
        assert store.lookup([FACTS], BLOCK) == {}
    assert "digest_store_corrupt" in caplog.text
    assert (tmp_path / "s.sqlite.corrupt").read_bytes().startswith(b"not a database")
    store.remember([(FACTS, DIGESTS)], BLOCK)
    assert store.lookup([FACTS], BLOCK) == {FACTS.path: DIGESTS}
    assert store.generation(b"tree") > 1_000_000_000, "a generation told before must not be told again"
    store.close()


def test_files_that_are_gone_are_forgotten_in_the_end(tmp_path: Path) -> None:
    store = DigestStore(tmp_path / "s.sqlite")
    store.remember([(FACTS, DIGESTS), (_changed(path=b"stays"), DIGESTS)], BLOCK)
    live = {b"stays"}
    assert store.prune(live, now_s=1000.0, keep_s=60.0) == 0
    assert FACTS.path in store.lookup([FACTS], BLOCK), "it may come back: a file system not mounted for a while"
    assert store.prune(live, now_s=1059.0, keep_s=60.0) == 0
    assert store.prune(live | {FACTS.path}, now_s=1060.0, keep_s=60.0) == 0
    assert store.prune(live, now_s=1100.0, keep_s=60.0) == 0, "the time counts anew"
    assert store.prune(live, now_s=1160.0, keep_s=60.0) == 1
    assert store.lookup([FACTS, _changed(path=b"stays")], BLOCK) == {b"stays": DIGESTS}
    store.close()


def test_exports_never_share_a_file(tmp_path: Path) -> None:
    names = ["models", "Models", "a/b", "a_b", "", "..", "\udcff", "x" * 300]
    paths = {store_path(tmp_path, name) for name in names}
    assert len(paths) == len(names)
    assert all(path.parent == tmp_path and len(path.name) < 200 for path in paths)
