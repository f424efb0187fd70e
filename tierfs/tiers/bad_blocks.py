"""Bad blocks of persistent memory, told by the kernel's list of them. Called by watching.py in a thread, with a
descriptor only.

Nothing of a DAX file is in the page cache, so that no page without contents is left behind by a reader who met an
error. But the pmem driver keeps a list, of what the platform told at boot and of what was met since: the file
``badblocks`` of the disk in sysfs, which `ndctl list --media-errors` shows, too. The list says where to look, a read
decides: one that the driver answers with an error before it touches the memory.

    /sys/dev/block/259:0/badblocks    "1048576 8": eight sectors of 512 bytes from there; a page of text at most
    FIEMAP of the object              where on the disk its bytes lie

What must hold: nothing is read where the list has nothing of the file.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from tierfs.tiers.failed_pages import PAGE_BYTES, Found

_SYSFS = Path("/sys/dev/block")
_SECTOR_BYTES = 512
# linux/fiemap.h: struct fiemap (start, length, flags, mapped, count, reserved), struct fiemap_extent (logical,
# physical, length, two reserved, flags, three reserved).
_FIEMAP = 0xC020660B
_HEAD = struct.Struct("=QQIIII")
_EXTENT = struct.Struct("=QQQQQIIII")
_EXTENTS = 256  # a call
_LAST = 0x1
_ELSEWHERE = 0x2 | 0x4 | 0x100 | 0x200  # unknown, delayed, not aligned (256) or inline: no place on the disk

Range = tuple[int, int]  # begin and end in bytes


def look(fd: int, known: list[int], *, sysfs: Path = _SYSFS) -> Found:
    """Whether the list of the file's disk has a bad block of the file.

    ``known``: of an earlier look at the same file; the same list is not compared with it again. Raises OSError: ENOSYS
    where the disk has no list (a device mapper, no block device), else for a lack of our own.
    """
    number = os.fstat(fd).st_dev
    bad = list(bad_ranges(sysfs / f"{os.major(number)}:{os.minor(number)}"))
    seen = [hash(tuple(bad))]
    if not bad or seen == known:
        return Found(seen)
    for offset_bytes in overlaps(extents(fd), bad):
        try:
            os.pread(fd, PAGE_BYTES, offset_bytes // PAGE_BYTES * PAGE_BYTES)
        except OSError as error:
            return Found([], offset_bytes, error)
    return Found(seen)


def bad_ranges(device: Path) -> Iterator[Range]:
    """The bad blocks of a block device, a directory of sysfs, in bytes from its start. Raises OSError (ENOSYS)."""
    start_bytes = 0
    disk = device.resolve()
    try:
        if (disk / "partition").exists():  # the list is the disk's
            start_bytes = int((disk / "start").read_text()) * _SECTOR_BYTES
            disk = disk.parent
        if any((disk / "slaves").iterdir()):
            raise OSError(errno.ENOSYS, f"{disk.name} lies on other devices: their bad blocks are not known", str(disk))
        lines = (disk / "badblocks").read_text().splitlines()
    except FileNotFoundError as error:
        raise OSError(errno.ENOSYS, "the device has no list of bad blocks", str(device)) from error
    for line in lines:
        if line:
            sector, count = map(int, line.split()[:2])
            end_bytes = (sector + count) * _SECTOR_BYTES - start_bytes
            if end_bytes > 0:
                yield max(0, sector * _SECTOR_BYTES - start_bytes), end_bytes


def extents(fd: int) -> Iterator[tuple[int, Range]]:
    """Where the bytes of a file lie on its device: offset in the file, and begin and end on the device.

    Raises OSError: EOPNOTSUPP where the file system does not tell.
    """
    offset_bytes = 0
    while True:
        request = bytearray(_HEAD.pack(offset_bytes, (1 << 64) - 1 - offset_bytes, 0, 0, _EXTENTS, 0))
        request += bytes(_EXTENTS * _EXTENT.size)
        fcntl.ioctl(fd, _FIEMAP, request)
        mapped = _HEAD.unpack_from(request)[3]
        if not mapped:
            return
        for number in range(mapped):
            extent = _EXTENT.unpack_from(request, _HEAD.size + number * _EXTENT.size)
            logical, physical, length, flags = *extent[:3], extent[5]
            if not flags & _ELSEWHERE:
                yield logical, (physical, physical + length)
            offset_bytes = logical + length
            if flags & _LAST:
                return


def overlaps(found: Iterable[tuple[int, Range]], bad: Iterable[Range]) -> Iterator[int]:
    """The offsets in a file of what is bad on its device; of each pair that overlaps, the first byte."""
    bad = list(bad)
    for logical, (begin, end) in found:
        for bad_begin, bad_end in bad:
            first = max(begin, bad_begin)
            if first < min(end, bad_end):
                yield logical + first - begin
