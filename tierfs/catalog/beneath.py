"""Open a path beneath a directory, and nothing else: whatever the tree looks like by now, no step leaves it.

Called by the scanner and by the directory source, in threads. openat2(2) does it in one call where the kernel has it;
otherwise each component is opened in turn without following links. In both ways no symlink is followed anywhere, so a
path that was a directory when it was scanned and is a link by now gives an error, never another file.
"""

import ctypes
import errno
import os
import stat
import struct

_SYS_OPENAT2 = 437  # the same number on every architecture
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
_RESOLVE = _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS
_PATH_MAX = 4096  # with the closing NUL; a longer path can only be walked

# O_NONBLOCK: a fifo put in the place of a file must not hold the thread that opens it.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)


def open_root(path: bytes | str | os.PathLike[str]) -> int:
    """A descriptor of the export's root, for the other functions here. The root's own path may contain symlinks.

    Raises OSError. The caller closes it.
    """
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def open_file_beneath(root_fd: int, path: bytes) -> int:
    """A read-only descriptor of the regular file at ``path`` (bytes, relative, no ``.`` or ``..``) beneath the root.

    Raises OSError: as open(2) does, ELOOP or ENOTDIR where a symlink is in the way, EINVAL for what is no regular
    file. The caller closes it.
    """
    fd = open_beneath(root_fd, path, _FILE_FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        os.set_blocking(fd, True)  # only the open must not wait; some file systems pass the flag on to reads
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_directory_beneath(root_fd: int, path: bytes, *, look_only: bool = False) -> int:
    """A descriptor of the directory at ``path`` beneath the root; the root itself where it is empty.

    With ``look_only`` it can be given to fstat, nothing more, and the directory need not be readable.
    Raises OSError. The caller closes it.
    """
    flags = _LOOK_FLAGS if look_only else _DIRECTORY_FLAGS
    if not path:
        return os.open(b".", flags, dir_fd=root_fd)
    return open_beneath(root_fd, path, flags)


def open_beneath(root_fd: int, path: bytes, flags: int) -> int:
    """Open with these flags (which should hold O_NOFOLLOW and O_CLOEXEC). Raises OSError; EXDEV for an unsound path."""
    parts = path.split(b"/")
    if b"\0" in path or any(part in (b"", b".", b"..") for part in parts):
        raise OSError(errno.EXDEV, "not a path beneath the export", path)
    if len(path) < _PATH_MAX:
        fd = _openat2(root_fd, path, flags)
        if fd is not None:
            return fd
    return _open_by_component(root_fd, parts, flags, path)


def _openat2(root_fd: int, path: bytes, flags: int) -> int | None:
    """The descriptor, or None where this kernel (or a seccomp filter) does not offer openat2."""
    how = struct.pack("=QQQ", flags, 0, _RESOLVE)
    fd = int(
        _libc.syscall(
            ctypes.c_long(_SYS_OPENAT2),
            ctypes.c_int(root_fd),
            ctypes.c_char_p(path),
            ctypes.c_char_p(how),
            ctypes.c_size_t(len(how)),
        )
    )
    if fd >= 0:
        return fd
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EPERM):
        # EPERM may also come from the file; then the walk by components gives the same answer.
        return None
    raise OSError(code, os.strerror(code), path)


def _open_by_component(root_fd: int, parts: list[bytes], flags: int, path: bytes) -> int:
    at = root_fd
    try:
        for part in parts[:-1]:
            deeper = os.open(part, _LOOK_FLAGS, dir_fd=at)
            if at != root_fd:
                os.close(at)
            at = deeper
        return os.open(parts[-1], flags, dir_fd=at)
    except OSError as error:
        error.filename = path
        raise
    finally:
        if at != root_fd:
            os.close(at)
