"""The object store: layout, lock, format, and the writes and reads of blocks."""

import mmap
import os
from pathlib import Path

import pytest

from tierfs.blocks.errors import TierFailed
from tierfs.tiers.objects import (
    PAGE_BYTES,
    SYNCFS_FROM,
    ObjectStore,
    allocated_bytes,
    check_format,
    drop_cached,
    medium_of,
    read_block,
    write_block,
)

BLOCK = 64 << 10
NAME = bytes(range(16))


def aligned(length_bytes: int, fill: bytes = b"") -> memoryview:
    memory = mmap.mmap(-1, max(1, length_bytes))
    memory[: len(fill)] = fill
    return memoryview(memory)[:length_bytes]


@pytest.fixture
def store(tmp_path: Path):  # type: ignore[no-untyped-def]
    store = ObjectStore(tmp_path / "tier")
    store.open()
    yield store
    store.close()


def test_object_is_a_sparse_file_of_the_full_length_in_its_place(store: ObjectStore) -> None:
    opened = store.open_object(NAME, 100 * BLOCK + 5, create=True)
    file = store.root / "objects" / "00" / NAME.hex()
    assert file.stat().st_size == 100 * BLOCK + 5
    assert file.stat().st_blocks == 0
    assert file.stat().st_mode & 0o777 == 0o600
    write_block(opened, 50 * BLOCK, aligned(BLOCK, os.urandom(BLOCK)))
    assert BLOCK <= allocated_bytes(os.fstat(opened.fd)) < 2 * BLOCK
    opened.close()
    assert [name for name, _ in store.scan()] == [NAME]
    store.unlink(NAME)
    store.unlink(NAME)  # gone already is no error
    assert list(store.scan()) == []


@pytest.mark.parametrize("length", [1, 17, PAGE_BYTES, PAGE_BYTES + 1, BLOCK - 1, BLOCK])
@pytest.mark.parametrize("is_aligned", [True, False])
def test_block_is_written_and_read_back_to_the_byte(store: ObjectStore, length: int, is_aligned: bool) -> None:
    data = os.urandom(length)
    size_bytes = 3 * BLOCK + length
    opened = store.open_object(NAME, size_bytes, create=True)
    source = aligned(length, data) if is_aligned else memoryview(b"x" + data)[1:]
    write_block(opened, 3 * BLOCK, source)
    store.sync_written([opened])
    drop_cached(opened, 3 * BLOCK, length)
    assert os.fstat(opened.fd).st_size == size_bytes  # a tail is never padded
    target = aligned(length) if is_aligned else memoryview(bytearray(length + 1))[1:]
    assert read_block(opened, 3 * BLOCK, target)
    assert target == data
    assert not read_block(opened, 3 * BLOCK, aligned(length + 1))  # the file ends before
    opened.close()


def test_aligned_writes_leave_the_page_cache_alone(store: ObjectStore) -> None:
    if not store.direct:
        pytest.skip("this file system has no O_DIRECT")
    opened = store.open_object(NAME, 4 * BLOCK, create=True)
    write_block(opened, 0, aligned(BLOCK, os.urandom(BLOCK)))
    assert not cached(opened.fd, 0)
    write_block(opened, BLOCK, memoryview(os.urandom(BLOCK)))  # unaligned: through the cache
    assert cached(opened.fd, BLOCK)
    opened.close()


def cached(fd: int, offset_bytes: int) -> bool:
    """Whether the written page there is in the page cache (a hole would count as that)."""
    try:
        return os.preadv(fd, [bytearray(PAGE_BYTES)], offset_bytes, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False


def test_many_dirty_objects_are_synced_at_once(store: ObjectStore) -> None:
    files = [store.open_object(bytes([i]) * 16, 100, create=True) for i in range(SYNCFS_FROM + 1)]
    for opened in files:
        write_block(opened, 0, memoryview(b"d" * 100))
    store.sync_written(files)
    for opened in files:
        drop_cached(opened, 0, 100)
    # Only clean pages can be dropped: without the sync all would still be there. (The kernel keeps a few as it likes.)
    assert sum(cached(opened.fd, 0) for opened in files) <= len(files) // 2
    for opened in files:
        opened.close()


def test_symlinks_are_not_followed(store: ObjectStore, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"v" * 7)
    folder = store.root / "objects" / "00"
    folder.mkdir()
    (folder / NAME.hex()).symlink_to(victim)
    with pytest.raises(OSError):
        store.open_object(NAME, 10, create=True)
    assert victim.read_bytes() == b"v" * 7
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (store.root / "objects" / "ff").symlink_to(elsewhere)
    with pytest.raises(OSError):
        store.open_object(b"\xff" * 16, 10, create=True)
    assert list(elsewhere.iterdir()) == []
    assert [name for name, _ in store.scan()] == [NAME]


def test_scan_leaves_foreign_files_alone(store: ObjectStore) -> None:
    for name in ("README", "00/short", "zz", "00/" + "g" * 32, "11/" + NAME.hex()):
        file = store.root / "objects" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("x")
    assert list(store.scan()) == []


def test_second_owner_is_refused_until_the_first_is_gone(store: ObjectStore) -> None:
    second = ObjectStore(store.root)
    with pytest.raises(TierFailed, match=f"in use by process {os.getpid()}"):
        second.open()
    assert store.present()
    store.close()
    second.open()
    second.close()


@pytest.mark.parametrize(("text", "reason"), [("3\n", "format 3"), ("999", "format 999"), ("one", "no version")])
def test_other_format_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    first = ObjectStore(tmp_path)
    first.open()
    first.close()
    assert (tmp_path / "format").read_text() == "2\n"
    (tmp_path / "format").write_text(text)
    with pytest.raises(TierFailed, match=reason):
        first.open()
    with pytest.raises(TierFailed, match=reason):
        check_format(tmp_path)
    (tmp_path / "format").write_text("2\n")
    first.open()  # the refusal left no lock behind
    check_format(tmp_path)  # needs no lock
    first.close()
    check_format(tmp_path / "not-there")


def test_directory_that_was_moved_or_replaced_is_not_present(store: ObjectStore, tmp_path: Path) -> None:
    assert store.present()
    store.check_writable()
    store.root.rename(tmp_path / "moved")
    assert not store.present()
    store.root.mkdir()
    assert not store.present()


def test_medium_is_told_apart(tmp_path: Path) -> None:
    for path, expected in ((tmp_path, {"directory", "tmpfs"}), (Path("/dev/shm"), {"tmpfs"})):
        fd = os.open(path, os.O_RDONLY)
        assert medium_of(fd) in expected
        os.close(fd)


def test_mapped_store_gives_views_of_the_object(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path, mapped=True)
    store.open()
    assert not store.direct
    opened = store.open_object(NAME, 2 * PAGE_BYTES, create=True)
    write_block(opened, PAGE_BYTES, memoryview(b"m" * PAGE_BYTES))
    view = opened.map()[PAGE_BYTES:]
    assert view.readonly
    opened.close()
    assert view == b"m" * PAGE_BYTES  # the mapping lives as long as its views
    store.close()
