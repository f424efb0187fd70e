"""A directory as a source: what it publishes, what it digests, and what it refuses to hand out."""

import logging
import os
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tierfs.blocks.errors import ConfigError, SourceRefused, SourceUnavailable, StaleVersion
from tierfs.blocks.ids import VersionId, content_id, digest_block
from tierfs.blocks.spans import Span, block_count, whole_block
from tierfs.catalog import scan
from tierfs.catalog.schema import Publication
from tierfs.tiers import directory_files
from tierfs.tiers.directory import DirectorySource
from tierfs.tiers.interface import Source

BLOCK = 64 << 10


def _bytes(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def _source(path: Path, state: Path | None = None, **options: object) -> DirectorySource:
    settings: dict[str, object] = {"rescan_s": 0.02, **options}
    return DirectorySource(path, name="e", block_bytes=BLOCK, state_directory=state, **settings)  # type: ignore[arg-type]


@asynccontextmanager
async def _running(source: DirectorySource) -> AsyncIterator[DirectorySource]:
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            await nursery.start(source.run)
            yield source
            nursery.cancel_scope.cancel()


def _run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(30):
            await body()

    trio.run(bounded)


def _version(publication: Publication, name: bytes) -> VersionId:
    (entry,) = [entry for entry in publication.catalog.entries if entry.name == name]
    return VersionId(entry.version)


def _names(publication: Publication) -> set[bytes]:
    return {entry.name for entry in publication.catalog.entries} - {b""}


async def _until(source: Source, wanted: Callable[[Publication], bool]) -> Publication:
    found = await source.publication()
    while not wanted(found):
        found = await source.wait_changed(found.revision)
    return found


def _all_digested(publication: Publication) -> bool:
    files = {entry.version for entry in publication.catalog.entries if entry.version}
    return files == set(publication.contents)


async def _state(reached: Callable[[], bool]) -> None:
    """Statistics are polled, as `status` does; there is no event for them."""
    while not reached():  # noqa: ASYNC110
        await trio.sleep(0.005)


def _write_at(path: Path, offset: int, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, data, offset)
    finally:
        os.close(fd)


async def _read(source: Source, version: VersionId, span: Span) -> bytes:
    buffer = bytearray(span.length_bytes)
    await source.read_into(version, span, memoryview(buffer))
    return bytes(buffer)


@pytest.fixture
def export(tmp_path: Path) -> Path:
    path = tmp_path / "export"
    path.mkdir()
    return path


def test_it_is_a_source(export: Path) -> None:
    source: Source = _source(export)
    assert source.statistics().state == "connecting"


def test_every_block_is_read_with_its_digest(export: Path) -> None:
    data = _bytes(3 * BLOCK + 5)
    (export / "f").write_bytes(data)

    async def body() -> None:
        async with _running(_source(export, digest=False)) as source:
            version = _version(await source.publication(), b"f")
            for block in (3, 0, 2, 1, 3):
                span = whole_block(len(data), BLOCK, block)
                buffer = bytearray(span.length_bytes)
                digest = await source.read_into(version, span, memoryview(buffer))
                assert buffer == data[block * BLOCK :][:BLOCK]
                assert digest == digest_block(buffer)
            assert source.statistics().fetched_blocks == 5

    _run(body)


@pytest.mark.parametrize("digest", [False, True], ids=["digest unknown", "digest known"])
def test_part_of_a_block_comes_with_the_digest_of_the_whole_block(export: Path, digest: bool) -> None:
    data = _bytes(2 * BLOCK)
    (export / "f").write_bytes(data)

    async def body() -> None:
        async with _running(_source(export, digest=digest)) as source:
            found = await _until(source, lambda now: not digest or _all_digested(now))
            buffer = bytearray(100)
            claimed = await source.read_into(_version(found, b"f"), Span(1, 7, 100), memoryview(buffer))
            assert buffer == data[BLOCK + 7 :][:100]
            assert claimed == digest_block(data[BLOCK:])

    _run(body)


def test_files_are_digested_in_the_background_and_equal_files_have_equal_contents(export: Path) -> None:
    data = _bytes(2 * BLOCK + 1)
    (export / "a").write_bytes(data)
    (export / "copy").write_bytes(data)
    os.link(export / "a", export / "hard")
    (export / "other").write_bytes(_bytes(2 * BLOCK + 1, seed=2))
    (export / "empty").touch()
    (export / "sparse").touch()
    os.truncate(export / "sparse", 40 * BLOCK + 3)

    async def body() -> None:
        async with _running(_source(export)) as source:
            found = await _until(source, _all_digested)
            contents = {entry.name: found.contents.get(VersionId(entry.version)) for entry in found.catalog.entries}
            digests = b"".join(digest_block(data[start : start + BLOCK]) for start in range(0, len(data), BLOCK))
            assert contents[b"a"] == contents[b"copy"] == contents[b"hard"] == content_id(digests, len(data))
            assert contents[b"other"] != contents[b"a"]
            assert contents[b"empty"] == content_id(b"", 0)
            zeros = digest_block(bytes(BLOCK)) * 40 + digest_block(bytes(3))
            assert contents[b"sparse"] == content_id(zeros, 40 * BLOCK + 3)
            statistics = source.statistics()
            total = 3 * len(data) + 40 * BLOCK + 3
            assert statistics.digested_bytes == statistics.digest_total_bytes == source.digest_read_bytes == total

    _run(body)


def test_thousands_of_small_files_are_digested_in_few_publications(export: Path) -> None:
    for number in range(2000):
        (export / str(number)).write_bytes(b"%d" % number)

    async def body() -> None:
        async with _running(_source(export)) as source:
            began_s = trio.current_time()
            found = await _until(source, _all_digested)
            assert found.revision <= 2 + 5 * (trio.current_time() - began_s)
            assert found.catalog.generation > 0

    _run(body)


def test_a_restart_digests_nothing_again_and_keeps_the_generation(export: Path, tmp_path: Path) -> None:
    (export / "f").write_bytes(_bytes(5 * BLOCK))
    (export / "g").write_bytes(_bytes(BLOCK + 1, seed=2))

    async def body() -> None:
        async with _running(_source(export, tmp_path / "state")) as source:
            before = await _until(source, _all_digested)
            assert source.digest_read_bytes == 6 * BLOCK + 1
        assert source.statistics().state == "closed"

        async with _running(_source(export, tmp_path / "state")) as source:
            again = await source.publication()
            assert again.contents == before.contents, "known from the first publication on"
            assert again.catalog == before.catalog
            (export / "new").write_bytes(b"x")
            after = await _until(source, lambda now: b"new" in _names(now) and _all_digested(now))
            assert after.catalog.generation == before.catalog.generation + 1
            assert source.digest_read_bytes == 1, "only the new file was read"

    _run(body)


def test_digests_seen_while_serving_are_remembered_and_end_in_a_content_id(export: Path, tmp_path: Path) -> None:
    data = _bytes(3 * BLOCK)
    (export / "f").write_bytes(data)

    async def body() -> None:
        async with _running(_source(export, tmp_path / "state", digest=False)) as source:
            found = await source.publication()
            version = _version(found, b"f")
            for block in (2, 0):
                await _read_until_lasting(source, version, block)
            assert source.statistics().digested_bytes == 2 * BLOCK and not (await source.publication()).contents
            await _read(source, version, whole_block(len(data), BLOCK, 1))
            found = await _until(source, _all_digested)
            digests = b"".join(digest_block(data[start : start + BLOCK]) for start in range(0, len(data), BLOCK))
            assert found.contents[version] == content_id(digests, len(data))
            assert source.digest_read_bytes == 0
        async with _running(_source(export, tmp_path / "state", digest=False)) as source:
            assert _all_digested(await source.publication())

    _run(body)


async def _read_until_lasting(source: DirectorySource, version: VersionId, block: int) -> None:
    """A file written a moment ago could still change without a trace; its digest counts only after that."""
    before = source.statistics().digested_bytes
    while source.statistics().digested_bytes == before:
        await _read(source, version, Span(block, 0, BLOCK))


def test_a_digest_of_a_file_that_could_still_change_without_a_trace_is_not_remembered(
    export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (export / "f").write_bytes(_bytes(BLOCK))
    monkeypatch.setattr(directory_files, "TICK_NS", 10**15)  # as if the file's clock had not ticked since

    async def body() -> None:
        async with _running(_source(export, digest=False)) as source:
            version = _version(await source.publication(), b"f")
            await _read(source, version, Span(0, 0, BLOCK))
            async with source.open_block(version, 0) as reading:
                assert reading.fd is None
            assert source.statistics().digested_bytes == 0

    _run(body)


def test_unfinished_digests_are_kept_across_a_restart(export: Path, tmp_path: Path) -> None:
    (export / "f").write_bytes(_bytes(4 * BLOCK))

    async def body() -> None:
        async with _running(_source(export, tmp_path / "state", digest=False)) as source:
            version = _version(await source.publication(), b"f")
            for block in (0, 1):
                await _read_until_lasting(source, version, block)
        async with _running(_source(export, tmp_path / "state")) as source:
            await _until(source, _all_digested)
            assert source.digest_read_bytes == 2 * BLOCK

    _run(body)


def test_a_file_that_changes_while_it_is_digested_is_done_again(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (export / "f").write_bytes(_bytes(4 * BLOCK))
    new = _bytes(4 * BLOCK, seed=9)
    hashed = 0

    def change_then_digest(data: memoryview) -> object:
        nonlocal hashed
        hashed += 1
        if hashed == 2:  # the second block was read, its digest is being computed
            (export / "f").write_bytes(new)
        return digest_block(data)

    monkeypatch.setattr(directory_files, "digest_block", change_then_digest)

    async def body() -> None:
        async with _running(_source(export, tmp_path / "state", digest_workers=1)) as source:
            first = await source.publication()
            found = await _until(source, lambda now: now.catalog != first.catalog and _all_digested(now))
            digests = b"".join(digest_block(new[start : start + BLOCK]) for start in range(0, len(new), BLOCK))
            version = _version(found, b"f")
            assert version != _version(first, b"f")
            assert dict(found.contents) == {version: content_id(digests, len(new))}

    _run(body)


@pytest.mark.parametrize("change", ["replaced", "rewritten", "appended", "truncated", "deleted"])
@pytest.mark.parametrize("opened_before", [False, True], ids=["fresh", "descriptor cached"])
def test_never_a_byte_of_another_version(export: Path, change: str, opened_before: bool) -> None:
    data = _bytes(2 * BLOCK)
    other = _bytes(2 * BLOCK, seed=7)
    (export / "f").write_bytes(data)

    async def body() -> None:
        # No second scan in this test: the source learns of the change from the file itself.
        async with _running(_source(export, digest=False, rescan_s=600.0)) as source:
            version = _version(await source.publication(), b"f")
            if opened_before:
                await _read(source, version, Span(0, 0, BLOCK))
            if change == "replaced":
                (export / "new").write_bytes(other)
                os.rename(export / "new", export / "f")
            elif change == "rewritten":
                (export / "f").write_bytes(other)
            elif change == "appended":
                _write_at(export / "f", 2 * BLOCK, b"x")
            elif change == "truncated":
                os.truncate(export / "f", BLOCK)
            else:
                os.unlink(export / "f")
            with pytest.raises(StaleVersion):
                await _read(source, version, Span(1, 0, BLOCK))
            with pytest.raises(StaleVersion):
                async with source.open_block(version, 1):
                    pass
            assert source.statistics().failed_requests == 2

    _run(body)


def test_a_file_that_changes_while_it_is_read_is_stale(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (export / "f").write_bytes(_bytes(2 * BLOCK))
    real_preadv = os.preadv

    def read_then_change(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = real_preadv(fd, buffers, offset)
        _write_at(export / "f", 2 * BLOCK - 1, b"?")
        return count

    async def body() -> None:
        async with _running(_source(export, digest=False, rescan_s=600.0)) as source:
            version = _version(await source.publication(), b"f")
            await _read_until_lasting(source, version, 0)
            monkeypatch.setattr(os, "preadv", read_then_change)
            with pytest.raises(StaleVersion):
                await _read(source, version, Span(0, 10, 10))

    _run(body)


def test_a_replaced_file_is_served_on_from_its_descriptor_where_digests_prove_it(export: Path) -> None:
    data = _bytes(2 * BLOCK)
    (export / "f").write_bytes(data)

    async def body() -> None:
        async with _running(_source(export)) as source:
            first = await _until(source, _all_digested)
            version = _version(first, b"f")
            await _read(source, version, Span(0, 0, BLOCK))
            (export / "new").write_bytes(_bytes(2 * BLOCK, seed=3))
            os.rename(export / "new", export / "f")
            await _until(source, lambda now: _names(now) == {b"f"} and version not in now.contents)
            assert await _read(source, version, Span(1, 0, BLOCK)) == data[BLOCK:]
            assert await _read(source, version, Span(1, 9, 5)) == data[BLOCK + 9 :][:5]
            async with source.open_block(version, 1) as reading:
                assert reading.data is not None and bytes(reading.data) == data[BLOCK:]

    _run(body)


def test_a_write_that_hides_behind_a_restored_mtime_is_stale(export: Path) -> None:
    (export / "f").write_bytes(_bytes(BLOCK))

    async def body() -> None:
        async with _running(_source(export, rescan_s=600.0)) as source:
            version = _version(await _until(source, _all_digested), b"f")
            await _read(source, version, Span(0, 0, BLOCK))
            before = os.stat(export / "f")
            _write_at(export / "f", 0, b"other bytes")
            os.utime(export / "f", ns=(before.st_atime_ns, before.st_mtime_ns))
            with pytest.raises(StaleVersion):
                await _read(source, version, Span(0, 0, BLOCK))

    _run(body)


def test_open_block_gives_a_descriptor_once_the_digest_is_known(export: Path) -> None:
    data = _bytes(BLOCK + 10)
    (export / "f").write_bytes(data)

    async def body() -> None:
        async with _running(_source(export, digest=False)) as source:
            version = _version(await source.publication(), b"f")
            async with source.open_block(version, 1) as reading:
                assert reading.fd is None and reading.data is not None
                assert (reading.length_bytes, bytes(reading.data)) == (10, data[BLOCK:])
                assert reading.digest == digest_block(data[BLOCK:])
            await _read_until_lasting(source, version, 0)
            async with source.open_block(version, 0) as reading:
                assert reading.fd is not None and reading.data is None
                assert os.pread(reading.fd, reading.length_bytes, reading.offset_bytes) == data[:BLOCK]
                assert reading.digest == digest_block(data[:BLOCK])

    _run(body)


def test_buffers_and_descriptors_come_back_whatever_happens_to_the_reader(export: Path) -> None:
    (export / "f").write_bytes(_bytes(2 * BLOCK))

    async def body() -> None:
        async with _running(_source(export, digest=False, rescan_s=600.0)) as source:
            version = _version(await source.publication(), b"f")
            for number in range(40):  # more than there are buffers
                with trio.CancelScope() as scope:
                    async with source.open_block(version, number % 2):
                        scope.cancel()
                        await trio.lowlevel.checkpoint()
                with trio.CancelScope() as scope:
                    scope.cancel()
                    async with source.open_block(version, number % 2):
                        raise AssertionError("a cancelled reader went on")
        assert not [link for link in _open_paths() if link.startswith(str(export))]

    _run(body)


def _open_paths() -> list[str]:
    paths = []
    for name in os.listdir("/proc/self/fd"):
        try:
            paths.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return paths


def test_unused_descriptors_are_few(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / str(number)).write_bytes(b"%d" % number)

    async def body() -> None:
        from tierfs.catalog.scan import FileFacts

        files = directory_files.OpenFiles(tmp_path, trio.CapacityLimiter(4), capacity=3, idle_s=0.0)
        device = os.stat(tmp_path).st_dev
        for number in range(20):
            found = os.stat(tmp_path / str(number))
            facts = FileFacts(b"%d" % number, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
            async with files.use(VersionId(b"%016d" % number), facts, device) as fd:
                assert os.pread(fd, 10, 0) == b"%d" % number
        assert len(files) == 3
        assert len([path for path in _open_paths() if path.startswith(str(tmp_path))]) <= 4
        await files.close_idle()
        assert not [path for path in _open_paths() if path.startswith(str(tmp_path))]

    _run(body)


def test_a_request_that_makes_no_sense_is_refused(export: Path) -> None:
    (export / "f").write_bytes(_bytes(BLOCK + 1))
    (export / "empty").touch()

    async def body() -> None:
        async with _running(_source(export)) as source:
            found = await source.publication()
            version = _version(found, b"f")
            for span in (Span(2, 0, 1), Span(1, 0, 2), Span(-1, 0, 1), Span(0, -1, 1)):
                with pytest.raises(SourceRefused):
                    await _read(source, version, span)
            with pytest.raises(SourceRefused):
                async with source.open_block(_version(found, b"empty"), 0):
                    pass
            with pytest.raises(StaleVersion):
                await _read(source, VersionId(bytes(16)), Span(0, 0, 1))

    _run(body)


def test_a_tree_that_keeps_changing_is_published_when_it_rests(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (export / "f").write_bytes(b"x")
    (export / "moving").mkdir()

    async def body() -> None:
        async with _running(_source(export)) as source:
            await _until(source, _all_digested)
            monkeypatch.setattr(scan, "ROUNDS", 0)  # so that one change shortly before the scan is enough

            def change() -> bool:
                (export / "moving/x").touch()
                (export / "moving/x").unlink()
                return "keeps changing" in source.statistics().reason

            (export / "new").write_bytes(b"y")
            await _state(change)
            assert source.statistics().state == "connected"
            monkeypatch.undo()
            await _until(source, lambda now: b"new" in _names(now))
            await _state(lambda: source.statistics().reason == "")

    _run(body)


def test_an_unchanged_tree_is_not_published_again(export: Path) -> None:
    (export / "f").write_bytes(b"x")

    async def body() -> None:
        async with _running(_source(export)) as source:
            found = await _until(source, _all_digested)
            scans = source.scans
            await _state(lambda: source.scans >= scans + 3)
            assert (await source.publication()) is found

    _run(body)


def test_the_directory_may_come_later_vanish_and_come_back(
    export: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = _bytes(BLOCK)
    export.rmdir()

    async def body() -> None:
        async with _running(_source(export)) as source:
            await _state(lambda: source.statistics().state == "down")
            with trio.move_on_after(0.1) as waiting:
                await source.publication()
            assert waiting.cancelled_caught
            assert source.statistics().state == "down" and str(export) in source.statistics().reason
            with pytest.raises(SourceUnavailable):
                await _read(source, VersionId(bytes(16)), Span(0, 0, 1))

            export.mkdir()
            (export / "f").write_bytes(data)
            found = await _until(source, lambda now: b"f" in _names(now))
            version = _version(found, b"f")
            assert source.statistics().state == "connected"

            os.rename(export, tmp_path / "away")
            await _state(lambda: source.statistics().state == "down")
            assert _names(await source.publication()) == {b"f"}, "the last publication stays"

            os.rename(tmp_path / "away", export)
            await _state(lambda: source.statistics().state == "connected")
            assert await _read(source, version, Span(0, 0, BLOCK)) == data

    with caplog.at_level(logging.INFO):
        _run(body)
    assert caplog.text.count("state=down") == 2, "changes are logged, not each scan"


def test_a_file_system_that_is_not_mounted_is_not_an_empty_export(export: Path, tmp_path: Path) -> None:
    """Another device under the root, and nothing in it: what is left when a mount goes away."""
    if not os.access("/dev/shm", os.W_OK) or os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("needs a second file system at /dev/shm")
    data = _bytes(BLOCK)
    (export / "f").write_bytes(data)
    root = tmp_path / "root"
    root.symlink_to(export)

    def point_to(target: str | Path) -> None:
        (tmp_path / "next").symlink_to(target)
        os.rename(tmp_path / "next", root)

    async def body(mountpoint: str) -> None:
        async with _running(_source(root, rescan_s=0.02)) as source:
            found = await _until(source, _all_digested)
            point_to(mountpoint)
            await _state(lambda: source.statistics().state == "down")
            assert "is its file system mounted?" in source.statistics().reason
            with pytest.raises(SourceUnavailable, match="another device"):
                await _read(source, _version(found, b"f"), Span(0, 0, BLOCK))
            assert await source.publication() is found
            point_to(export)
            await _state(lambda: source.statistics().state == "connected")
            assert await _read(source, _version(found, b"f"), Span(0, 0, BLOCK)) == data

    with tempfile.TemporaryDirectory(dir="/dev/shm") as mountpoint:
        _run(lambda: body(mountpoint))


def test_a_path_that_cannot_be_opened_for_another_reason_may_be_tried_again(export: Path, tmp_path: Path) -> None:
    (export / "f").write_bytes(_bytes(BLOCK))

    async def body() -> None:
        async with _running(_source(export, digest=False, rescan_s=600.0)) as source:
            version = _version(await source.publication(), b"f")
            os.rename(export, tmp_path / "away")
            with pytest.raises(SourceUnavailable) as caught:
                await _read(source, version, Span(0, 0, BLOCK))
            assert isinstance(caught.value.__cause__, FileNotFoundError)
            os.rename(tmp_path / "away", export)
            await _read(source, version, Span(0, 0, BLOCK))

    _run(body)


def test_files_appear_once_they_have_settled(export: Path) -> None:
    (export / "f").write_bytes(b"x")

    async def body() -> None:
        # The next ordinary scan would come too late: it is the settle time that wakes it.
        async with _running(_source(export, settle_s=0.3, rescan_s=600.0)) as source:
            assert _names(await source.publication()) == set()
            await _until(source, lambda now: b"f" in _names(now))

    _run(body)


def test_versions_of_old_generations_are_forgotten(export: Path) -> None:
    async def body() -> None:
        async with _running(_source(export)) as source:
            (export / "f").write_bytes(b"first")
            found = await _until(source, lambda now: b"f" in _names(now) and _all_digested(now))
            version = _version(found, b"f")
            await _read(source, version, Span(0, 0, 5))
            os.unlink(export / "f")
            for number in range(16):
                (export / "g").write_bytes(b"%d" % number)
                current = found.catalog.generation
                found = await _until(source, lambda now, current=current: now.catalog.generation > current)  # type: ignore[misc]
                if number == 0:
                    assert await _read(source, version, Span(0, 0, 5)) == b"first"
            with pytest.raises(StaleVersion):
                await _read(source, version, Span(0, 0, 5))

    _run(body)


def test_a_state_directory_inside_the_export_is_refused(export: Path) -> None:
    with pytest.raises(ConfigError, match="inside the exported directory"):
        _source(export, export / "state")


def test_without_a_working_state_directory_it_serves_all_the_same(
    export: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (export / "f").write_bytes(b"x")
    (tmp_path / "state").write_bytes(b"a file where a directory should be")

    async def body() -> None:
        async with _running(_source(export, tmp_path / "state")) as source:
            await _until(source, _all_digested)

    _run(body)
    assert caplog.text.count("digest_store_failed") == 1


def test_many_readers_at_once_each_get_their_own_bytes(export: Path) -> None:
    files = {b"%d" % number: _bytes(3 * BLOCK + number, seed=number) for number in range(8)}
    for name, data in files.items():
        (export / name.decode()).write_bytes(data)

    async def body() -> None:
        async with _running(_source(export)) as source:
            found = await source.publication()

            async def reader(name: bytes, data: bytes) -> None:
                version = _version(found, name)
                for block in range(block_count(len(data), BLOCK)):
                    span = whole_block(len(data), BLOCK, block)
                    assert await _read(source, version, span) == data[block * BLOCK :][:BLOCK]

            async with trio.open_nursery() as nursery:
                for name, data in files.items():
                    for _ in range(4):
                        nursery.start_soon(reader, name, data)

    _run(body)
