"""Publishing over what is being read: an open file keeps its version, a new open gets the new one, nothing is mixed."""

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.processes import Mount, Serve, drop_caches, eventually

pytestmark = pytest.mark.fuse

BLOCK = 4 << 20
OPTIONS = {"options": 'metadata_ttl = "500ms"\n'}


def replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(data)
    temporary.replace(path)


def test_a_new_version_of_equal_size_and_mtime_is_seen_and_the_old_descriptor_stays_old(
    tmp_path: Path, serve: Callable[..., Serve], mount: Callable[..., Mount]
) -> None:
    root = tmp_path / "models"
    root.mkdir()
    old, new = random.Random(1).randbytes(2 * BLOCK), random.Random(2).randbytes(2 * BLOCK)
    file = root / "model.bin"
    file.write_bytes(old)
    os.utime(file, ns=(10**18, 10**18))
    server = serve(root, "--set", "exports..rescan=200ms")
    mounted = mount(server.url, warm=f'path = "{tmp_path}/warm"\ncapacity = "1GiB"', **OPTIONS)
    path = mounted.path / "model.bin"
    with path.open("rb", buffering=0) as held:
        assert held.read() == old
        inode = os.fstat(held.fileno()).st_ino
        replace(file, new)
        os.utime(file, ns=(10**18, 10**18))
        eventually(lambda: path.read_bytes() == new, "a new open has the new version")
        assert path.stat().st_ino != inode
        drop_caches()
        assert os.pread(held.fileno(), len(old), 0) == old  # resident in warm under its own version
        eventually(lambda: os.fstat(held.fileno()).st_nlink == 0, "the open file has no name any more")
        assert os.fstat(held.fileno()).st_size == len(old)


def test_an_old_version_the_source_no_longer_has_is_stale_not_other_bytes(
    tmp_path: Path, serve: Callable[..., Serve], mount: Callable[..., Mount]
) -> None:
    root = tmp_path / "models"
    root.mkdir()
    file = root / "model.bin"
    file.write_bytes(random.Random(1).randbytes(8 * BLOCK))
    server = serve(root, "--set", "exports..rescan=200ms")
    mounted = mount(server.url, extra='[readahead]\nwindow_max = "4MiB"\n', **OPTIONS)
    with (mounted.path / "model.bin").open("rb", buffering=0) as held:
        want = file.read_bytes()[:4096]
        assert os.pread(held.fileno(), 4096, 0) == want
        file.write_bytes(random.Random(2).randbytes(8 * BLOCK))  # in place: the old bytes are gone
        eventually(
            lambda: (
                mounted.status()["catalog"]["generation"] > 1 and (mounted.path / "model.bin").read_bytes()[:1] != b""
            ),
            "a new generation",
        )
        with pytest.raises(OSError) as caught:
            os.pread(held.fileno(), 4096, 7 * BLOCK)
        assert caught.value.errno == errno.ESTALE


def test_replacing_again_and_again_under_readers_never_mixes_or_loses_a_version(
    tmp_path: Path, serve: Callable[..., Serve], mount: Callable[..., Mount]
) -> None:
    root = tmp_path / "models"
    root.mkdir()
    file = root / "model.bin"
    size = BLOCK + 4096

    def version(number: int) -> bytes:
        return bytes([number]) * size

    file.write_bytes(version(0))
    server = serve(root, "--set", "exports..rescan=100ms")
    mounted = mount(server.url, **OPTIONS)
    stop = threading.Event()
    wrong: list[str] = []
    seen: set[int] = set()

    def reader() -> None:
        while not stop.is_set():
            try:
                data = (mounted.path / "model.bin").read_bytes()
            except OSError as error:
                if error.errno != errno.ESTALE:
                    wrong.append(repr(error))
                continue
            if len(data) != size or data.count(data[0]) != size:
                wrong.append("mixed")
            seen.add(data[0])

    readers = [threading.Thread(target=reader) for _ in range(6)]
    for thread in readers:
        thread.start()
    for number in range(1, 12):
        replace(file, version(number))
        eventually(lambda number=number: number in seen or bool(wrong), f"version {number} is seen")
    stop.set()
    for thread in readers:
        thread.join(20)
        assert not thread.is_alive()
    assert wrong == []


def test_an_index_that_is_published_last_never_names_a_missing_shard(
    tmp_path: Path, serve: Callable[..., Serve], mount: Callable[..., Mount]
) -> None:
    root = tmp_path / "models"
    root.mkdir()
    (root / "index").write_text("0")
    (root / "shard-0").write_text("0")
    server = serve(root, "--set", "exports..rescan=50ms")
    mounted = mount(server.url, options='metadata_ttl = "0s"\n')
    stop = threading.Event()
    wrong: list[str] = []
    seen: set[int] = set()

    def loader() -> None:
        while not stop.is_set():
            try:
                number = int((mounted.path / "index").read_text())
                for shard in range(number + 1):
                    (mounted.path / f"shard-{shard}").read_text()
                seen.add(number)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    wrong.append(repr(error))

    loaders = [threading.Thread(target=loader) for _ in range(4)]
    for thread in loaders:
        thread.start()
    for number in range(1, 10):
        replace(root / f"shard-{number}", b"%d" % number)
        replace(root / "index", b"%d" % number)
        eventually(lambda number=number: number in seen or bool(wrong), f"index {number} is seen")
    stop.set()
    for thread in loaders:
        thread.join(20)
    assert wrong == []


def test_a_missing_path_appears_when_published(
    tmp_path: Path, serve: Callable[..., Serve], mount: Callable[..., Mount]
) -> None:
    root = tmp_path / "models"
    root.mkdir()
    mounted = mount(serve(root, "--set", "exports..rescan=200ms").url)
    assert not (mounted.path / "late.bin").exists()
    (root / "late.bin").write_text("here")
    eventually((mounted.path / "late.bin").exists, "the published file", within_s=10)


def test_files_that_have_not_settled_are_kept_out(
    tmp_path: Path, serve: Callable[..., Serve], mount: Callable[..., Mount]
) -> None:
    root = tmp_path / "models"
    root.mkdir()
    mounted = mount(serve(root, "--settle", "2s", "--set", "exports..rescan=200ms").url)
    growing = root / "growing.bin"
    with growing.open("wb") as file:
        for _ in range(10):
            file.write(b"x" * 1000)
            file.flush()
            assert not (mounted.path / "growing.bin").exists()
            threading.Event().wait(0.2)
    eventually((mounted.path / "growing.bin").exists, "the settled file", within_s=15)
    assert (mounted.path / "growing.bin").stat().st_size == 10_000


def test_warm_content_is_not_fetched_again_after_a_rename(
    tmp_path: Path, serve: Callable[..., Serve], mount: Callable[..., Mount]
) -> None:
    root = tmp_path / "models"
    root.mkdir()
    data = random.Random(3).randbytes(2 * BLOCK)
    (root / "one.bin").write_bytes(data)
    server = serve(root, "--set", "exports..rescan=200ms")
    mounted = mount(server.url, warm=f'path = "{tmp_path}/warm"\ncapacity = "1GiB"', **OPTIONS)
    eventually(lambda: "user.tierfs.content" in os.listxattr(mounted.path / "one.bin"), "the content id is known")
    assert (mounted.path / "one.bin").read_bytes() == data
    eventually(lambda: mounted.status()["tiers"]["warm"]["written_blocks"] == 2, "resident in warm")
    (root / "one.bin").rename(root / "two.bin")
    eventually(
        lambda: (mounted.path / "two.bin").exists() and "user.tierfs.content" in os.listxattr(mounted.path / "two.bin"),
        "the new name with its content id",
    )
    drop_caches()
    assert (mounted.path / "two.bin").read_bytes() == data
    assert mounted.status()["source"]["fetched_blocks"] == 2
