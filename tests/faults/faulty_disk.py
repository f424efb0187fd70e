"""A disk that can be hurt: a FUSE over a directory, run as a process of its own, with faults switched at run time.

    python -m tests.faults.faulty_disk BACKING MOUNTPOINT        one fault a line on stdin, each answered by a line

    read_eio 0.1    that share of the reads fails       full 1        nothing can be written or made
    write_eio 0.1   likewise of the writes              read_only 1   as after errors=remount-ro
    stall 1         nothing is answered                 stall_sync 1  no sync is answered
    lose 1          what was written and not synced is undone, at once, as by a loss of power
    lose 0.5        that of files above 1 MiB only: a disk may write in any order

0 ends a fault. Names and lengths are kept as a journalled file system keeps them; only bytes are undone by ``lose``.
"""

import errno
import os
import random
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyfuse3
import trio

from tests.integration.processes import ENVIRONMENT, eventually

FAULTS = ("read_eio", "write_eio", "stall", "stall_sync", "full", "read_only", "lose")
_LARGE_BYTES = 1 << 20
_KEPT_S = 300.0  # names and attributes, in the kernel: nobody else changes them


class FaultyDisk(pyfuse3.Operations):
    """Inodes are those of the backing directory, each held by an O_PATH descriptor."""

    enable_writeback_cache = False

    def __init__(self, backing: str) -> None:
        super().__init__()
        self._at = {pyfuse3.ROOT_INODE: os.open(backing, os.O_PATH)}
        self._inode: dict[int, int] = {}  # of an open file
        self._unsynced: dict[int, list[tuple[int, bytes]]] = {}
        self._share = dict.fromkeys(FAULTS, 0.0)
        self._random = random.Random(7)
        self._answering = trio.Event()

    def suffer(self, fault: str, share: float) -> None:
        """Switch one fault."""
        self._share[fault] = share
        if fault in ("stall", "stall_sync"):
            self._answering.set()  # who waits looks again
            self._answering = trio.Event()
        if fault == "lose":
            self._lose(_LARGE_BYTES if share < 1 else 0)

    def _lose(self, from_bytes: int) -> None:
        for inode, before in self._unsynced.items():
            fd = os.open(f"/proc/self/fd/{self._at[inode]}", os.O_WRONLY)
            if os.fstat(fd).st_size < from_bytes:
                before = []
            for offset, data in reversed(before):
                os.pwrite(fd, data, offset)
            os.close(fd)
        self._unsynced.clear()

    async def _meet(self, *, writes: bool = False, grows: bool = False, syncs: bool = False) -> None:
        while self._share["stall"] or (syncs and self._share["stall_sync"]):
            await self._answering.wait()
        if writes and self._share["read_only"]:
            raise pyfuse3.FUSEError(errno.EROFS)
        if grows and self._share["full"]:
            raise pyfuse3.FUSEError(errno.ENOSPC)

    def _attributes(self, inode: int) -> pyfuse3.EntryAttributes:
        found = os.fstat(self._at[inode])
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        for name in ("mode", "nlink", "uid", "gid", "rdev", "size", "blocks", "atime_ns", "mtime_ns", "ctime_ns"):
            setattr(entry, f"st_{name}", getattr(found, f"st_{name}"))
        entry.attr_timeout = entry.entry_timeout = _KEPT_S
        return entry

    def _find(self, parent: int, name: bytes) -> pyfuse3.EntryAttributes:
        try:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._at[parent])
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from None
        inode = os.fstat(fd).st_ino
        if inode in self._at:
            os.close(fd)
        else:
            self._at[inode] = fd
        return self._attributes(inode)

    async def lookup(self, parent_inode: int, name: bytes, ctx: Any) -> pyfuse3.EntryAttributes:
        await self._meet()
        return self._find(parent_inode, name)

    async def getattr(self, inode: int, ctx: Any) -> pyfuse3.EntryAttributes:
        await self._meet()
        return self._attributes(inode)

    async def setattr(self, inode: int, attr: Any, fields: Any, fh: int | None, ctx: Any) -> pyfuse3.EntryAttributes:
        await self._meet(writes=True)
        path = f"/proc/self/fd/{self._at[inode]}"
        if fields.update_size:
            os.truncate(path, attr.st_size)
        if fields.update_mode:
            os.chmod(path, stat.S_IMODE(attr.st_mode))
        if fields.update_atime or fields.update_mtime:
            now = os.stat(path)
            os.utime(path, ns=(
                attr.st_atime_ns if fields.update_atime else now.st_atime_ns,
                attr.st_mtime_ns if fields.update_mtime else now.st_mtime_ns,
            ))  # fmt: skip
        return self._attributes(inode)

    async def open(self, inode: int, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        await self._meet(writes=flags & os.O_ACCMODE != os.O_RDONLY)
        return self._open(inode, flags)

    def _open(self, inode: int, flags: int) -> pyfuse3.FileInfo:
        kept = flags & (os.O_ACCMODE | os.O_TRUNC)
        access = os.O_RDWR if kept & os.O_ACCMODE == os.O_WRONLY else kept & os.O_ACCMODE
        fd = os.open(f"/proc/self/fd/{self._at[inode]}", access | kept & os.O_TRUNC)
        self._inode[fd] = inode
        return pyfuse3.FileInfo(fh=fd, keep_cache=True)

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: Any
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        await self._meet(writes=True, grows=True)
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, mode, dir_fd=self._at[parent_inode]))
        entry = self._find(parent_inode, name)
        return self._open(entry.st_ino, flags), entry

    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: Any) -> pyfuse3.EntryAttributes:
        await self._meet(writes=True, grows=True)
        try:
            os.mkdir(name, mode, dir_fd=self._at[parent_inode])
        except FileExistsError:
            raise pyfuse3.FUSEError(errno.EEXIST) from None
        return self._find(parent_inode, name)

    async def unlink(self, parent_inode: int, name: bytes, ctx: Any) -> None:
        await self._meet(writes=True)
        try:
            os.unlink(name, dir_fd=self._at[parent_inode])
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from None

    async def rmdir(self, parent_inode: int, name: bytes, ctx: Any) -> None:
        await self._meet(writes=True)
        try:
            os.rmdir(name, dir_fd=self._at[parent_inode])
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from None

    async def rename(self, parent_old: int, old: bytes, parent_new: int, new: bytes, flags: int, ctx: Any) -> None:
        await self._meet(writes=True)
        try:
            os.rename(old, new, src_dir_fd=self._at[parent_old], dst_dir_fd=self._at[parent_new])
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from None

    async def read(self, fh: int, off: int, size: int) -> bytes:
        await self._meet()
        if self._random.random() < self._share["read_eio"]:
            raise pyfuse3.FUSEError(errno.EIO)
        return os.pread(fh, size, off)

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        await self._meet(writes=True, grows=True)
        if self._random.random() < self._share["write_eio"]:
            raise pyfuse3.FUSEError(errno.EIO)
        before = os.pread(fh, len(buf), off)
        self._unsynced.setdefault(self._inode[fh], []).append((off, before.ljust(len(buf), b"\0")))
        return os.pwrite(fh, buf, off)

    async def fsync(self, fh: int, datasync: bool) -> None:
        await self._meet(syncs=True)
        self._unsynced.pop(self._inode[fh], None)

    async def release(self, fh: int) -> None:
        del self._inode[fh]
        os.close(fh)

    async def opendir(self, inode: int, ctx: Any) -> int:
        await self._meet()
        return inode

    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await self._meet()

    async def readdir(self, fh: int, start_id: int, token: Any) -> None:
        await self._meet()
        for number, name in enumerate(sorted(os.listdir(f"/proc/self/fd/{self._at[fh]}")), 1):
            entry = self._find(fh, name.encode())
            if number > start_id and not pyfuse3.readdir_reply(token, name.encode(), entry, number):
                return

    async def statfs(self, ctx: Any) -> pyfuse3.StatvfsData:
        await self._meet()
        now = os.statvfs(f"/proc/self/fd/{self._at[pyfuse3.ROOT_INODE]}")
        answer = pyfuse3.StatvfsData()
        for name in ("bsize", "frsize", "blocks", "bfree", "bavail", "files", "ffree", "favail", "namemax"):
            setattr(answer, f"f_{name}", getattr(now, f"f_{name}"))
        if self._share["full"]:
            answer.f_bfree = answer.f_bavail = 0
        return answer


async def _main(backing: str, mountpoint: str) -> None:
    disk = FaultyDisk(backing)
    options = set(pyfuse3.default_options) | {"fsname=faulty_disk"}
    pyfuse3.init(disk, mountpoint, options)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_listen, disk)
            await pyfuse3.main()
            nursery.cancel_scope.cancel()
    finally:
        pyfuse3.close(unmount=True)


async def _listen(disk: FaultyDisk) -> None:
    rest = b""
    async with trio.lowlevel.FdStream(os.dup(0)) as lines:
        async for some in lines:
            *whole, rest = (rest + some).split(b"\n")
            for line in whole:
                fault, share = line.decode().split()
                disk.suffer(fault, float(share))
                os.write(1, b"ok\n")
    pyfuse3.terminate()


class Disk:
    """A faulty disk that runs; ended by ``close`` or with this process."""

    def __init__(self, work: Path) -> None:
        self.backing = work / "disk.backing"
        self.path = work / "disk"
        self.backing.mkdir()
        self.path.mkdir()
        self.start()

    def start(self) -> None:
        """Mount it, again after a ``close``."""
        command = [sys.executable, "-m", "tests.faults.faulty_disk", str(self.backing), str(self.path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT)
        eventually(lambda: self.path.is_mount() or self._process.poll() is not None, "the disk is mounted")
        assert self._process.poll() is None

    def suffer(self, fault: str, share: float = 1) -> None:
        """Switch one fault; 0 ends it. See the head of the file."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{fault} {share}\n".encode())
        self._process.stdin.flush()
        assert self._process.stdout.readline() == b"ok\n"

    @contextmanager
    def suffering(self, fault: str, share: float = 1) -> Iterator[float]:
        """With a fault, from the yielded time on."""
        self.suffer(fault, share)
        try:
            yield time.monotonic()
        finally:
            self.suffer(fault, 0)

    def close(self) -> None:
        """Unmount, whatever state it is in."""
        subprocess.run(["umount", "-l", str(self.path)], capture_output=True, check=False)
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":
    trio.run(_main, *sys.argv[1:])
