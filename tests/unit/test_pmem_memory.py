"""Mapped files by libpmem: non-temporal copies arrive, and what cannot be mapped or has no MAP_SYNC says so."""

import errno
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pmem_pools import DAX, persistent_folder
from tierfs.tiers.pmem.library import PmemError
from tierfs.tiers.pmem.memory import MappedFile, file_maps_sync, maps_sync

SIZE = 3 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    yield from persistent_folder()


def test_copied_bytes_are_in_the_file(folder: Path) -> None:
    data = random.Random(1).randbytes(SIZE)
    mapped = MappedFile.create(folder / "f", SIZE)
    assert mapped.is_pmem
    assert mapped.size_bytes == SIZE
    assert (folder / "f").stat().st_blocks * 512 >= SIZE  # allocated first: a copy cannot meet a hole
    writable = memoryview(mmap.mmap(-1, SIZE))
    writable[:] = data
    mapped.copy(0, writable[: SIZE // 2 + 7])
    mapped.copy(SIZE // 2 + 7, memoryview(data)[SIZE // 2 + 7 :])  # read-only memory too
    mapped.copy(SIZE, memoryview(b""))
    mapped.drain()
    mapped.close()
    mapped.close()
    assert (folder / "f").read_bytes() == data
    with pytest.raises(PmemError, match="closed"):
        mapped.copy(0, memoryview(b"x"))
    with pytest.raises(AssertionError):
        MappedFile.open(folder / "f").copy(SIZE - 1, memoryview(b"xy"))


def test_what_is_there_is_mapped_as_it_is(folder: Path) -> None:
    (folder / "f").write_bytes(b"0123456789")
    mapped = MappedFile.open(folder / "f")
    mapped.copy(3, memoryview(b"abc"))
    mapped.drain()
    mapped.close()
    assert (folder / "f").read_bytes() == b"012abc6789"


@pytest.mark.parametrize(
    ("make", "number"), [("missing", errno.ENOENT), ("there", errno.EEXIST), ("full", errno.ENOSPC)]
)
def test_what_cannot_be_mapped_says_why_and_leaves_nothing(folder: Path, make: str, number: int) -> None:
    (folder / "there").write_bytes(b"x" * 4096)
    space = os.statvfs(folder)
    with pytest.raises(PmemError, check=lambda error: error.errno == number):
        if make == "missing":
            MappedFile.open(folder / "missing")
        elif make == "there":
            MappedFile.create(folder / "there", 4096)
        else:
            MappedFile.create(folder / "full", space.f_blocks * space.f_frsize * 2)
    assert [path.name for path in folder.iterdir()] == ["there"]


def test_only_dax_maps_sync_and_the_probe_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    assert maps_sync(folder) == bool(DAX)
    assert not maps_sync(tmp_path)
    assert list(folder.iterdir()) == list(tmp_path.iterdir()) == []
    (tmp_path / "f").write_bytes(bytes(mmap.PAGESIZE))
    with (tmp_path / "f").open("r+b") as file:
        assert not file_maps_sync(file.fileno())
    with pytest.raises(OSError):
        maps_sync(tmp_path / "missing")
