"""What each file operation promises (docs/SEMANTICS.md), on a real mount of a real server, cold and then warm."""

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import random
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.processes import Mount, Serve, drop_caches, eventually, tierfs

pytestmark = pytest.mark.fuse

BLOCK = 4 << 20
SIZES = sorted(
    {0, 1, 2, 511, 513, (8 << 20) + 4097}
    | {border + delta for border in (4096, 128 << 10, 1 << 20, BLOCK) for delta in (-1, 0, 1)}
)
NAMES = [
    "é.bin",
    "e\u0301.bin",
    "模型-权重.safetensors",
    "a b\tc.bin",
    "new\nline",
    "-rf",
    "x" * 255,
    "q'\"$`\\",
    ".hidden",
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    root.chmod(0o755)
    rng = random.Random(7)
    (root / "sizes").mkdir()
    for size in SIZES:
        (root / "sizes" / str(size)).write_bytes(rng.randbytes(size))
    (root / "names").mkdir()
    for name in NAMES:
        (root / "names" / name).write_text(name)
    (root / "names" / os.fsdecode(b"\xff\xfe.bin")).write_text("not utf-8")
    hub = root / "hub" / "models--org--m"
    (hub / "blobs").mkdir(parents=True)
    for revision in ("rev1", "rev2"):
        (hub / "snapshots" / revision).mkdir(parents=True)
    for number in range(3):
        blob = hub / "blobs" / f"{number:064x}"
        blob.write_bytes(rng.randbytes(200_000 + number))
        for revision in ("rev1", "rev2"):
            (hub / "snapshots" / revision / f"model-{number}.bin").symlink_to(f"../../blobs/{blob.name}")
    (root / "dangling").symlink_to("nowhere/at-all")
    (root / "big.bin").write_bytes(rng.randbytes(3 * BLOCK + 12345))
    os.link(root / "big.bin", root / "hard.bin")
    os.utime(root / "big.bin", ns=(1_700_000_000_123_456_789, 1_700_000_000_123_456_789))
    os.chmod(root / "sizes" / "513", 0o640)
    with (root / "sparse.bin").open("wb") as file:
        file.truncate(5 << 30)
        for offset in (0, (1 << 31) - 8, 1 << 32, (5 << 30) - 16):
            file.seek(offset)
            file.write(offset.to_bytes(8, "little") + b"8 bytes.")
    return root


@pytest.fixture(scope="module", params=["cold", "warm"])
def mounted(request: pytest.FixtureRequest, tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tree through a mount: every test runs over an empty and then over a filled warm tier."""
    work = tmp_path_factory.mktemp(f"work-{request.param}")
    server = Serve(tree, work)
    instance = Mount(server.url, work, warm=f'path = "{work}/warm"\ncapacity = "2GiB"')
    try:
        instance.mount()
        if request.param == "warm":
            for name in ("sizes", "names", "hub", "big.bin"):
                tierfs("warm", instance.path / name)
            drop_caches()
        yield instance.path
    finally:
        instance.cleanup()
        server.stop()


def refused(call: Callable[[], object]) -> int | None:
    try:
        call()
    except OSError as error:
        return error.errno
    return None


@pytest.mark.smoke
def test_every_size_is_read_whole_in_parts_and_by_map(mounted: Path, tree: Path) -> None:
    for size in SIZES:
        want = (tree / "sizes" / str(size)).read_bytes()
        path = mounted / "sizes" / str(size)
        assert path.stat().st_size == size
        assert path.read_bytes() == want
        with path.open("rb") as file:
            for offset in range(max(0, size - 3), size + 2):
                assert os.pread(file.fileno(), 8192, offset) == want[offset : offset + 8192], (size, offset)
            assert os.pread(file.fileno(), 100, size + 4096) == b""
            if size:
                with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                    assert mapped[:] == want


def test_first_touch_without_stat_has_the_full_size(mounted: Path, tree: Path) -> None:
    drop_caches()
    with (mounted / "big.bin").open("rb", buffering=0) as file:
        assert file.read(1 << 30) == (tree / "big.bin").read_bytes()


@pytest.mark.smoke
def test_maps_of_both_kinds_and_advice(mounted: Path, tree: Path) -> None:
    want = hashlib.sha256((tree / "big.bin").read_bytes()).digest()
    with (mounted / "big.bin").open("rb") as file:
        for kind in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
            with mmap.mmap(file.fileno(), 0, flags=kind, prot=mmap.PROT_READ) as mapped:
                for advice in (mmap.MADV_WILLNEED, mmap.MADV_SEQUENTIAL, mmap.MADV_RANDOM):
                    mapped.madvise(advice)
                assert hashlib.sha256(mapped).digest() == want
        with mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as private:
            private[5] = (private[5] + 1) % 256
        assert os.pread(file.fileno(), 1, 5) == (tree / "big.bin").read_bytes()[5:6]


def test_direct_reads(mounted: Path, tree: Path) -> None:
    want = (tree / "big.bin").read_bytes()
    descriptor = os.open(mounted / "big.bin", os.O_RDONLY | os.O_DIRECT)
    try:
        for offset, length in ((0, 1 << 20), (4096, 8 << 20), (len(want) // 4096 * 4096, 8192), (777, 5000)):
            with mmap.mmap(-1, -(-length // 4096) * 4096) as memory:
                count = os.preadv(descriptor, [memoryview(memory)[:length]], offset)
                assert memory[:count] == want[offset : offset + length]
    finally:
        os.close(descriptor)


def test_kernel_copies_are_equal_or_refused(mounted: Path, tree: Path, tmp_path: Path) -> None:
    want = (tree / "sizes" / str((1 << 20) + 1)).read_bytes()
    with (mounted / "sizes" / str((1 << 20) + 1)).open("rb") as source, (tmp_path / "copy").open("w+b") as copy:
        done = 0
        while done < len(want):
            count = os.sendfile(copy.fileno(), source.fileno(), done, 1 << 18)
            assert count > 0
            done += count
        copy.seek(0)
        assert copy.read() == want
        code = refused(lambda: os.copy_file_range(source.fileno(), copy.fileno(), 100, 0, 0))
        assert code in (None, errno.EXDEV, errno.EOPNOTSUPP)


def test_beyond_four_gib(mounted: Path) -> None:
    with (mounted / "sparse.bin").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        for offset in (0, (1 << 31) - 8, 1 << 32, (5 << 30) - 16):
            marker = offset.to_bytes(8, "little") + b"8 bytes."
            assert os.pread(file.fileno(), 16, offset) == marker
            assert mapped[offset : offset + 16] == marker
        assert os.pread(file.fileno(), 4096, 3 << 30) == bytes(4096)


def test_seek_data_and_hole_end(mounted: Path) -> None:
    with (mounted / "big.bin").open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == 0
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == size
        assert refused(lambda: os.lseek(file.fileno(), size, os.SEEK_DATA)) == errno.ENXIO


def test_attributes(mounted: Path, tree: Path) -> None:
    have, want = (mounted / "big.bin").stat(), (tree / "big.bin").stat()
    assert have.st_mtime_ns == want.st_mtime_ns == 1_700_000_000_123_456_789
    assert stat.S_IMODE((mounted / "sizes" / "513").stat().st_mode) == 0o640
    assert abs(have.st_blocks * 512 - have.st_size) < 4096
    assert have.st_nlink == 2 and have.st_ino == (mounted / "hard.bin").stat().st_ino


@pytest.mark.smoke
def test_names_and_missing_names(mounted: Path, tree: Path) -> None:
    assert sorted(os.listdir(os.fsencode(mounted / "names"))) == sorted(os.listdir(os.fsencode(tree / "names")))
    for name in NAMES:
        assert (mounted / "names" / name).read_text() == name
    assert refused(lambda: os.stat(mounted / ("y" * 256))) == errno.ENAMETOOLONG
    assert refused(lambda: os.stat(mounted / ("y" * 255))) == errno.ENOENT


def test_listings_have_the_dots_and_every_name_once(mounted: Path) -> None:
    listed = subprocess.run(["ls", "-aif", mounted / "sizes"], capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in listed.splitlines()]
    assert sorted(name for _, name in lines) == sorted([".", "..", *map(str, SIZES)])
    inodes = {name: int(number) for number, name in lines}
    assert inodes["."] == (mounted / "sizes").stat().st_ino
    assert inodes[".."] == mounted.stat().st_ino


def test_hub_links(mounted: Path, tree: Path) -> None:
    for revision in ("rev1", "rev2"):
        for number in range(3):
            link = mounted / "hub" / "models--org--m" / "snapshots" / revision / f"model-{number}.bin"
            target = os.readlink(link)
            assert target == f"../../blobs/{number:064x}"
            assert link.lstat().st_size == len(target)
            assert link.read_bytes() == (tree / link.relative_to(mounted)).read_bytes()
    assert os.readlink(mounted / "dangling") == "nowhere/at-all"
    assert refused(lambda: os.stat(mounted / "dangling")) == errno.ENOENT


def test_inode_numbers_agree_and_survive_a_drop(mounted: Path) -> None:
    seen: dict[int, str] = {}
    for directory, subdirectories, files in os.walk(mounted):
        listed = {entry.name: entry.inode() for entry in os.scandir(directory)}
        for name in subdirectories + files:
            status = os.lstat(os.path.join(directory, name))
            assert listed[name] == status.st_ino > 1
            if status.st_nlink == 1 or stat.S_ISDIR(status.st_mode):
                assert status.st_ino not in seen, (name, seen[status.st_ino])
                seen[status.st_ino] = name
    before = (mounted / "big.bin").stat().st_ino
    drop_caches()
    assert (mounted / "big.bin").stat().st_ino == before


def test_locks_exclude_on_read_only_opens(mounted: Path) -> None:
    program = (
        "import fcntl, os, sys\n"
        "descriptor = os.open(sys.argv[1], os.O_RDONLY)\n"
        "try: fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB); print('got it')\n"
        "except OSError: print('busy')\n"
    )

    def other() -> str:
        command = [sys.executable, "-c", program, str(mounted / "big.bin")]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    with (mounted / "big.bin").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert other() == "busy"
    assert other() == "got it"


def test_record_locks_are_those_of_a_read_only_descriptor(mounted: Path) -> None:
    with (mounted / "big.bin").open("rb") as file:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, 10, 0)
        fcntl.lockf(file, fcntl.LOCK_UN, 10, 0)
        assert refused(lambda: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 0)) == errno.EBADF


def test_times_are_the_modification_time(mounted: Path) -> None:
    status = (mounted / "big.bin").stat()
    assert status.st_atime_ns == status.st_mtime_ns == status.st_ctime_ns


def test_extended_attributes(mounted: Path) -> None:
    path = mounted / "sizes" / "513"
    assert b"size=513" in os.getxattr(path, "user.tierfs.resident")
    assert "user.tierfs.resident" in os.listxattr(path)
    assert refused(lambda: os.getxattr(path, "user.nope")) == errno.ENODATA
    for name in ("security.capability", "security.selinux", "system.posix_acl_access"):
        assert refused(lambda name=name: os.getxattr(path, name)) == errno.ENOTSUP


def test_equal_files_have_the_same_content_id(mounted: Path) -> None:
    def content(path: Path) -> bytes:
        return os.getxattr(path, "user.tierfs.content")

    eventually(
        lambda: "user.tierfs.content" in os.listxattr(mounted / "hub/models--org--m/snapshots/rev1/model-1.bin"),
        "the content id is known",
    )
    one = content(mounted / "hub/models--org--m/snapshots/rev1/model-1.bin")
    assert one == content(mounted / "hub/models--org--m/snapshots/rev2/model-1.bin")
    assert len(one) == 32


@pytest.mark.smoke
@pytest.mark.parametrize(
    "write",
    [
        lambda root: os.open(root / "big.bin", os.O_RDWR),
        lambda root: os.open(root / "big.bin", os.O_WRONLY),
        lambda root: os.open(root / "new", os.O_CREAT | os.O_WRONLY),
        lambda root: os.unlink(root / "big.bin"),
        lambda root: os.rename(root / "big.bin", root / "other"),
        lambda root: os.mkdir(root / "d"),
        lambda root: os.symlink("x", root / "l"),
        lambda root: os.link(root / "big.bin", root / "l"),
        lambda root: os.truncate(root / "big.bin", 1),
        lambda root: os.chmod(root / "big.bin", 0o600),
        lambda root: os.utime(root / "big.bin"),
        lambda root: os.setxattr(root / "big.bin", "user.x", b"1"),
    ],
)
def test_writes_are_refused_as_read_only(mounted: Path, write: Callable[[Path], object]) -> None:
    assert refused(lambda: write(mounted)) == errno.EROFS


def test_access_agrees_with_open(mounted: Path) -> None:
    assert os.access(mounted / "big.bin", os.R_OK)
    assert not os.access(mounted / "big.bin", os.W_OK)


def test_another_user_reads_what_the_modes_allow(mounted: Path) -> None:
    # The way to the mountpoint is closed to others by pytest's private directories: enter through a bind mount.
    inner = "head -c 16 /mnt/big.bin | wc -c; cat /mnt/sizes/513 >/dev/null 2>&1 || echo forbidden"
    outer = f"mount --bind {mounted} /mnt && exec setpriv --reuid 65534 --regid 65534 --clear-groups sh -c '{inner}'"
    done = subprocess.run(["unshare", "-m", "sh", "-c", outer], capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == ["16", "forbidden"], done.stderr


def test_statfs_tells_the_export(mounted: Path, tree: Path) -> None:
    values = os.statvfs(mounted)
    total = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    total -= (tree / "hard.bin").stat().st_size  # counted once
    assert abs(values.f_blocks * values.f_frsize - total) <= 4096
    assert (values.f_namemax, values.f_bfree) == (255, 0)
    assert values.f_files >= 40
    assert subprocess.run(["df", str(mounted)], capture_output=True).returncode == 0


def test_the_mount_is_read_only_without_devices_or_set_user_id(mounted: Path) -> None:
    line = next(line for line in Path("/proc/mounts").read_text().splitlines() if f" {mounted} " in line)
    options = set(line.split()[3].split(","))
    assert {"ro", "nosuid", "nodev", "default_permissions", "allow_other"} <= options


def test_reading_without_waiting_never_says_end_of_file(mounted: Path, tree: Path) -> None:
    with (mounted / "big.bin").open("rb") as file:
        want = os.pread(file.fileno(), 65536, 0)
        buffer = bytearray(4096)
        try:
            count = os.preadv(file.fileno(), [buffer], 0, os.RWF_NOWAIT)
        except OSError as error:
            assert error.errno in (errno.EAGAIN, errno.EOPNOTSUPP)
        else:
            assert count > 0 and bytes(buffer[:count]) == want[:count]


def test_population_by_windows_brings_the_right_pages(mounted: Path, tree: Path) -> None:
    """MADV_POPULATE_READ (22), as loaders use it in windows."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (mounted / "big.bin").open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        with mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            hold = ctypes.c_char.from_buffer(mapped)
            result = libc.madvise(ctypes.c_void_p(ctypes.addressof(hold)), ctypes.c_size_t(size), 22)
            del hold
            assert result == 0, os.strerror(ctypes.get_errno())
            assert mapped[:] == (tree / "big.bin").read_bytes()


def test_standard_tools_copy_the_tree(mounted: Path, tree: Path, tmp_path: Path) -> None:
    done = subprocess.run(["cp", "-a", mounted / "hub", mounted / "names", tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("hub", "names"):
        compared = subprocess.run(["diff", "-r", "--no-dereference", tree / name, tmp_path / name], capture_output=True)
        assert compared.returncode == 0, compared.stdout
    assert subprocess.run(["find", mounted, "-xdev"], capture_output=True).stderr == b""
