"""The kernel's list of bad blocks, compared with where a file lies; what a read of those says decides.

The lists here are files like those in sysfs; the disk is real to the kernel (tests/media.py), and so are its errors.
On persistent memory itself: tests/vm/test_bad_blocks.py.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.media import Disk, can_break
from tierfs.tiers.bad_blocks import bad_ranges, extents, look, overlaps

SIZE = 8 << 20


def listed(folder: Path, text: str) -> Path:
    """A device in a folder that stands for sysfs, with that list."""
    (folder / "slaves").mkdir(parents=True)
    (folder / "badblocks").write_text(text)
    return folder


def test_list_is_read_in_bytes_from_the_start_of_the_device(tmp_path: Path) -> None:
    assert list(bad_ranges(listed(tmp_path / "none", "\n"))) == []
    disk = listed(tmp_path / "disk", "8 1\n2048 16\n")
    assert list(bad_ranges(disk)) == [(8 * 512, 9 * 512), (2048 * 512, 2064 * 512)]


def test_list_of_a_partition_is_its_part_of_the_disks(tmp_path: Path) -> None:
    disk = listed(tmp_path / "disk", "8 1\n2040 16\n4096 8\n")
    part = disk / "part1"
    part.mkdir()
    (part / "partition").write_text("1\n")
    (part / "start").write_text("2048\n")
    (tmp_path / "259:1").symlink_to(part)  # as /sys/dev/block has it
    assert list(bad_ranges(tmp_path / "259:1")) == [(0, 8 * 512), (2048 * 512, 2056 * 512)]


@pytest.mark.parametrize("what", ["no device", "no list", "device mapper"])
def test_device_whose_bad_blocks_are_not_told_says_so(tmp_path: Path, what: str) -> None:
    device = tmp_path / "disk"
    if what != "no device":
        listed(device, "\n")
        if what == "no list":
            (device / "badblocks").unlink()
        else:
            (device / "slaves" / "pmem0").mkdir()
    with pytest.raises(OSError, check=lambda error: error.errno == errno.ENOSYS):
        list(bad_ranges(device))


def test_what_overlaps_is_told_by_its_first_byte_in_the_file() -> None:
    found = [(0, (1000, 2000)), (5000, (8000, 9000)), (9000, (2000, 2500))]
    bad = [(0, 1000), (1999, 2001), (7000, 7500), (8500, 8600), (9000, 10000)]
    assert list(overlaps(found, bad)) == [999, 5500, 9000]
    assert list(overlaps(found, [])) == list(overlaps([], bad)) == []


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if not can_break():
        pytest.skip("needs root, losetup and mkfs.ext4")
    made = Disk(tmp_path / "media")
    yield made
    made.close()


def test_extents_say_where_the_bytes_lie(disk: Disk) -> None:
    content = os.urandom(SIZE)
    with (disk.path / "file").open("w+b") as file:
        for start in range(0, SIZE, SIZE // 4):  # with holes
            os.pwrite(file.fileno(), content[start : start + (1 << 20)], start)
        os.fsync(file.fileno())
        found = list(extents(file.fileno()))
        assert sum(end - begin for _, (begin, end) in found) == 4 << 20
        with disk.image.open("rb") as image:
            for logical, (begin, end) in found:
                image.seek(begin)
                assert image.read(end - begin) == content[logical : logical + end - begin]


def test_a_look_believes_the_list_only_where_a_read_fails(disk: Disk, tmp_path: Path) -> None:
    file = disk.path / "file"
    file.write_bytes(os.urandom(SIZE))
    with file.open("rb") as opened:
        fd = opened.fileno()
        broken = disk.break_end(file)
        number = os.fstat(fd).st_dev
        name = f"{os.major(number)}:{os.minor(number)}"
        places = [
            (begin + at - logical) // 512
            for at in (0, broken)
            for logical, (begin, end) in extents(fd)
            if logical <= at < logical + end - begin
        ]
        assert len(places) == 2

        def looked(case: str, text: str, known: list[int]) -> tuple[list[int], int, OSError | None]:
            listed(tmp_path / case / name, text)
            found = look(fd, known, sysfs=tmp_path / case)
            return found.known, found.offset_bytes, found.error

        known, _, error = looked("nothing", "\n", [])
        assert error is None
        before = disk.read_sectors()
        known, _, error = looked("elsewhere", "1 1\n", known)
        assert (error, disk.read_sectors()) == (None, before), "nothing is read for what is not of this file"
        known, _, error = looked("wrong", f"{places[0]} 8\n", known)
        assert error is None, "that place can be read"
        before = disk.read_sectors()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert looked("wrong again", f"{places[0]} 8\n", known)[0] == known
        assert disk.read_sectors() == before, "the same list and the same file"
        known, offset, error = looked("bad", f"{places[0]} 8\n{places[1]} 8\n", known)
        assert error is not None
        assert (error.errno, offset) == (errno.EIO, broken)
        assert looked("again", f"{places[0]} 8\n{places[1]} 8\n", known)[2] is not None
