"""The last publication, kept for a start without the source."""

import os
from pathlib import Path

from tierfs.blocks.ids import ContentId, VersionId
from tierfs.catalog.remembered import Remembered
from tierfs.catalog.schema import Publication
from tierfs.testing.sources import catalog_of, version_of

FILES = {b"a": b"1", b"b": b"2"}
CATALOG = catalog_of(FILES, block_bytes=4096)
A, B = (version_of(path, data) for path, data in FILES.items())
CONTENT = ContentId(b"c" * 16)


def test_catalog_and_content_ids_come_back(tmp_path: Path) -> None:
    remembered = Remembered(tmp_path)
    remembered.replace(Publication(CATALOG, {A: CONTENT, VersionId(b"gone" * 4): CONTENT}, 7))
    remembered.add({A: CONTENT, B: ContentId(b"d" * 16)})
    found = Remembered(tmp_path).load()
    assert found is not None
    assert found.catalog == CATALOG
    assert found.contents == {A: CONTENT, B: b"d" * 16}
    assert (tmp_path / "contents").stat().st_size == 64  # nothing twice, nothing of other generations


def test_nothing_or_nonsense_is_nothing(tmp_path: Path) -> None:
    assert Remembered(tmp_path).load() is None
    (tmp_path / "catalog").write_bytes(b"nonsense")
    assert Remembered(tmp_path).load() is None


def test_a_torn_record_is_ignored(tmp_path: Path) -> None:
    Remembered(tmp_path).replace(Publication(CATALOG, {A: CONTENT, B: CONTENT}, 1))
    file = tmp_path / "contents"
    file.write_bytes(file.read_bytes()[:-3])
    found = Remembered(tmp_path).load()
    assert found is not None and len(found.contents) == 1


def test_what_follows_a_torn_record_is_kept(tmp_path: Path) -> None:
    Remembered(tmp_path).replace(Publication(CATALOG, {A: CONTENT}, 1))
    with (tmp_path / "contents").open("ab") as file:
        file.write(b"torn")
    Remembered(tmp_path).add({B: ContentId(b"d" * 16)})
    found = Remembered(tmp_path).load()
    assert found is not None and found.contents == {A: CONTENT, B: b"d" * 16}


def test_a_full_disk_is_no_reason_to_fail(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    remembered = Remembered(gone)
    gone.rmdir()
    remembered.replace(Publication(CATALOG, {A: CONTENT}, 1))
    remembered.add({B: CONTENT})


def test_the_catalogs_before_the_last_one_come_back_while_they_are_young(tmp_path: Path) -> None:
    catalogs = [catalog_of({b"f%d" % number: b"1"}, block_bytes=4096) for number in range(7)]
    remembered = Remembered(tmp_path)
    for catalog in catalogs:
        remembered.replace(Publication(catalog, {}, 1))
        remembered.replace(Publication(catalog, {}, 1))  # the same again
    now_s = (tmp_path / "catalog").stat().st_mtime
    assert Remembered(tmp_path).earlier(now_s, 60) == catalogs[5:1:-1]
    assert Remembered(tmp_path).earlier(now_s + 61, 60) == []
    os.utime(tmp_path / "catalog.1", (now_s - 100, now_s - 100))  # since then catalog.2 is superseded
    assert Remembered(tmp_path).earlier(now_s, 60) == catalogs[5:4:-1]
    (tmp_path / "catalog.1").write_bytes(b"nonsense")
    assert Remembered(tmp_path).earlier(now_s, 60) == []
