"""Objects on one device: a directory of sparse files, one per content, each of its full length.
Called by the local tiers.

    root/format        the version of this layout; a newer one is refused
    root/lock          flocked by the daemon that owns the directory; holds its pid
    root/reserve       space that is given up so that an eviction can be recorded on a full device
    root/objects/ab/abcd…   32 hex digits of the object's name
    root/dying/abcd….N      an evicted object that somebody may still map

Every function here blocks and is called in a thread, with descriptors and buffers only. What must hold: no symlink is
followed below the root; nothing is written past the length of the file, so a tail is never padded; bytes that were
written are durable only after ``sync_written``.
"""

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import mmap
import os
import re
import signal
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierfs.blocks.errors import TierFailed
from tierfs.tiers.interface import LentFile

_log = logging.getLogger(__name__)

FORMAT = 2  # 1 had no dying objects, and its residency does not know which objects were handed out
# O_DIRECT wants addresses, offsets and lengths in multiples of the logical block; a page is one on every device.
PAGE_BYTES = 4096
# From this many dirty objects on, one syncfs is cheaper than an fdatasync (a journal commit) for each.
SYNCFS_FROM = 16
# A transaction that forgets a few objects writes some dozens of pages.
_RESERVE_BYTES = 1 << 20
_NAME = re.compile(r"[0-9a-f]{32}")
_MAP_SHARED_VALIDATE, _MAP_SYNC = 0x03, 0x80000  # asm-generic/mman.h; the mmap module of Python 3.11 has neither,
_MADV_POPULATE_READ = 22  # nor this one
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(eq=False)
class OpenObject:
    """The descriptors of one object. ``users`` counts those who may use them now; see descriptors.py."""

    fd: int
    direct_fd: int | None
    size_bytes: int
    users: int = 0
    retired: bool = False
    mapping: memoryview | None = None
    lent: LentFile | None = None  # what the channel has of it; taken back before it is closed
    lend_again_s: float = 0.0  # on trio's clock: the channel refused it, and is not asked before
    synchronous: bool = False  # on persistent memory: see ObjectStore
    read_only: bool = False  # the file system was when it was opened: not for writing

    def reopen(self) -> int:
        """A read-only descriptor of the very same file, with a file description of its own. Raises OSError.

        By /proc, since by its name another file might be found. It does not wait for a local disk: the inode is in
        memory. A network's file system may ask its server.
        """
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY)

    def map(self) -> memoryview:
        """The whole object as a read-only view. Python code must not read it: a vanished page is SIGBUS.

        Raises OSError."""
        if self.mapping is None:
            flags = _MAP_SHARED_VALIDATE | _MAP_SYNC if self.synchronous else mmap.MAP_SHARED
            self.mapping = memoryview(mmap.mmap(self.fd, self.size_bytes, flags, mmap.PROT_READ))
        return self.mapping

    def view(self, offset_bytes: int, length_bytes: int) -> memoryview:
        """Some bytes of the mapping, for the kernel to copy. Raises OSError where they cannot be mapped.

        On persistent memory its pages are faulted in here: for a bad block that is an error, and no SIGBUS, while the
        kernel's copy would only fail, and the reader with it.
        """
        mapping = self.map()
        if self.synchronous:
            first_bytes = offset_bytes // PAGE_BYTES * PAGE_BYTES
            assert isinstance(mapping.obj, mmap.mmap)
            try:
                mapping.obj.madvise(_MADV_POPULATE_READ, first_bytes, offset_bytes + length_bytes - first_bytes)
            except OSError as error:
                if error.errno != errno.EINVAL:  # Linux before 5.14
                    raise
        return mapping[offset_bytes : offset_bytes + length_bytes]

    def close(self) -> None:
        """Close the descriptors. A mapping goes with its last view."""
        self.mapping = None
        os.close(self.fd)
        if self.direct_fd is not None:
            os.close(self.direct_fd)


class ObjectStore:
    """The objects of one directory. ``synchronous``: mappings of objects are MAP_SYNC, that is, persistent memory."""

    def __init__(self, root: Path, *, mapped: bool = False) -> None:
        self.root = root
        self.direct = False
        self.nowait = True  # whether the file system knows RWF_NOWAIT; where not, fstat may have to wait for it, too
        self.medium = "directory"
        self.synchronous = False
        self._mapped = mapped
        self._root_fd = -1
        self._objects_fd = -1
        self._dying_fd = -1
        self._lock_fd = -1
        self._outdated = False

    def open(self) -> None:
        """Make the directories, take the lock, check the format, and find out what the file system can do.

        Raises TierFailed when another process has the lock or the format is newer, OSError when the medium fails.
        """
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._root_fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
            self._take_lock()
            self._check_format()
            self._objects_fd = self._make_folder("objects")
            self._dying_fd = self._make_folder("dying")
            self.medium = medium_of(self._root_fd)
            self.direct = not self._mapped and self._can_direct()
            self.nowait = self._can_nowait()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give up the lock and the directories."""
        for name in ("_objects_fd", "_dying_fd", "_lock_fd", "_root_fd"):
            fd = getattr(self, name)
            if fd >= 0:
                os.close(fd)
                setattr(self, name, -1)

    def present(self) -> bool:
        """Whether the root's path still names the directory that was opened."""
        try:
            now, then = os.stat(self.root), os.fstat(self._root_fd)
            os.stat("objects", dir_fd=self._root_fd, follow_symlinks=False)
        except OSError:
            return False
        return (now.st_dev, now.st_ino) == (then.st_dev, then.st_ino)

    def check_writable(self) -> None:
        """Write a little file durably and remove it. Raises OSError."""
        fd = os.open("probe", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600, dir_fd=self._root_fd)
        try:
            write_all(fd, memoryview(bytes(64 << 10)), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink("probe", dir_fd=self._root_fd)

    def fill_reserve(self) -> None:
        """Set a little space aside, as far as there is any."""
        fd = os.open("reserve", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=self._root_fd)
        try:
            os.posix_fallocate(fd, 0, _RESERVE_BYTES)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EOPNOTSUPP, errno.EDQUOT):
                raise
        finally:
            os.close(fd)

    def free_reserve(self) -> None:
        """Give the space that was set aside back to the file system."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink("reserve", dir_fd=self._root_fd)

    def device_number(self) -> int:
        """The device of the directory, so that two paths on one file system are known as such."""
        return os.fstat(self._root_fd).st_dev

    def size_bytes(self) -> int:
        """How large the file system is, for us and all others."""
        space = os.fstatvfs(self._root_fd)
        return (space.f_blocks - space.f_bfree + space.f_bavail) * space.f_frsize

    def free_bytes(self) -> int:
        """What the file system would give us now."""
        space = os.fstatvfs(self._root_fd)
        return space.f_bavail * space.f_frsize

    def open_object(self, name: bytes, size_bytes: int, *, create: bool = False) -> OpenObject:
        """Open an object, or make it as a hole of its full length. Raises OSError."""
        folder, leaf = self._names(name)
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700, dir_fd=self._objects_fd)
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._objects_fd)
        try:
            access = os.O_RDWR
            try:
                fd = os.open(leaf, access | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o600, dir_fd=folder_fd)
            except OSError as error:
                if create or error.errno != errno.EROFS:
                    raise
                access = os.O_RDONLY
                fd = os.open(leaf, access | os.O_NOFOLLOW, dir_fd=folder_fd)
            try:
                if create and os.fstat(fd).st_size != size_bytes:
                    os.ftruncate(fd, size_bytes)
                direct_fd = None
                if self.direct:
                    direct_fd = os.open(leaf, access | os.O_NOFOLLOW | os.O_DIRECT, dir_fd=folder_fd)
            except BaseException:
                os.close(fd)
                raise
            read_only = access == os.O_RDONLY
            return OpenObject(fd, direct_fd, size_bytes, synchronous=self.synchronous, read_only=read_only)
        finally:
            os.close(folder_fd)

    def unlink(self, name: bytes) -> None:
        """Remove an object; one that is not there is no error. Raises OSError."""
        folder, leaf = self._names(name)
        with contextlib.suppress(FileNotFoundError):
            folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._objects_fd)
            try:
                os.unlink(leaf, dir_fd=folder_fd)
            finally:
                os.close(folder_fd)

    def bury(self, name: bytes) -> str | None:
        """Move an object to the dying ones; its name there, None when it is not there. Raises OSError."""
        folder, leaf = self._names(name)
        number = 0
        while _exists(f"{leaf}.{number}", self._dying_fd):
            number += 1
        try:
            folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._objects_fd)
        except FileNotFoundError:
            return None
        try:
            os.rename(leaf, f"{leaf}.{number}", src_dir_fd=folder_fd, dst_dir_fd=self._dying_fd)
        except FileNotFoundError:
            return None
        finally:
            os.close(folder_fd)
        return f"{leaf}.{number}"

    def sweep(self, name: bytes) -> str | None:
        """Remove an object that may have been handed out by an earlier run: None, or its name among the dying ones.

        Raises OSError.
        """
        folder, leaf = self._names(name)
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._objects_fd)
        try:
            return None if unlink_unmapped(leaf, folder_fd) else self.bury(name)
        finally:
            os.close(folder_fd)

    def dying(self) -> list[tuple[str, int]]:
        """The dying objects of earlier runs: name and allocated bytes. Raises OSError."""
        return [
            (leaf, allocated_bytes(os.stat(leaf, dir_fd=self._dying_fd, follow_symlinks=False)))
            for leaf in os.listdir(self._dying_fd)
        ]

    def dying_folder(self) -> int:
        """A descriptor of the folder of dying objects, the caller's own. Never waits. Raises OSError when closed."""
        return os.dup(self._dying_fd)

    def upgrade_format(self) -> None:
        """Say that this directory has the format of today: last, when all else of it has. Raises OSError."""
        if self._outdated:
            self._write_format()
            self._outdated = False
            _log.warning("tier_format_upgraded path=%s format=%d", self.root, FORMAT)

    def scan(self) -> Iterator[tuple[bytes, os.stat_result]]:
        """Every object on the device: its name and its lstat (a symlink shows as one). Raises OSError."""
        for folder in sorted(os.listdir(self._objects_fd)):
            if len(folder) != 2:
                continue
            try:
                folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._objects_fd)
            except NotADirectoryError:
                continue
            try:
                for leaf in os.listdir(folder_fd):
                    if _NAME.fullmatch(leaf) and leaf.startswith(folder):
                        yield bytes.fromhex(leaf), os.stat(leaf, dir_fd=folder_fd, follow_symlinks=False)
            finally:
                os.close(folder_fd)

    def sync_written(self, objects: Sequence[OpenObject]) -> None:
        """Make durable what was written to these objects. Raises OSError."""
        if self.medium == "tmpfs":
            return
        if len(objects) < SYNCFS_FROM:
            for opened in objects:
                os.fdatasync(opened.fd)
        elif _libc.syncfs(self._root_fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(self.root))

    @staticmethod
    def _names(name: bytes) -> tuple[str, str]:
        leaf = name.hex()
        return leaf[:2], leaf

    def _take_lock(self) -> None:
        self._lock_fd = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=self._root_fd)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock_fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise TierFailed(
                f"tier directory {self.root} is in use by process {holder}: "
                "stop that daemon, or give this one another directory"
            ) from error
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)

    def _check_format(self) -> None:
        try:
            fd = os.open("format", os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._root_fd)
        except FileNotFoundError:
            self._write_format()
            return
        try:
            text = _format_text(fd)
        finally:
            os.close(fd)
        self._outdated = _known_format(self.root, text) < FORMAT

    def _write_format(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        fd = os.open("format.new", flags, 0o600, dir_fd=self._root_fd)
        try:
            os.write(fd, f"{FORMAT}\n".encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename("format.new", "format", src_dir_fd=self._root_fd, dst_dir_fd=self._root_fd)

    def _make_folder(self, name: str) -> int:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self._root_fd)
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._root_fd)

    def _can_nowait(self) -> bool:
        try:
            os.preadv(self._lock_fd, [bytearray(1)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            return True
        except OSError as error:
            return error.errno != errno.EOPNOTSUPP
        return True

    def _can_direct(self) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_DIRECT
        page = mmap.mmap(-1, PAGE_BYTES)
        try:
            fd = os.open("probe", flags, 0o600, dir_fd=self._root_fd)
            try:
                return os.pwrite(fd, page, 0) == PAGE_BYTES
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSPC):
                raise
            return False
        finally:
            page.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink("probe", dir_fd=self._root_fd)


def check_format(root: Path) -> None:
    """Whether this tierfs may use a tier's directory, which a daemon may have open. Raises TierFailed."""
    try:
        fd = os.open(root / "format", os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return  # what cannot be read is for the daemon to say
    try:
        _known_format(root, _format_text(fd))
    finally:
        os.close(fd)


def _format_text(fd: int) -> str:
    return os.read(fd, 64).decode("ascii", "replace").strip()


def _known_format(root: Path, text: str) -> int:
    if not text.isdigit():
        raise TierFailed(f"{root}/format says {text!r}, which is no version: use an empty directory")
    if int(text) > FORMAT:
        raise TierFailed(
            f"tier directory {root} has format {text}, this tierfs knows up to {FORMAT}: "
            "upgrade tierfs, or use another directory"
        )
    return int(text)


def medium_of(directory_fd: int) -> str:
    """What the directory lies on: ``tmpfs``, ``dax``, or ``directory`` for every other file system."""
    number = os.fstat(directory_fd).st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    found = "directory"
    with Path("/proc/self/mountinfo").open(encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            fields = line.split()
            if fields[2] != wanted:
                continue
            kind, _, options = fields[fields.index("-") + 1 :][:3]
            flags = options.split(",")
            dax = "dax" in flags or "dax=always" in flags
            found = "tmpfs" if kind in ("tmpfs", "ramfs") else "dax" if dax else "directory"
    return found


def allocated_bytes(status: os.stat_result) -> int:
    """The space an object takes on its device."""
    return status.st_blocks * 512


def is_object(status: os.stat_result, size_bytes: int) -> bool:
    """Whether this is a regular file of that length."""
    return stat.S_ISREG(status.st_mode) and status.st_size == size_bytes


def unlink_unmapped(leaf: str, folder_fd: int) -> bool:
    """Unlink a file unless somebody maps it or has it open; False then. One that is gone is no error. Raises OSError.

    Nobody counts the maps of a file that was handed out, but a write lease on it is refused while there is one. Where
    the file system knows no leases it is unlinked at once.
    """
    try:
        fd = os.open(leaf, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_fd)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EACCES):
            raise
        os.unlink(leaf, dir_fd=folder_fd)  # no regular file, or no file of ours
        return True
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode) and not _lease(fd):
            return False
        os.unlink(leaf, dir_fd=folder_fd)
        return True
    finally:
        os.close(fd)


def _lease(fd: int) -> bool:
    """Whether this is the only open file of it."""
    try:
        # Somebody who opens the file just now breaks the lease: SIGIO would end this process, SIGURG does nothing.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EINVAL, errno.EACCES):
            return False
        _log_no_leases(os.fstat(fd).st_dev, error.strerror)
    return True


@functools.cache  # once per device
def _log_no_leases(device: int, reason: str) -> None:
    _log.warning("leases_not_supported device=%d:%d reason=%r: the space of an evicted object counts as free while it "
                 "is mapped", os.major(device), os.minor(device), reason)  # fmt: skip


def _exists(leaf: str, folder_fd: int) -> bool:
    try:
        os.stat(leaf, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def write_block(opened: OpenObject, offset_bytes: int, data: memoryview) -> None:
    """Write one block: the aligned part past the page cache where that works, the rest through it. Raises OSError.

    Not durable yet, see ``ObjectStore.sync_written``; afterwards ``drop_cached`` frees the page cache of it.
    """
    done = 0
    if opened.direct_fd is not None and _page_aligned(data) and offset_bytes % PAGE_BYTES == 0:
        whole = len(data) - len(data) % PAGE_BYTES
        try:
            while done < whole and done % PAGE_BYTES == 0:
                done += os.pwrite(opened.direct_fd, data[done:whole], offset_bytes + done)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: this device wants a larger alignment than a page
                raise
    write_all(opened.fd, data[done:], offset_bytes + done)


def read_block(opened: OpenObject, offset_bytes: int, buffer: memoryview) -> bool:
    """Fill the buffer from the object; False when the file ends before. Raises OSError."""
    done = 0
    if opened.direct_fd is not None and _page_aligned(buffer) and offset_bytes % PAGE_BYTES == 0:
        whole = len(buffer) - len(buffer) % PAGE_BYTES
        try:
            while done < whole and done % PAGE_BYTES == 0:
                count = os.preadv(opened.direct_fd, [buffer[done:whole]], offset_bytes + done)
                if count == 0:
                    return False
                done += count
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    while done < len(buffer):
        count = os.preadv(opened.fd, [buffer[done:]], offset_bytes + done)
        if count == 0:
            return False
        done += count
    return True


def drop_cached(opened: OpenObject, offset_bytes: int, length_bytes: int) -> None:
    """Take written, synced bytes out of the page cache, so that filling does not push out what readers use."""
    os.posix_fadvise(opened.fd, offset_bytes, length_bytes, os.POSIX_FADV_DONTNEED)


def write_all(fd: int, data: memoryview, offset_bytes: int) -> None:
    """Write all of it. Raises OSError."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset_bytes + done)


def _page_aligned(view: memoryview) -> bool:
    if view.readonly or len(view) < PAGE_BYTES:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE_BYTES == 0
