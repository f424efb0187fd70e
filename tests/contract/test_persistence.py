"""Where residency is kept: what changes from one kind to the other costs at most refetches, and is told; a pool that is
full, and a tier that is killed while it fills.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.local_tiers import BLOCK, Content, object_files, run, running, until
from tests.pmem_pools import killed_at_a_random_point, needs_library, persistent_folder
from tierfs.blocks.spans import Span
from tierfs.tiers import pool_layout
from tierfs.tiers.device import Device
from tierfs.tiers.interface import Offer
from tierfs.tiers.local import DirectoryTier
from tierfs.tiers.objects import allocated_bytes
from tierfs.tiers.persistence import open_persistence
from tierfs.tiers.pmem.library import PmemError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder() -> Iterator[Path]:
    yield from persistent_folder()


def hot(folder: Path, *, pool: bool = True, **more: object) -> DirectoryTier:
    settings: dict[str, object] = {"capacity_bytes": 64 << 20, "mapped": True, "probe_s": 0.05, **more}
    if pool:
        settings["residency"] = "pool"
    else:
        settings["mapped"] = False  # a mapped tier on a tmpfs would keep nothing
    return DirectoryTier("hot", [folder], block_bytes=BLOCK, **settings)  # type: ignore[arg-type]


def test_directory_of_an_earlier_version_keeps_its_objects_when_it_gets_a_pool(folder: Path) -> None:
    async def test() -> None:
        contents = [Content(seed, 3 * BLOCK + 100, model=str(seed)) for seed in range(3)]
        async with running(hot(folder, pool=False)) as tier:
            for content in contents:
                await content.fill(tier)
        assert (folder / "residency.db").exists()
        for _ in range(2):
            async with running(hot(folder)) as tier:
                assert tier.statistics().residency == "libpmemobj pool"
                for content in contents:
                    assert tier.read_nowait(content.key, Span(2, 5, 100)) is not None  # verified still
                    assert await content.hits(tier) == 4
                assert {model for model, _ in tier._placement.heats.items()} == {b"0", b"1", b"2"}
            assert not list(folder.glob("residency.db*"))

    run(test)


def test_database_that_was_taken_over_already_does_not_come_back(folder: Path) -> None:
    async def test() -> None:
        content = Content(1, 3 * BLOCK)
        async with running(hot(folder, pool=False)) as tier:
            await content.fill(tier)
        saved = (folder / "residency.db").read_bytes()
        async with running(hot(folder)) as tier:
            other = Content(2, 2 * BLOCK)
            await other.fill(tier)
            assert await tier.evict(content.key) > 0
        (folder / "residency.db").write_bytes(saved)  # killed just before it was removed
        async with running(hot(folder)) as tier:
            assert tier.resident_bytes(content.key) == 0
            assert await other.hits(tier) == 2
        assert not (folder / "residency.db").exists()

    run(test)


def test_pool_that_cannot_be_kept_up_to_date_is_removed_with_what_it_says(folder: Path) -> None:
    async def test() -> None:
        content = Content(1, 3 * BLOCK)
        async with running(hot(folder)) as tier:
            await content.fill(tier)
        async with running(hot(folder, pool=False)) as tier:
            assert tier.resident_bytes(content.key) == 0
            assert object_files(folder) == []
            assert not (folder / "residency.pool").exists()
            assert content.offer(tier, 1) is Offer.ACCEPTED
            await tier.flush()
        async with running(hot(folder)) as tier:
            assert [number for number in content.blocks if tier.resident(content.key, number)] == [1]
            assert await content.read(tier, 1) == content.block(1)

    run(test)


_NO_LIBRARY = """
import json, sys
from pathlib import Path
from tierfs.tiers.persistence import open_persistence
found = open_persistence(Path(sys.argv[1]), mapped=True, medium="tmpfs", wanted="pool", boot="b",
                         capacity_bytes=1 << 20, block_bytes=4096)
print(json.dumps([found.kind, found.reason, found.medium]))
"""


def test_without_the_library_a_database_is_used_and_the_reason_is_told(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "libpmemobj.so.1").write_text("no library")
    found = subprocess.run(
        [sys.executable, "-c", _NO_LIBRARY, str(folder)], capture_output=True, text=True, check=True, cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
    )  # fmt: skip
    kind, reason, medium = json.loads(found.stdout)
    assert (kind, medium) == ("sqlite", "tmpfs (volatile)")
    assert "install the packages libpmemobj1" in reason
    assert (folder / "residency.db").exists()


def test_directory_too_full_for_a_pool_keeps_its_objects(tmp_path: Path) -> None:
    needs_library()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    grow = ["mount", "-o", "remount,size=64m", str(tmp_path)]

    async def test() -> None:
        content = Content(1, 3 * BLOCK)
        async with running(hot(tmp_path / "tier", pool=False)) as tier:
            await content.fill(tier)
        async with running(hot(tmp_path / "tier")) as tier:
            assert tier.statistics().residency == "sqlite"
            assert "no space for a pool" in tier.statistics().residency_reason
            assert await content.hits(tier) == 3
        await trio.run_process(grow)
        async with running(hot(tmp_path / "tier")) as tier:
            assert tier.statistics().residency == "libpmemobj pool"
            assert await content.hits(tier) == 3

    try:
        run(test)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize(
    ("mapped", "medium", "kind", "told"),
    [
        (False, "directory", "sqlite", "directory"),
        (True, "directory", "sqlite", "directory"),
        (True, "tmpfs", "none", "tmpfs (volatile)"),
        (False, "tmpfs", "sqlite", "tmpfs (volatile)"),
    ],
)
def test_nothing_pretends_to_be_persistent_memory(
    tmp_path: Path, mapped: bool, medium: str, kind: str, told: str
) -> None:
    found = open_persistence(
        tmp_path, mapped=mapped, medium=medium, wanted="asked", boot="b", capacity_bytes=1 << 20, block_bytes=4096
    )
    if found.residency is not None:
        found.residency.close(clean=True)
    assert (found.kind, found.medium, bool(found.reason)) == (kind, told, mapped)
    assert [path.name for path in tmp_path.iterdir()] == ([] if kind == "none" else ["residency.db"])


def test_eviction_that_the_pool_cannot_record_leaves_the_file(folder: Path) -> None:
    device = Device(folder, mapped=True, probe_s=1.0, block_bytes=BLOCK, capacity_bytes=None, residency="pool")
    device.open()
    content = Content(1, BLOCK)
    device.store.open_object(content.key, BLOCK, create=True).close()
    residency = device.residency()
    assert residency is not None
    residency.close(clean=False)
    with pytest.raises(PmemError):
        device.remove([content.key])
    assert len(object_files(folder)) == 1
    device.close(False)


def test_what_finds_no_slot_in_the_pool_makes_colder_objects_give_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_layout, "_MIN_OBJECTS", 4)

    async def test() -> None:
        now_s = [1e9]
        old = [Content(seed, BLOCK, model=str(seed)) for seed in range(4)]
        new = Content(9, BLOCK, model="new")
        async with running(hot(folder, clock=lambda: now_s[0], capacity_bytes=8 << 20)) as tier:
            for content in old:
                await content.fill(tier)
                now_s[0] += 60
            now_s[0] += 2 * 3600  # cold by now
            await new.fill(tier)
            statistics = tier.statistics()
            assert statistics.state == "ok"
            assert (statistics.bypassed_blocks, statistics.evicted_blocks) == (1, 1)
            await until(lambda: not tier._removals._leaving)
            assert tier.statistics().objects == 3 == len(object_files(folder))
            await new.fill(tier)
            assert await new.hits(tier) == 1
            assert [await content.hits(tier) for content in old] == [0, 1, 1, 1]  # the coldest went
        async with running(hot(folder, capacity_bytes=8 << 20)) as tier:
            assert await new.hits(tier) == 1

    run(test)


@pytest.mark.slow
def test_ten_thousand_promotions_and_evictions_leave_pool_and_directory_as_they_were(folder: Path) -> None:
    def sizes() -> dict[str, int]:
        return {path.name: path.stat().st_blocks for path in folder.iterdir() if path.is_file()}

    async def test() -> None:
        stays = Content(0, 2 * BLOCK)
        async with running(hot(folder)) as tier:
            await stays.fill(tier)
            before = sizes()
            for number in range(1, 10_001):
                content = Content(number, 4096, model=str(number % 100))
                assert await content.fill(tier) == 1
                assert await tier.evict(content.key) == 4096
            assert sizes() == before
            assert len(object_files(folder)) == tier.statistics().objects == 1
            assert tier.statistics().used_bytes == 2 * BLOCK
        async with running(hot(folder)) as tier:
            assert await stays.hits(tier) == 2

    run(test, seconds=110)


def fill_for_ever(folder: Path, seed: int, tell: Callable[[bytes], object]) -> None:
    point = random.Random(seed)

    async def fill() -> None:
        async with running(hot(folder, capacity_bytes=40 * BLOCK)) as tier:
            while True:
                content = Content(point.randrange(12), 6 * BLOCK + 99, model=str(point.randrange(12)))
                tier.touch(content.key)
                for number in content.blocks:
                    content.offer(tier, number)
                if point.random() < 0.7:
                    await tier.flush()
                    tell(b"f")
                if point.random() < 0.3:
                    await tier.evict(content.key)

    trio.run(fill)


@pytest.mark.parametrize("kills", [5, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_tier_killed_at_random_points_while_it_fills_has_no_wrong_byte_and_leaks_no_space(
    folder: Path, kills: int
) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    point = random.Random(seed)
    contents = [Content(number, 6 * BLOCK + 99) for number in range(12)]
    hits = 0

    async def look() -> None:
        nonlocal hits
        async with running(hot(folder, capacity_bytes=40 * BLOCK)) as tier:
            for content in contents:
                hits += await content.hits(tier)
            statistics = tier.statistics()
            assert statistics.corrupt_blocks == 0
            assert statistics.used_bytes <= 40 * BLOCK
            files = object_files(folder)
            assert statistics.used_bytes == sum(allocated_bytes(file.stat()) for file in files)
            assert statistics.objects == len(files)
        names = {"residency.pool", "format", "lock", "reserve", "objects", "dying"}
        assert {path.name for path in folder.iterdir()} == names

    for round_number in range(kills):
        killed_at_a_random_point(partial(fill_for_ever, folder, seed + round_number), point, 0.05)
        run(look)
    assert hits > kills
