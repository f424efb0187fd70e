"""Scanning: everything a tree can hold, and a tree that changes meanwhile."""

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tierfs.blocks.errors import ProtocolError, SourceUnavailable
from tierfs.catalog import scan as scan_module
from tierfs.catalog import schema
from tierfs.catalog.beneath import open_root
from tierfs.catalog.scan import Scan, scan_tree
from tierfs.catalog.schema import Catalog, Entry, Kind


def _scan(
    root: Path,
    *,
    settle_s: float = 0.0,
    maximum_entries: int = 1_000_000,
    checkpoint: Callable[[], None] = lambda: None,
) -> Scan:
    fd = open_root(root)
    try:
        found = scan_tree(fd, export="e", settle_s=settle_s, maximum_entries=maximum_entries, checkpoint=checkpoint)
    finally:
        os.close(fd)
    schema.check(Catalog("e", 1, 4096, found.entries))
    return found


def _paths(found: Scan) -> dict[bytes, Entry]:
    paths: list[bytes] = []
    for index, entry in enumerate(found.entries):
        above = paths[entry.parent] if index else b""
        paths.append(above + b"/" + entry.name if above else entry.name)
    return dict(zip(paths, found.entries, strict=True))


def _age(path: Path, seconds: float) -> None:
    then = time.time_ns() - int(seconds * 1e9)
    os.utime(path, ns=(then, then))


def test_every_kind_of_name_is_carried(tmp_path: Path) -> None:
    names = [b"plain", b"new\nline", b"\xff\xfe", b"x" * 255, b" ", b"-rf", "é".encode(), b"a\\b", bytes(range(1, 47))]
    for name in names:
        with open(os.fsencode(tmp_path) + b"/" + name, "wb") as file:
            file.write(name)
    found = _paths(_scan(tmp_path))
    assert sorted(names) == sorted(name for name in found if name)
    assert all(found[name].size_bytes == len(name) for name in names)


def test_entries_of_a_directory_lie_together_sorted_and_after_their_parent(tmp_path: Path) -> None:
    for directory in ("b", "a", "a/c"):
        (tmp_path / directory).mkdir()
        for name in ("2", "1", "10"):
            (tmp_path / directory / name).touch()
    found = _scan(tmp_path)
    parents = [entry.parent for entry in found.entries[1:]]
    assert parents == sorted(parents)
    assert list(_paths(found)) == [
        b"", b"a", b"b", b"a/1", b"a/10", b"a/2", b"a/c", b"b/1", b"b/10", b"b/2", b"a/c/1", b"a/c/10", b"a/c/2",
    ]  # fmt: skip


def test_modes_and_times_are_carried_to_the_nanosecond(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"1234567")
    os.chmod(file, 0o4751)
    os.utime(file, ns=(1, 1_234_567_890_123_456_789))
    old = tmp_path / "old"
    old.mkdir(mode=0o750)
    os.utime(old, ns=(1, -5_000_000_001))
    found = _paths(_scan(tmp_path))
    assert (found[b"f"].mode, found[b"f"].mtime_ns, found[b"f"].size_bytes) == (0o4751, 1_234_567_890_123_456_789, 7)
    assert (found[b"old"].mode, found[b"old"].mtime_ns) == (0o750, -5_000_000_001)


def test_a_hub_cache_keeps_its_links_byte_for_byte(tmp_path: Path) -> None:
    model = tmp_path / "models--org--name"
    (model / "blobs").mkdir(parents=True)
    (model / "snapshots/abc").mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "blobs/0123").write_bytes(b"weights")
    (model / "refs/main").write_bytes(b"abc")
    os.symlink("../../blobs/0123", model / "snapshots/abc/model.safetensors")
    os.symlink("../../blobs/gone", model / "snapshots/abc/dangling")
    os.symlink(b"/abs/\xff" + b"y" * 4000, os.fsencode(model) + b"/far")
    found = _paths(_scan(tmp_path))
    link = found[b"models--org--name/snapshots/abc/model.safetensors"]
    assert (link.kind, link.target, link.size_bytes) == (Kind.SYMLINK, b"../../blobs/0123", 16)
    assert found[b"models--org--name/snapshots/abc/dangling"].target == b"../../blobs/gone"
    assert found[b"models--org--name/far"].target == b"/abs/\xff" + b"y" * 4000
    assert found[b"models--org--name/blobs/0123"].kind is Kind.FILE


def test_hard_links_share_a_version_and_count_only_names_inside(tmp_path: Path) -> None:
    export = tmp_path / "export"
    (export / "z").mkdir(parents=True)
    (export / "b").write_bytes(b"x")
    os.link(export / "b", export / "z/c")
    os.link(export / "b", tmp_path / "outside")
    (export / "other").write_bytes(b"x")
    os.link(export / "other", tmp_path / "outside2")
    scan = _scan(export)
    found = _paths(scan)
    assert found[b"b"].version == found[b"z/c"].version != found[b"other"].version
    assert (found[b"b"].links, found[b"z/c"].links, found[b"other"].links) == (2, 2, 1)
    assert sorted(facts.path for facts in scan.files.values()) == [b"b", b"other"]


def test_facts_open_the_very_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    scan = _scan(tmp_path)
    ((version, facts),) = scan.files.items()
    found = os.stat(tmp_path / "f")
    assert scan.entries[1].version == version
    assert (facts.path, facts.inode, facts.size_bytes) == (b"f", found.st_ino, 3)
    assert (facts.mtime_ns, facts.ctime_ns) == (found.st_mtime_ns, found.st_ctime_ns)


def test_special_files_are_skipped_and_counted(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "s"))
        (tmp_path / "file").touch()
        scan = _scan(tmp_path)
    assert set(_paths(scan)) == {b"", b"file"}
    assert scan.skipped == {"special file": 2}


def test_what_may_not_be_read_is_skipped_and_named(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed/inner").touch()
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "open").write_bytes(b"x")
    os.chmod(tmp_path / "closed", 0)
    os.chmod(tmp_path / "secret", 0)
    if os.geteuid() != 0:
        scan = _scan(tmp_path)
    else:
        # Root may read everything: scan in a child that has given that up.
        os.chmod(tmp_path, 0o755)
        scan = _scan_as_nobody(tmp_path)
    assert set(_paths(scan)) == {b"", b"open"}
    assert set(scan.unreadable) == {b"closed", b"secret"}
    assert scan.skipped == {"unreadable": 2}


def _scan_as_nobody(root: Path) -> Scan:
    """In a thread of its own: credentials set by the bare system call belong to one thread."""
    import ctypes
    import platform

    if platform.machine() != "x86_64":
        pytest.skip("the numbers of setresuid and setresgid are known for x86_64 only")
    fd = open_root(root)
    result: list[Scan] = []

    def body() -> None:
        libc = ctypes.CDLL(None)
        assert libc.syscall(119, 65534, 65534, 65534) == 0  # setresgid
        assert libc.syscall(117, 65534, 65534, 65534) == 0  # setresuid
        result.append(scan_tree(fd, export="e"))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    os.close(fd)
    return result[0]


def test_young_files_and_links_are_kept_out_until_they_have_settled(tmp_path: Path) -> None:
    (tmp_path / "young").write_bytes(b"x")
    os.symlink("young", tmp_path / "link")
    (tmp_path / "directory").mkdir()
    scan = _scan(tmp_path, settle_s=60.0)
    assert set(_paths(scan)) == {b"", b"directory"}
    assert scan.settles_at_ns is not None
    assert abs(scan.settles_at_ns - (os.stat(tmp_path / "young").st_ctime_ns + 60 * 10**9)) < 10**9

    settled = _scan(tmp_path, settle_s=1e-9)
    assert set(_paths(settled)) == {b"", b"directory", b"young", b"link"}
    assert settled.settles_at_ns is None


def test_an_old_mtime_does_not_make_a_new_file_settled(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    _age(tmp_path / "f", 1000.0)
    assert set(_paths(_scan(tmp_path, settle_s=60.0))) == {b""}


def test_an_mtime_in_the_future_does_not_keep_a_file_out_for_ever(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    _age(tmp_path / "f", -1e6)
    assert b"f" in _paths(_scan(tmp_path, settle_s=1e-9))


def test_too_many_entries_are_refused_with_the_limit_named(tmp_path: Path) -> None:
    for number in range(11):
        (tmp_path / str(number)).touch()
    assert len(_scan(tmp_path, maximum_entries=11).entries) == 12
    with pytest.raises(SourceUnavailable, match="more than 10 entries"):
        _scan(tmp_path, maximum_entries=10)


def test_a_checkpoint_that_raises_stops_the_scan(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    calls = 0

    def checkpoint() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        _scan(tmp_path, checkpoint=checkpoint)
    assert calls == 2
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_directory_exchanged_for_a_link_to_the_outside_shows_nothing_of_it(tmp_path: Path) -> None:
    export = tmp_path / "export"
    (export / "a").mkdir(parents=True)
    (export / "z").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").touch()
    calls = 0

    def checkpoint() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # the root is listed, its directories are not
            (export / "a").rmdir()
            os.symlink("../outside", export / "a")

    scan = _scan(export, checkpoint=checkpoint)
    found = _paths(scan)
    assert scan.steady and set(found) == {b"", b"a", b"z"}
    assert found[b"a"].kind is Kind.SYMLINK


@pytest.mark.parametrize(("shards", "index"), [("a", "z"), ("z", "a")])
@pytest.mark.parametrize("moment", [2, 3, 4])
def test_an_index_renamed_during_the_scan_is_not_seen_without_its_shard(
    tmp_path: Path, shards: str, index: str, moment: int
) -> None:
    """Whichever of the two directories is listed first, and whatever is listed already when the renames happen."""
    for name in (shards, index, "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "tmp/shard").touch()
    (tmp_path / "tmp/index").touch()
    calls = 0

    def checkpoint() -> None:
        nonlocal calls
        calls += 1
        if calls == moment:
            os.rename(tmp_path / "tmp/shard", tmp_path / shards / "shard")
            os.rename(tmp_path / "tmp/index", tmp_path / index / "index")

    scan = _scan(tmp_path, checkpoint=checkpoint)
    assert scan.steady
    assert {os.fsencode(f"{shards}/shard"), os.fsencode(f"{index}/index")} <= set(_paths(scan))


def test_a_directory_that_changed_a_moment_ago_is_listed_again_when_its_clock_has_ticked(tmp_path: Path) -> None:
    calls = 0

    def checkpoint() -> None:
        nonlocal calls
        calls += 1

    os.symlink("target", tmp_path / "link")
    assert _scan(tmp_path, checkpoint=checkpoint).steady
    fresh, calls = calls, 0
    assert _scan(tmp_path, checkpoint=checkpoint).steady
    assert (fresh, calls) == (4, 2)  # each listing is one call, each second look another


def test_a_tree_that_never_rests_is_not_called_steady(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "ROUNDS", 3)
    count = 0

    def checkpoint() -> None:
        nonlocal count
        count += 1
        (tmp_path / str(count)).touch()

    assert not _scan(tmp_path, checkpoint=checkpoint).steady


@pytest.mark.parametrize(("first", "last"), [("a", "z"), ("z", "a")])
def test_an_index_is_never_seen_without_its_shards(tmp_path: Path, first: str, last: str) -> None:
    """A publisher renames shards into one directory and then the index into another, while scans go on."""
    export = tmp_path / "export"
    shards, indexes = export / first, export / last
    shards.mkdir(parents=True)
    indexes.mkdir()
    for number in range(40):  # listed between the two, to widen the window
        (export / f"m{number}").mkdir()
        (export / f"m{number}/f").touch()
    staging = tmp_path / "staging"
    staging.mkdir()
    stop, scanning = threading.Event(), threading.Event()
    published = 0

    def publish() -> None:
        nonlocal published
        while not stop.is_set():
            scanning.wait()  # one model per scan, so that a scan finds a tree that rests at some time
            scanning.clear()
            for name in (f"{published}-0", f"{published}-1", f"{published}-index"):
                (staging / name).write_bytes(b"x")
            os.rename(staging / f"{published}-0", shards / f"{published}-0")
            os.rename(staging / f"{published}-1", shards / f"{published}-1")
            os.rename(staging / f"{published}-index", indexes / f"{published}-index")
            published += 1

    publisher = threading.Thread(target=publish)
    publisher.start()
    seen = 0
    try:
        for number in range(40):
            calls = 0

            def checkpoint(begin_at: int = number) -> None:
                nonlocal calls
                calls += 1
                if calls == 1 + begin_at:
                    scanning.set()

            scan = _scan(export, checkpoint=checkpoint)
            if not scan.steady:
                continue
            found = _paths(scan)
            for path in found:
                if path.endswith(b"-index"):
                    shard = os.fsencode(first) + path.removesuffix(b"index")[1:]
                    assert {shard + b"0", shard + b"1"} <= set(found)
                    seen += 1
    finally:
        stop.set()
        scanning.set()
        publisher.join()
    assert seen > 40


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system whose sizes and times are as large as the kernel's."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as made:
        yield Path(made)


def test_a_file_whose_numbers_no_catalog_can_hold_is_left_out_and_the_others_are_there(wide: Path) -> None:
    """Whoever may write one file of an export must not end the export."""
    tmp_path = wide
    for name in ("good", "dated", "huge", "directory"):
        (tmp_path / name).mkdir() if name == "directory" else (tmp_path / name).write_bytes(b"x")
    far_s = 1 << 40
    os.utime(tmp_path / "dated", (far_s, far_s))
    os.utime(tmp_path / "directory", (far_s, far_s))
    if (tmp_path / "dated").stat().st_mtime < far_s:
        pytest.skip("this file system holds no such time")
    os.truncate(tmp_path / "huge", 1 << 52)
    found = _scan(tmp_path)
    assert [entry.name for entry in found.entries] == [b"", b"directory", b"good"]
    assert set(found.unreadable) == {b"dated", b"huge"}


def test_paths_that_a_client_would_refuse_are_an_error_of_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    entries = _scan(tmp_path).entries
    for limit in (5, 6):  # /a and /a/b
        monkeypatch.setattr(scan_module, "PATHS_LIMIT_BYTES", limit)
        monkeypatch.setattr(schema, "PATHS_LIMIT_BYTES", limit)
        if limit == 6:
            _scan(tmp_path)
            continue
        with pytest.raises(ProtocolError, match="bytes together"):
            schema.check(Catalog("e", 1, 4096, entries))
        with pytest.raises(SourceUnavailable, match="bytes together"):
            _scan(tmp_path)
