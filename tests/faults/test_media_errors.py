"""A disk that fails under readers who do not come to the daemon: the object is given up soon, and only then.

The disk is real to the kernel: see tests/media.py.
"""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.contract.test_lent_objects import FakeLender
from tests.local_tiers import Content, object_files, run, running, until, warm
from tests.media import Disk, can_break
from tierfs.tiers import failed_pages, watching
from tierfs.tiers.interface import LentFile
from tierfs.tiers.local import DirectoryTier

pytestmark = pytest.mark.skipif(not can_break(), reason="needs root, losetup and mkfs.ext4")

SIZE = 8 << 20
TOUCH = [sys.executable, "-c", "import mmap, sys; mmap.mmap(int(sys.argv[1]), 0, prot=1)[int(sys.argv[2])]"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "media")
    yield made
    made.close()


async def hand_out(tier: DirectoryTier, content: Content) -> tuple[FakeLender, LentFile]:
    lender = FakeLender()
    tier.lender = lender
    await content.fill(tier)
    lent = await tier.whole(content.key)
    assert lent is not None
    return lender, lent


def read_all(fd: int) -> bytes:
    """As a reader in passthrough does; an error ends it."""
    done = b""
    while data := os.pread(fd, 128 << 10, len(done)):
        done += data
    return done


def test_the_next_hand_out_after_a_reader_met_an_error_is_refused_and_the_object_goes(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        content = Content(1, SIZE)
        async with running(warm(disk.path / "tier")) as tier:
            lender, lent = await hand_out(tier, content)
            (file,) = object_files(disk.path / "tier")
            disk.break_end(file)
            assert await tier.whole(content.key) is not None, "nobody has met the error yet"
            with pytest.raises(OSError, match="Input/output error"):
                read_all(lender.files[lent.slot])
            assert await tier.whole(content.key) is None
            assert tier.resident_bytes(content.key) == 0
            statistics = tier.statistics()
            assert (statistics.media_errors, statistics.failed_reads) == (1, 1)
            assert caplog.text.count("object_quarantined") == 1

    run(test)


def test_a_map_that_met_an_error_is_noticed_without_any_open(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watching, "_EVERY_S", 0.1)

    async def test() -> None:
        content = Content(1, SIZE)
        async with running(warm(disk.path / "tier")) as tier:
            lender, lent = await hand_out(tier, content)
            (file,) = object_files(disk.path / "tier")
            broken = disk.break_end(file)
            with lender.map(lent):
                fd = lender.files[lent.slot]
                done = await trio.run_process([*TOUCH, str(fd), str(broken + 5)], pass_fds=[fd], check=False)
                assert done.returncode == -signal.SIGBUS
                await until(lambda: tier.statistics().media_errors == 1)
                assert tier.resident_bytes(content.key) == 0
                await until(lambda: object_files(disk.path / "tier") == [])
            assert caplog.text.count("unreadable_block_dropped") == 1

    run(test)


def test_looking_reads_nothing_that_nobody_reads(disk: Disk) -> None:
    content = Content(1, SIZE)
    file = disk.path / "file"
    file.write_bytes(content.bytes)
    fd = os.open(file, os.O_RDWR)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        before = disk.read_sectors()
        found = failed_pages.look(fd, SIZE, [], budget_s=10)
        assert (found.error, disk.read_sectors() - before) == (None, 0)
        for offset in range(0, SIZE, 1 << 20):  # islands in a sea of holes
            os.pread(fd, 8192, offset)
        before = disk.read_sectors()
        found = failed_pages.look(fd, SIZE, found.known, budget_s=10)
        assert (found.error, disk.read_sectors() - before) == (None, 0)
        assert found.known[0] > 0
        broken = disk.break_end(file)
        assert failed_pages.look(fd, SIZE, found.known, budget_s=10).error is None
        with pytest.raises(OSError, match="Input/output error"):
            os.pread(fd, 4096, broken + (64 << 10))
        found = failed_pages.look(fd, SIZE, found.known, budget_s=10)
        assert found.error is not None
        assert 0 <= broken + (64 << 10) - found.offset_bytes < 64 << 10
    finally:
        os.close(fd)


def test_a_sound_disk_costs_no_object(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_EVERY_S", 0.01)

    async def test() -> None:
        content = Content(1, SIZE)
        async with running(warm(disk.path / "tier")) as tier:
            lender, lent = await hand_out(tier, content)
            fd = lender.files[lent.slot]
            for _ in range(20):  # with reads under way at any moment
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                assert await trio.to_thread.run_sync(read_all, fd) == content.bytes
                assert await tier.whole(content.key) is lent
            assert tier.statistics().media_errors == 0

    run(test)


def test_what_the_page_cache_does_not_tell_is_said_once_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(failed_pages, "_CACHESTAT", 1 << 20)  # as kernels before 6.5 answer
    caplog.set_level(logging.WARNING)

    async def test() -> None:
        content = Content(1, SIZE)
        async with running(warm(tmp_path / "tier")) as tier:
            await hand_out(tier, content)
            assert await tier.whole(content.key) is not None
            assert await tier.whole(content.key) is not None
            assert caplog.text.count("media_errors_not_watched") == 1

    run(test)
