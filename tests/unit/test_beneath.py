"""Nothing outside the export is ever opened, with openat2 and without."""

import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tierfs.catalog import beneath
from tierfs.catalog.beneath import open_directory_beneath, open_file_beneath, open_root


@pytest.fixture(params=["openat2", "by component"])
def root_fd(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    if request.param == "by component":
        # What a kernel before 5.6 answers; the walk that follows is the real one.
        monkeypatch.setattr(beneath, "_openat2", lambda *_: None)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_bytes(b"secret")
    export = tmp_path / "export"
    (export / "a/b").mkdir(parents=True)
    (export / "a/b/file").write_bytes(b"inside")
    os.symlink("../outside", export / "link-out")
    os.symlink("a/b", export / "link-in")
    os.symlink("/etc/passwd", export / "absolute")
    os.symlink("file", export / "a/b/link-to-file")
    fd = open_root(export)
    yield fd
    os.close(fd)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 100)
    finally:
        os.close(fd)


def test_a_file_beneath_opens_for_blocking_reads_and_is_not_inherited(root_fd: int) -> None:
    fd = open_file_beneath(root_fd, b"a/b/file")
    assert os.get_blocking(fd) and not os.get_inheritable(fd)
    assert _read(fd) == b"inside"


@pytest.mark.parametrize(
    "path",
    [b"../outside/secret", b"a/../../outside/secret", b"/etc/passwd", b"", b".", b"a//b/file", b"a/b/file/", b"a/\0"],
)
def test_an_unsound_path_is_refused(root_fd: int, path: bytes) -> None:
    with pytest.raises(OSError) as caught:
        open_file_beneath(root_fd, path)
    assert caught.value.errno == errno.EXDEV


@pytest.mark.parametrize("path", [b"link-out/secret", b"link-in/file", b"absolute", b"a/b/link-to-file"])
def test_no_symlink_is_followed_not_even_to_the_inside(root_fd: int, path: bytes) -> None:
    with pytest.raises(OSError) as caught:
        open_file_beneath(root_fd, path)
    assert caught.value.errno in (errno.ELOOP, errno.ENOTDIR)


def test_a_fifo_neither_blocks_nor_opens(root_fd: int, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "export/fifo")
    with pytest.raises(OSError, match="not a regular file"):
        open_file_beneath(root_fd, b"fifo")


def test_a_directory_is_no_file_and_a_file_no_directory(root_fd: int) -> None:
    with pytest.raises(OSError, match="not a regular file"):
        open_file_beneath(root_fd, b"a/b")
    with pytest.raises(NotADirectoryError):
        open_directory_beneath(root_fd, b"a/b/file")


def test_names_that_are_no_utf8_and_names_with_newlines_open(root_fd: int, tmp_path: Path) -> None:
    name = b"\xff\xfe\n" + b"x" * 252
    with open(os.fsencode(tmp_path) + b"/export/" + name, "wb") as file:
        file.write(b"odd")
    assert _read(open_file_beneath(root_fd, name)) == b"odd"


def test_a_path_longer_than_the_kernel_takes_at_once_opens(root_fd: int) -> None:
    parts = [b"d" * 200] * 30
    at = os.dup(root_fd)
    for part in parts:
        os.mkdir(part, dir_fd=at)
        deeper = os.open(part, os.O_PATH | os.O_DIRECTORY, dir_fd=at)
        os.close(at)
        at = deeper
    os.close(os.open(b"deep", os.O_WRONLY | os.O_CREAT, dir_fd=at))
    os.close(at)
    assert _read(open_file_beneath(root_fd, b"/".join([*parts, b"deep"]))) == b""


def test_the_root_itself_can_be_listed(root_fd: int) -> None:
    fd = open_directory_beneath(root_fd, b"")
    try:
        assert "link-out" in os.listdir(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("opener", [open_file_beneath, open_directory_beneath])
def test_failures_leave_no_descriptor(root_fd: int, opener: Callable[[int, bytes], int]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for path in (b"a/b/none", b"a/none/x", b"link-out/secret", b"absolute"):
        with pytest.raises(OSError):
            opener(root_fd, path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_name_that_is_swapped_for_a_link_again_and_again_never_leads_out(root_fd: int, tmp_path: Path) -> None:
    """Neither the file itself nor a directory above it."""
    export = tmp_path / "export"
    (tmp_path / "outside/b").mkdir()
    (tmp_path / "outside/b/file").write_bytes(b"secret")
    os.symlink("../../../outside/secret", export / "a/b/other")
    os.symlink("../outside", tmp_path / "other")
    libc = ctypes.CDLL(None, use_errno=True)
    over = threading.Event()

    def swap() -> None:
        pairs = [(export / "a/b/file", export / "a/b/other"), (export / "a", tmp_path / "other")]
        while not over.is_set():
            for pair in pairs:
                libc.renameat2(-100, bytes(pair[0]), -100, bytes(pair[1]), 2)  # RENAME_EXCHANGE

    thread = threading.Thread(target=swap)
    thread.start()
    found: list[bytes | int | None] = []
    try:
        deadline_s = time.monotonic() + 1
        while time.monotonic() < deadline_s:
            try:
                found.append(_read(open_file_beneath(root_fd, b"a/b/file")))
            except OSError as error:
                found.append(error.errno)
    finally:
        over.set()
        thread.join(10)
    assert b"inside" in found and errno.ELOOP in found, "it was swapped meanwhile"
    assert b"secret" not in found
