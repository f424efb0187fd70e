"""What happens to a local tier in trouble: never a wrong byte, only misses, and a state that says why."""

import contextlib
import ctypes
import logging
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from tests.local_tiers import BLOCK, Content, object_files, run, running, until, warm
from tierfs.blocks.errors import TierFailed
from tierfs.blocks.spans import Span
from tierfs.tiers.device import Device
from tierfs.tiers.interface import Offer
from tierfs.tiers.local import DirectoryTier

ROOT = Path(__file__).parents[2]


def flip(file: Path) -> None:
    with file.open("r+b") as handle:
        handle.seek(BLOCK + 777)
        byte = handle.read(1)[0]
        handle.seek(BLOCK + 777)
        handle.write(bytes([byte ^ 1]))


def swap(file: Path) -> None:
    with file.open("r+b") as handle:
        first, second = handle.read(BLOCK), handle.read(BLOCK)
        handle.seek(0)
        handle.write(second + first)


def punch(file: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with file.open("r+b") as handle:
        keep_size_and_punch = 0x01 | 0x02
        done = libc.fallocate(handle.fileno(), keep_size_and_punch, ctypes.c_long(BLOCK), ctypes.c_long(BLOCK))
        assert done == 0, os.strerror(ctypes.get_errno())


def truncate(file: Path) -> None:
    os.truncate(file, BLOCK)


def remove(file: Path) -> None:
    file.unlink()


DAMAGE = [(flip, 1), (swap, 2), (punch, 1), (truncate, 5), (remove, 5)]  # and the blocks it costs


@pytest.mark.parametrize(("damage", "lost"), DAMAGE)
@pytest.mark.parametrize("when", ["after verification", "before verification", "between runs"])
def test_damaged_object_is_never_served(
    tmp_path: Path, damage: Callable[[Path], None], lost: int, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        content = Content(1, 5 * BLOCK)
        if when == "between runs":
            async with running(warm(tmp_path)) as tier:
                await content.fill(tier)
            damage(object_files(tmp_path)[0])
        async with running(warm(tmp_path)) as tier:
            if when != "between runs":
                await content.fill(tier)
                if when == "after verification":
                    assert await content.hits(tier) == 5
                    assert await tier.read_span(content.key, Span(1, 0, BLOCK)) == content.block(1)
                damage(object_files(tmp_path)[0])
            for number in content.blocks:  # the unchecked ways never give anything of it
                assert tier.read_nowait(content.key, Span(number, 0, 100)) is None
                assert await tier.read_span(content.key, Span(number, 0, 100)) is None
            assert await content.hits(tier) == 5 - lost
            assert await content.hits(tier) == 5 - lost
            # what was lost can be fetched again, and is right
            for number in content.blocks:
                await until(lambda number=number: content.offer(tier, number) is not Offer.BYPASSED)  # type: ignore[misc]
            await tier.flush()
            assert await content.hits(tier) == 5
            assert tier.statistics().state == "ok"
        async with running(warm(tmp_path)) as tier:
            assert await content.hits(tier) == 5

    with caplog.at_level(logging.WARNING):
        run(test)
    assert len(caplog.records) < 12


def test_corrupt_block_is_counted_and_logged_with_its_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        content = Content(1, 3 * BLOCK)
        async with running(warm(tmp_path)) as tier:
            await content.fill(tier)
            flip(object_files(tmp_path)[0])
            assert await content.read(tier, 1) is None
            assert not tier.resident(content.key, 1)
            assert tier.statistics().corrupt_blocks == 1
        record = next(record.getMessage() for record in caplog.records if record.getMessage().startswith("corrupt"))
        for part in ("block=1", content.key.hex(), "a/1", str(tmp_path), "tier=warm"):
            assert part in record
        async with running(warm(tmp_path)) as tier:
            assert not tier.resident(content.key, 1)  # durably gone, not only in memory
            assert tier.resident(content.key, 2)

    run(test)


def test_punched_block_is_a_miss_at_once_without_being_read(tmp_path: Path) -> None:
    async def test() -> None:
        content = Content(1, 5 * BLOCK)
        async with running(warm(tmp_path)) as tier:
            await content.fill(tier)
            assert await content.hits(tier) == 5
            punch(object_files(tmp_path)[0])
            assert await tier.read_span(content.key, Span(0, 0, 100)) is None  # notices that the file changed
            assert [tier.resident(content.key, number) for number in content.blocks] == [True, False, True, True, True]
            assert tier.statistics().corrupt_blocks == 0

    run(test)


def test_rows_of_an_object_that_was_missing_once_do_not_come_back(tmp_path: Path) -> None:
    async def test() -> None:
        content = Content(1, 5 * BLOCK)
        async with running(warm(tmp_path)) as tier:
            await content.fill(tier)
        object_files(tmp_path)[0].unlink()
        async with running(warm(tmp_path)) as tier:
            assert tier.resident_bytes(content.key) == 0
            assert content.offer(tier, 2) is Offer.ACCEPTED
            await tier.flush()
        async with running(warm(tmp_path)) as tier:
            assert [number for number in content.blocks if tier.resident(content.key, number)] == [2]

    run(test)


def test_symlink_in_place_of_an_object_is_not_followed(tmp_path: Path) -> None:
    async def test() -> None:
        content = Content(1, 2 * BLOCK)
        outside = tmp_path / "outside"
        outside.write_bytes(b"o" * (2 * BLOCK))
        tier_path = tmp_path / "tier"
        async with running(warm(tier_path)) as tier:
            await content.fill(tier)
        object_file = object_files(tier_path)[0]
        object_file.unlink()
        object_file.symlink_to(outside)
        async with running(warm(tier_path)) as tier:
            assert tier.resident_bytes(content.key) == 0
            await content.fill(tier)
            assert await content.hits(tier) == 2
            assert not object_files(tier_path)[0].is_symlink()
        assert outside.read_bytes() == b"o" * (2 * BLOCK)

    run(test)


def test_losing_one_path_loses_only_its_objects_and_it_comes_back(tmp_path: Path) -> None:
    async def test() -> None:
        paths = [tmp_path / "a", tmp_path / "b"]
        contents = [Content(seed, 3 * BLOCK) for seed in range(8)]
        async with running(warm(*paths)) as tier:
            for content in contents:
                await content.fill(tier)
            paths[0].rename(tmp_path / "away")
            await until(lambda: tier.statistics().state == "degraded")
            assert str(paths[0]) in tier.statistics().reason
            hits = [await content.hits(tier) for content in contents]
            assert sorted(hits) == [0] * 4 + [3] * 4
            await until(lambda: tier.statistics().state == "ok")  # made anew, empty
            assert [len(object_files(path)) for path in paths] == [0, 4]
            for content in contents:
                await content.fill(tier)
            assert [await content.hits(tier) for content in contents] == [3] * 8
            assert tier.statistics().used_bytes == sum(f.stat().st_blocks * 512 for p in paths for f in object_files(p))

    run(test)


def test_path_that_comes_back_with_its_objects_serves_them_again(tmp_path: Path) -> None:
    async def test() -> None:
        path, away = tmp_path / "tier", tmp_path / "away"
        content = Content(1, 3 * BLOCK)
        async with running(warm(path)) as tier:
            await content.fill(tier)
            path.rename(away)
            path.write_text("in the way")
            await until(lambda: tier.statistics().state == "failed")
            assert content.offer(tier, 0) is Offer.FAILED
            assert await content.hits(tier) == 0
            path.unlink()
            away.rename(path)
            await until(lambda: tier.statistics().state == "ok")
            assert await content.hits(tier) == 3

    run(test)


def test_directory_deleted_under_the_tier(tmp_path: Path) -> None:
    async def test() -> None:
        path = tmp_path / "tier"
        content = Content(1, 3 * BLOCK)
        async with running(warm(path)) as tier:
            await content.fill(tier)
            assert await content.hits(tier) == 3
            shutil.rmtree(path)
            assert await content.hits(tier) == 0
            await until(lambda: tier.statistics().state == "ok" and path.is_dir())
            await content.fill(tier)
            assert await content.hits(tier) == 3
        async with running(warm(path)) as tier:
            assert await content.hits(tier) == 3

    run(test)


@contextlib.contextmanager
def small_file_system(kind: str, place: Path, size_mib: int) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount_point = place / "mnt"
    mount_point.mkdir()
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(mount_point)]
    else:
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("no mkfs.ext4 here")
        image = place / "image"
        image.write_bytes(b"")
        os.truncate(image, size_mib << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        command = ["mount", "-o", "loop", str(image), str(mount_point)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield mount_point
    finally:
        if os.path.ismount(mount_point):
            subprocess.run(["umount", "-l", str(mount_point)], check=True)  # lazily: a failed test may hold files


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_full_file_system_pauses_writes_keeps_reads_and_recovers(tmp_path: Path, kind: str) -> None:
    async def test(mount_point: Path) -> None:
        contents = [Content(seed, 16 * BLOCK) for seed in range(4)]
        ballast = mount_point / "ballast"
        async with running(warm(mount_point / "tier")) as tier:
            await contents[0].fill(tier)
            with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(1 << 20)):
                    pass
            await contents[1].fill(tier)
            statistics = tier.statistics()
            assert statistics.state == "degraded"
            assert "no space" in statistics.reason
            assert statistics.failed_writes > 0
            assert statistics.queued_bytes == 0
            assert await contents[0].hits(tier) == 16
            assert await contents[1].hits(tier) < 16
            ballast.unlink()
            await until(lambda: tier.statistics().state == "ok")
            await contents[2].fill(tier)
            assert await contents[2].hits(tier) == 16
        async with running(warm(mount_point / "tier")) as tier:
            assert await contents[0].hits(tier) == 16
            assert await contents[2].hits(tier) == 16

    with small_file_system(kind, tmp_path, 16) as mount_point:
        run(lambda: test(mount_point))


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_full_file_system_evicts_what_is_colder_and_goes_on(tmp_path: Path, kind: str) -> None:
    async def test(mount_point: Path) -> None:
        old, new = Content(1, 32 * BLOCK, model="old"), Content(2, 16 * BLOCK, model="new")
        ballast = mount_point / "ballast"
        async with running(warm(mount_point / "tier")) as tier:
            assert tier.statistics().capacity_bytes < 16 << 20  # not the 64 MiB of its configuration
            await old.fill(tier)
            assert await old.hits(tier) == 32
            with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            await new.fill(tier)
            await until(lambda: tier.statistics().state == "ok")  # the ballast is still there
            await new.fill(tier)
            assert await new.hits(tier) == 16
            assert await old.hits(tier) == 0
        async with running(warm(mount_point / "tier")) as tier:
            assert await new.hits(tier) == 16
            assert len(object_files(mount_point / "tier")) == 1

    with small_file_system(kind, tmp_path, 16) as mount_point:
        run(lambda: test(mount_point))


def test_unmounted_device_is_lost_and_its_empty_mount_point_is_left_alone(tmp_path: Path) -> None:
    async def test(mount_point: Path) -> None:
        content = Content(1, 8 * BLOCK)
        async with running(warm(mount_point / "tier")) as tier:
            await content.fill(tier)
            await trio.run_process(["umount", "-l", str(mount_point)])
            await until(lambda: "another device" in tier.statistics().reason)
            assert tier.statistics().state == "failed"
            assert await content.hits(tier) == 0
            assert content.offer(tier, 0) is Offer.FAILED
            assert list(mount_point.iterdir()) == []

    with small_file_system("tmpfs", tmp_path, 16) as mount_point:
        run(lambda: test(mount_point))


def test_eviction_that_cannot_be_recorded_leaves_the_file(tmp_path: Path) -> None:
    device = Device(tmp_path, mapped=False, probe_s=1.0, block_bytes=BLOCK, capacity_bytes=None)
    device.open()
    content = Content(1, BLOCK)
    device.store.open_object(content.key, BLOCK, create=True).close()
    residency = device.residency()
    assert residency is not None
    residency.close(clean=False)
    with pytest.raises(sqlite3.Error):
        device.remove([content.key])
    assert len(object_files(tmp_path)) == 1
    device.close(False)


CHILD = """
import sys
from pathlib import Path
import trio
from tests.local_tiers import BLOCK, Content, warm, running

async def main():
    async with running(warm(Path(sys.argv[1]), capacity_bytes=60 * BLOCK)) as tier:
        print("running", flush=True)
        seed = 0
        while True:
            await Content(seed % 8, 15 * BLOCK + 99, model=str(seed % 8)).fill(tier)
            print(seed, flush=True)
            seed += 1

trio.run(main)
"""


@pytest.mark.parametrize("seed", range(5))
def test_killed_while_filling_and_evicting_leaves_only_good_blocks(tmp_path: Path, seed: int) -> None:
    rounds = random.Random(seed).randint(2, 14)
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert child.stdout is not None
        for _ in range(rounds):
            assert child.stdout.readline()
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert child.stdout is not None
        child.stdout.close()

    async def test() -> None:
        async with running(warm(tmp_path, capacity_bytes=60 * BLOCK)) as tier:
            hits = resident = 0
            for number in range(8):
                content = Content(number, 15 * BLOCK + 99, model=str(number))
                resident += sum(tier.resident(content.key, block) for block in content.blocks)
                hits += await content.hits(tier)
            assert hits == resident  # what it says is there is there, and right
            assert hits >= min(rounds - 1, 2) * 16
            assert tier.statistics().corrupt_blocks == 0
            assert tier.statistics().used_bytes <= 60 * BLOCK

    run(test)


def test_index_that_lags_behind_the_objects_costs_refetches_only(tmp_path: Path) -> None:
    async def test() -> None:
        kept, evicted, later = Content(1, 4 * BLOCK), Content(2, 4 * BLOCK), Content(3, 4 * BLOCK)
        database, copy = tmp_path / "residency.db", tmp_path / "older.db"
        async with running(warm(tmp_path)) as tier:
            await kept.fill(tier)
            await evicted.fill(tier)
        shutil.copy(database, copy)
        async with running(warm(tmp_path)) as tier:
            await tier.evict(evicted.key)
            await later.fill(tier)
        for suffix in ("-wal", "-shm"):
            Path(f"{database}{suffix}").unlink(missing_ok=True)
        copy.replace(database)
        async with running(warm(tmp_path)) as tier:
            assert await kept.hits(tier) == 4
            assert await evicted.hits(tier) == 0
            assert await later.hits(tier) == 0
            assert len(object_files(tmp_path)) == 1

    run(test)


@pytest.mark.parametrize("how", ["garbage", "cut", "foreign"])
def test_unreadable_index_is_moved_aside_and_the_tier_starts_empty(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        content = Content(1, 4 * BLOCK)
        database = tmp_path / "residency.db"
        async with running(warm(tmp_path)) as tier:
            await content.fill(tier)
        if how == "garbage":
            with database.open("r+b") as file:
                file.seek(4096)
                file.write(random.Random(1).randbytes(database.stat().st_size - 4096))
        elif how == "cut":
            os.truncate(database, 4096 + 100)
        else:
            database.unlink()
            with contextlib.closing(sqlite3.connect(database)) as other:
                other.execute("CREATE TABLE objects (other TEXT)")
        async with running(warm(tmp_path)) as tier:
            assert tier.statistics().state == "ok"
            assert await content.hits(tier) == 0
            assert object_files(tmp_path) == []
            assert (tmp_path / "residency.db.corrupt").exists()
            await content.fill(tier)
            assert await content.hits(tier) == 4

    run(test)
    assert "residency_unreadable" in caplog.text


def test_directory_held_by_another_process_is_refused_with_its_pid(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"running\n"
        with pytest.raises(TierFailed, match=rf"in use by process {child.pid}\b"):
            trio.run(warm(tmp_path).run)
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def test_directory_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(warm(tmp_path)):
            pass
        (tmp_path / "format").write_text("3\n")
        with pytest.raises(TierFailed, match="format 3.*upgrade"):
            await warm(tmp_path).run()

    run(test)


def test_only_path_that_cannot_be_used_is_refused_but_one_of_two_is_left_out(tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "file").write_text("no directory")
        with pytest.raises(TierFailed, match="cannot use"):
            await warm(tmp_path / "file" / "tier").run()
        async with running(warm(tmp_path / "file" / "tier", tmp_path / "good")) as tier:
            assert tier.statistics().state == "degraded"
            content = Content(1, 4 * BLOCK)
            await content.fill(tier)
            assert await content.hits(tier) == 4

    run(test)


def test_out_of_descriptors_is_no_reason_to_drop_what_is_resident(tmp_path: Path) -> None:
    async def test() -> None:
        import resource

        content, other = Content(1, 2 * BLOCK), Content(2, 2 * BLOCK)
        tier = DirectoryTier(
            "warm", [tmp_path], block_bytes=BLOCK, capacity_bytes=64 << 20, mapped=False, open_objects=1
        )
        async with running(tier):
            await content.fill(tier)
            await other.fill(tier)
            assert await other.hits(tier) == 2  # a thread exists by now, and the first object is closed
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            lowest_free = os.dup(0)
            os.close(lowest_free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
            try:
                assert await content.hits(tier) == 0
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert await content.hits(tier) == 2
            assert tier.statistics().failed_reads == 2

    run(test)
