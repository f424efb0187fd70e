"""The verifier: finds what is bad in any tier, brings it again, and keeps out of readers' way."""

from pathlib import Path

import pytest
import trio

from tests.local_tiers import object_files, run
from tests.models_world import BLOCK, SIZE, World
from tierfs.blocks.ids import ContentId, ObjectKey
from tierfs.cache.verifier import VerifyProgress, jobs_for, verify
from tierfs.tiers.interface import Checked

FAST = 1 << 40


def flip(path: Path, *blocks: int) -> None:
    """Somebody's disk lies, and keeps its times."""
    with path.open("r+b") as file:
        for block in blocks:
            file.seek(block * BLOCK + 100)
            byte = file.read(1)
            file.seek(block * BLOCK + 100)
            file.write(bytes([byte[0] ^ 1]))


async def check(
    world: World, *names: str, repair: bool = True, bytes_per_s: int = FAST, forget: bool = False
) -> VerifyProgress:
    files = [] if forget else [await world.file(name) for name in ("a", "b", "c", "d")]
    wanted = {(await world.file(name)).version for name in names} if names else None
    progress = VerifyProgress()
    await verify(world.cache, jobs_for(world.cache, files, wanted), progress, repair=repair, bytes_per_s=bytes_per_s)
    return progress


def test_all_is_good(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path)
        async with world.running():
            await world.load("a")
            await world.load("b")
            hits = world.warm.statistics().hit_blocks
            progress = await check(world)
            assert (progress.good_blocks, progress.bad_blocks, progress.unread_blocks) == (16, 0, 0)
            assert progress.checked_bytes == progress.total_bytes == 2 * SIZE
            assert progress.objects == 2 and world.warm.statistics().hit_blocks == hits
            assert (await check(world, "b")).good_blocks == 8
            assert (await check(world, "c")).total_bytes == 0

    run(test)


def test_an_object_that_was_made_under_its_content_id_is_found_by_its_path(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path)
        async with world.running():
            file = await world.file("a")
            world.cache.learn({file.version: ContentId(b"c" * 16)})
            await world.load("a")
            assert (await check(world, "a")).good_blocks == 8
            assert (await check(world, "b")).good_blocks == 0

    run(test)


def test_a_bad_block_is_brought_again_from_the_source(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path)
        async with world.running():
            await world.load("a")
            (path,) = object_files(tmp_path / "warm")
            flip(path, 2, 5)
            requests = len(world.source.requests)
            progress = await check(world)
            assert (progress.good_blocks, progress.bad_blocks, progress.repaired_blocks) == (6, 2, 2)
            assert [(bad.tier, bad.path, bad.block, bad.outcome) for bad in progress.bad] == [
                ("warm", "a/model.bin", 2, "repaired"), ("warm", "a/model.bin", 5, "repaired"),
            ]  # fmt: skip
            assert len(world.source.requests) == requests + 2
            assert (await check(world)).good_blocks == 8

    run(test)


def test_a_bad_block_of_hot_comes_from_warm(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path, hot=True)
        async with world.running():
            await world.load("a")
            await world.cache.tiers[0].flush()
            (path,) = object_files(tmp_path / "hot")
            flip(path, 0)
            requests = len(world.source.requests)
            progress = await check(world)
            assert (progress.good_blocks, progress.bad_blocks, progress.repaired_blocks) == (15, 1, 1)
            assert progress.bad[0].tier == "hot" and len(world.source.requests) == requests

    run(test)


def test_without_repair_what_is_bad_is_dropped_and_left(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path)
        async with world.running():
            await world.load("a")
            (path,) = object_files(tmp_path / "warm")
            flip(path, 1)
            requests = len(world.source.requests)
            progress = await check(world, repair=False)
            assert (progress.bad_blocks, progress.repaired_blocks) == (1, 0)
            assert await world.resident("a") == SIZE - BLOCK and len(world.source.requests) == requests

    run(test)


def test_while_the_source_is_away_what_is_bad_is_told_as_not_repaired(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path)
        async with world.running():
            await world.load("a")
            (path,) = object_files(tmp_path / "warm")
            flip(path, 0, 1, 2)
            world.source.unavailable = True
            progress = await check(world)
            assert (progress.good_blocks, progress.bad_blocks, progress.repaired_blocks) == (5, 3, 0)
            assert progress.source_away and "did not arrive" in progress.trouble

    run(test)


def test_an_object_that_was_handed_out_is_made_anew_and_its_file_left_as_it_was(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path)
        async with world.running():
            await world.load("a")
            (path,) = object_files(tmp_path / "warm")
            entry = next(iter(world.warm._index))
            entry.handed_out = True  # somebody may map it
            with path.open("rb") as mapped:
                flip(path, 3)
                before = mapped.read()
                progress = await check(world)
                assert (progress.good_blocks, progress.bad_blocks, progress.repaired_blocks) == (3, 1, 1)
                assert progress.checked_bytes == SIZE and await world.resident("a") == SIZE
                mapped.seek(0)
                assert mapped.read() == before
            assert (await check(world)).good_blocks == 8

    run(test)


def test_an_object_whose_file_was_taken_away_is_bad(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path)
        async with world.running():
            await world.load("a")
            (path,) = object_files(tmp_path / "warm")
            path.unlink()
            progress = await check(world)
            assert progress.bad_blocks == progress.repaired_blocks >= 1
            assert await world.resident("a") == SIZE

    run(test)


def test_what_no_path_leads_to_any_more_is_checked_and_dropped(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path)
        async with world.running():
            await world.load("a")
            (path,) = object_files(tmp_path / "warm")
            flip(path, 4)
            progress = await check(world, forget=True)
            assert (progress.good_blocks, progress.bad_blocks, progress.repaired_blocks) == (7, 1, 1)
            assert progress.bad[0].outcome == "dropped"

    run(test)


def test_what_was_evicted_meanwhile_is_not_bad(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path)
        async with world.running():
            await world.load("a")
            file = await world.file("a")
            jobs = jobs_for(world.cache, [file], None)
            await world.warm.evict(ObjectKey(file.version))
            progress = VerifyProgress()
            await verify(world.cache, jobs, progress, repair=True, bytes_per_s=FAST)
            assert (progress.good_blocks, progress.bad_blocks) == (0, 0)
            assert (
                await world.warm.check_block(ObjectKey(file.version), 0, memoryview(bytearray(BLOCK))) is Checked.GONE
            )

    run(test)


@pytest.mark.parametrize("rate_blocks", [20, 40])
def test_the_rate_is_kept(tmp_path: Path, rate_blocks: int) -> None:
    async def test() -> None:
        world = World(tmp_path)
        async with world.running():
            await world.load("a")
            since_s = trio.current_time()
            await check(world, bytes_per_s=rate_blocks * BLOCK)
            assert trio.current_time() - since_s >= 7 / rate_blocks

    run(test)


def test_readers_go_first(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path)
        async with world.running(), trio.open_nursery() as nursery:
            await world.load("a")
            world.source.gate = trio.Event()
            nursery.start_soon(world.cache.load, await world.file("b"), 0)
            progress = VerifyProgress()
            jobs = jobs_for(world.cache, [await world.file("a")], None)
            nursery.start_soon(lambda: verify(world.cache, jobs, progress, repair=True, bytes_per_s=FAST))
            await trio.sleep(0.1)
            assert progress.good_blocks == 0
            world.source.gate.set()

    run(test)
