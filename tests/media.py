"""A disk that breaks for tests: ext4 on a loop device whose image loses its end, so that reads there are errors (EIO).

Needs root and losetup(8); see ``can_break``.
"""

import fcntl
import os
import shutil
import struct
import subprocess
from pathlib import Path

_FIEMAP = 0xC020660B
_HEAD = struct.Struct("=QQIIII")
_EXTENT = struct.Struct("=QQQQQIIII")
_EXTENTS = 64


def can_break() -> bool:
    """Whether such a disk can be made here."""
    tools = all(shutil.which(tool) for tool in ("losetup", "mkfs.ext4", "mount", "umount"))
    return tools and os.geteuid() == 0 and Path("/dev/loop-control").exists()


class Disk:
    """A file system of its own at ``path`` until ``close``."""

    def __init__(self, work: Path, *, size_bytes: int = 64 << 20) -> None:
        work.mkdir()
        self.path = work / "disk"
        self.path.mkdir()
        self.image = work / "image"
        self.image.touch()
        os.truncate(self.image, size_bytes)
        # No journal: nothing but data is written behind the start of the device.
        subprocess.run(["mkfs.ext4", "-q", "-b", "4096", "-O", "^has_journal", str(self.image)], check=True)
        made = subprocess.run(["losetup", "-f", "--show", self.image], check=True, capture_output=True, text=True)
        self._device = made.stdout.strip()
        try:
            subprocess.run(["mount", self._device, self.path], check=True)
        except BaseException:
            subprocess.run(["losetup", "-d", self._device], check=False)
            raise

    def break_end(self, file: Path) -> int:
        """Where a part of that file, of half a mebibyte at least, begins that cannot be read any more.

        It is half of what lies last on the device, and what follows it there. The page cache forgets the file.
        """
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            request = bytearray(_HEAD.pack(0, 1 << 62, 1, 0, _EXTENTS, 0) + bytes(_EXTENTS * _EXTENT.size))
            fcntl.ioctl(opened, _FIEMAP, request)
            mapped = _HEAD.unpack_from(request)[3]
            extents = [_EXTENT.unpack_from(request, _HEAD.size + n * _EXTENT.size)[:3] for n in range(mapped)]
            large = [extent for extent in extents if extent[2] >= 1 << 20]
            logical, physical, length = max(large, key=lambda extent: extent[1])
            half = length // 2 & ~0xFFFF
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.truncate(self.image, physical + half)
        return int(logical + half)

    def read_sectors(self) -> int:
        """How much has been read from the device."""
        name = Path(self._device).name
        return int(Path(f"/sys/block/{name}/stat").read_text().split()[2])

    def close(self) -> None:
        """Unmount it, whoever still uses it, and give the device back."""
        subprocess.run(["umount", "-l", self.path], check=False)
        subprocess.run(["losetup", "-d", self._device], check=False)
