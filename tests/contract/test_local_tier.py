"""What every local tier promises: warm on a disk directory, warm over two, hot on a tmpfs, hot with its residency in a
libpmemobj pool (on persistent memory, or on what stands for it: see tests/pmem_pools.py).
"""

import contextlib
import errno
import os
import shutil
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.local_tiers import BLOCK, Content, PoolLease, buffer, object_files, run, running
from tests.pmem_pools import DAX, persistent_folder
from tierfs.blocks.ids import ObjectKey, digest_block
from tierfs.blocks.spans import Span
from tierfs.tiers import local
from tierfs.tiers.interface import Checked, Offer
from tierfs.tiers.local import DirectoryTier
from tierfs.tiers.pmem.library import PmemError
from tierfs.tiers.pmem.pool import Pool
from tierfs.tiers.pool_layout import LAYOUT_NAME, MARK_OFFSET, pack_mark
from tierfs.tiers.pool_residency import PoolResidency
from tierfs.tiers.residency import Residency

MakeTier = Callable[..., DirectoryTier]
SHM = Path("/dev/shm")
OBJECT_BLOCKS_MAX = local._OBJECT_BLOCKS_MAX


class Kit:
    """Makes tiers of one kind, again and again on the same directories."""

    def __init__(self, kind: str, paths: list[Path]) -> None:
        self.kind = kind
        self.paths = paths
        self.hot = kind != "warm"
        self.persistent = kind != "hot"

    def tier(self, **more: Any) -> DirectoryTier:
        settings: dict[str, Any] = {"capacity_bytes": 64 << 20, "mapped": self.hot, "probe_s": 0.05, **more}
        if self.kind == "hot-pool":
            settings["residency"] = "pool"
        return DirectoryTier(self.kind, self.paths, **{"block_bytes": BLOCK, **settings})

    def files(self) -> list[Path]:
        return [file for path in self.paths for file in object_files(path)]

    def forget_boot(self) -> None:
        """As if the machine had died and started again."""
        for path in self.paths:
            if (path / "residency.pool").exists():
                pool = Pool.open(path / "residency.pool", LAYOUT_NAME)
                with pool.transaction() as transaction:
                    transaction.write(MARK_OFFSET, pack_mark("another boot", clean=False))
                pool.close()
            elif (path / "residency.db").exists():
                with contextlib.closing(sqlite3.connect(path / "residency.db")) as db, db:
                    db.execute("UPDATE meta SET value = '0' WHERE name = 'clean'")
                    db.execute("UPDATE meta SET value = 'another boot' WHERE name = 'boot'")


@pytest.fixture(params=["warm", "warm-two", "hot", "hot-pool"])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kit]:
    if request.param == "hot":
        if not SHM.is_dir():
            pytest.skip("no /dev/shm here")
        root = SHM / f"tierfs-test-{uuid.uuid4().hex}"
        yield Kit("hot", [root])
        shutil.rmtree(root, ignore_errors=True)
    elif request.param == "hot-pool":
        for folder in persistent_folder():
            yield Kit("hot-pool", [folder])
    elif request.param == "warm-two":
        yield Kit("warm", [tmp_path / "a", tmp_path / "b"])
    else:
        yield Kit("warm", [tmp_path / "tier"])


def test_offered_blocks_become_resident_and_read_back(kit: Kit) -> None:
    async def test() -> None:
        # the last block is neither whole nor a multiple of a page
        contents = [Content(seed, 5 * BLOCK + 4097 + seed) for seed in range(4)] + [Content(9, 17)]
        async with running(kit.tier()) as tier:
            for content in contents:
                assert not tier.resident(content.key, 0)
                assert await content.fill(tier) == len(content.blocks)
            for content in contents:
                assert tier.resident_bytes(content.key) == len(content.bytes)
                assert tier.digest(content.key, 0) == digest_block(content.block(0))
                assert await content.hits(tier) == len(content.blocks)
            for file in kit.files():
                assert file.stat().st_size in {len(content.bytes) for content in contents}
            statistics = tier.statistics()
            assert statistics.state == "ok"
            assert statistics.objects == len(contents) == len(kit.files())
            assert statistics.written_bytes == sum(len(content.bytes) for content in contents)
            assert statistics.queued_bytes == 0
            assert statistics.used_bytes == sum(file.stat().st_blocks * 512 for file in kit.files())

    run(test)


def test_every_accepted_lease_is_released_once(kit: Kit) -> None:
    async def test() -> None:
        content = Content(1, 20 * BLOCK)
        leases: list[PoolLease] = []
        async with running(kit.tier()) as tier:
            assert all(content.offer(tier, number, leases) is Offer.ACCEPTED for number in content.blocks)
            assert content.offer(tier, 0) is Offer.RESIDENT  # under way counts as had
            await tier.flush()
            assert [lease.released for lease in leases] == [1] * 20
            assert content.offer(tier, 3) is Offer.RESIDENT

    run(test)


def test_leases_come_back_when_the_tier_stops_at_once(kit: Kit) -> None:
    async def test() -> None:
        content = Content(1, 40 * BLOCK)
        leases: list[PoolLease] = []
        started = trio.current_time()
        async with running(kit.tier()) as tier:
            for number in content.blocks:
                content.offer(tier, number, leases)
        assert trio.current_time() - started < 5
        assert [lease.released for lease in leases] == [1] * 40
        assert content.offer(tier, 0) is Offer.FAILED
        assert not await tier.read_block(content.key, 0, buffer(BLOCK))

    run(test)


def test_spans_are_answered_only_from_verified_blocks(kit: Kit) -> None:
    async def test() -> None:
        content = Content(1, 3 * BLOCK + 100)
        span, tail = Span(1, 4000, 5000), Span(3, 50, 50)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
            assert await tier.read_span(content.key, span) == content.block(1)[4000:9000]
            assert await tier.read_span(content.key, tail) == content.block(3)[50:100]
            view = tier.read_nowait(content.key, span)
            if kit.hot:
                assert view is not None
            again = tier.read_nowait(content.key, tail)
            if view is not None:  # (a file system without RWF_NOWAIT never answers)
                assert view == content.block(1)[4000:9000]
                assert again == content.block(3)[50:100]
            assert await tier.read_span(content.key, Span(9, 0, 1)) is None
            assert tier.read_nowait(ObjectKey(bytes(16)), span) is None
            (file,) = kit.files()
            os.utime(file)  # somebody else was there: each block must prove itself again
            assert tier.read_nowait(content.key, span) is None
            assert await tier.read_span(content.key, span) is None
            assert await content.read(tier, 1) == content.block(1)
            assert await tier.read_span(content.key, span) == content.block(1)[4000:9000]
            assert await tier.read_span(content.key, tail) is None

    run(test)


@pytest.mark.parametrize("between", ["nothing", "touched", "flipped", "unclean"])
def test_verified_blocks_stay_verified_across_runs_unless_the_file_was_touched_or_the_machine_died(
    kit: Kit, between: str
) -> None:
    if not kit.persistent:
        pytest.skip("hot on a tmpfs keeps nothing across runs")

    async def test() -> None:
        content = Content(1, 3 * BLOCK + 100)
        span, other = Span(1, 4000, 5000), Span(2, 0, 100)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
        (file,) = kit.files()
        if between == "touched":
            os.utime(file)
        elif between == "flipped":
            with file.open("r+b") as damaged:
                damaged.seek(BLOCK + 4001)
                damaged.write(bytes([content.bytes[BLOCK + 4001] ^ 1]))
        elif between == "unclean":
            kit.forget_boot()
        trusted = between == "nothing"
        async with running(kit.tier()) as tier:
            found = await tier.read_span(content.key, span)
            assert found == (content.block(1)[4000:9000] if trusted else None)
            whole = await content.read(tier, 1)
            assert whole == (None if between == "flipped" else content.block(1))
        async with running(kit.tier()) as tier:  # what was proved in that run stays proved, and nothing else
            if between != "flipped":
                assert await tier.read_span(content.key, span) == content.block(1)[4000:9000]
            assert await tier.read_span(content.key, other) == (content.block(2)[:100] if trusted else None)

    run(test)


def test_views_stay_good_while_later_reads_are_answered(kit: Kit) -> None:
    async def test() -> None:
        content = Content(1, 40 * BLOCK)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
            assert await content.hits(tier) == 40
            for number in content.blocks:  # into the page cache
                await tier.read_span(content.key, Span(number, 0, BLOCK))
            views = [tier.read_nowait(content.key, Span(number, 0, BLOCK)) for number in content.blocks]
            for number, view in enumerate(views):
                assert view is None or view == content.block(number)
            if kit.hot:
                assert None not in views

    run(test)


def test_residency_survives_a_restart_where_it_can(kit: Kit) -> None:
    async def test() -> None:
        content = Content(1, 3 * BLOCK + 100)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
        async with running(kit.tier()) as tier:
            if not kit.persistent:
                assert tier.resident_bytes(content.key) == 0
                assert kit.files() == []
            else:
                assert tier.resident_bytes(content.key) == len(content.bytes)
                assert await content.hits(tier) == 4
                assert tier.statistics().used_bytes >= len(content.bytes)

    run(test)


def test_a_failed_save_does_not_forget_which_files_somebody_else_wrote_to(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kit.persistent:
        pytest.skip("hot on a tmpfs keeps nothing across runs")

    async def test() -> None:
        content = Content(1, 3 * BLOCK)
        span = Span(1, 100, 10)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
        (file,) = kit.files()
        async with running(kit.tier()) as tier:
            os.utime(file)
            assert await tier.read_span(content.key, span) is None  # noticed: no block is verified any more
            failures = []

            def fail(*arguments: object, **named: object) -> None:
                failures.append(1)
                raise PmemError(errno.EIO, "I/O error") if kit.hot else sqlite3.OperationalError("disk I/O error")

            with monkeypatch.context() as patch:
                patch.setattr(PoolResidency if kit.hot else Residency, "save", fail)
                for device in tier._devices:
                    await tier._save(device)
            assert failures
            while tier.statistics().state != "ok":  # probed, and in service again
                await trio.lowlevel.checkpoint()
            assert await content.read(tier, 0) == content.block(0)  # its stamp is saved with the next save
        async with running(kit.tier()) as tier:
            assert await tier.read_span(content.key, Span(0, 0, 10)) == content.block(0)[:10]
            assert await tier.read_span(content.key, span) is None

    run(test)


def test_objects_of_another_block_size_are_evicted_when_found(kit: Kit) -> None:
    if not kit.persistent:
        pytest.skip("hot on a tmpfs keeps nothing across runs")

    async def test() -> None:
        content = Content(1, 3 * BLOCK + 100)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
        async with running(kit.tier(block_bytes=2 * BLOCK)) as tier:
            assert tier.resident_bytes(content.key) == 0
            assert not tier.resident(content.key, 0)
            assert await tier.read_span(content.key, Span(1, 0, 10)) is None
            while tier.statistics().used_bytes:  # the space follows
                await trio.lowlevel.checkpoint()
        async with running(kit.tier()) as tier:
            assert tier.resident_bytes(content.key) == 0
        assert kit.files() == []

    run(test)


def test_evicted_object_gives_its_space_back(kit: Kit) -> None:
    async def test() -> None:
        content, other = Content(1, 4 * BLOCK), Content(2, 4 * BLOCK)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
            await other.fill(tier)
            before = tier.statistics().used_bytes
            assert await tier.evict(content.key) >= len(content.bytes)
            assert not tier.resident(content.key, 0)
            assert await content.read(tier, 0) is None
            assert tier.statistics().used_bytes <= before - len(content.bytes)
            assert tier.statistics().evicted_blocks == 4
            assert len(kit.files()) == 1
            assert await tier.evict(content.key) == 0
            assert await content.fill(tier) == 4  # and it can come again
            assert await content.hits(tier) == 4

    run(test)


def test_an_object_of_more_blocks_than_the_index_takes_is_passed_by(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source may claim any size. Nothing is kept for it, and nothing gives way to it."""
    monkeypatch.setattr(local, "_OBJECT_BLOCKS_MAX", 8)

    async def test() -> None:
        now_s = 1e6
        resident, largest = Content(1, 8 * BLOCK, model="resident"), Content(2, 8 * BLOCK, model="largest")
        async with running(kit.tier(capacity_bytes=9 * BLOCK, clock=lambda: now_s)) as tier:
            assert await resident.fill(tier) == 8
            now_s += 1e5  # what is there would give way to anything
            for size_bytes in (8 * BLOCK + 1, (OBJECT_BLOCKS_MAX + 1) * BLOCK):
                facts = replace(largest.facts, key=ObjectKey(b"k" * 16), size_bytes=size_bytes)
                lease = PoolLease(largest.block(0))
                assert tier.offer(facts, 0, digest_block(largest.block(0)), lease) is Offer.BYPASSED
                assert lease.released == 0 and tier.resident_bytes(facts.key) == 0
            assert tier.statistics().objects == 1 and tier.statistics().bypassed_blocks == 2
            assert await resident.hits(tier) == 8
            assert await largest.fill(tier) == 8
            assert await largest.hits(tier) == 8

    run(test)


def test_pinned_object_is_not_evicted(kit: Kit) -> None:
    async def test() -> None:
        first, second = Content(1, 8 * BLOCK, model="one"), Content(2, 8 * BLOCK, model="two")
        async with running(kit.tier(capacity_bytes=10 * BLOCK)) as tier:
            await first.fill(tier)
            tier.pin(first.key)
            tier.pin(first.key)
            tier.unpin(first.key)
            assert await tier.evict(first.key) == 0
            assert await second.fill(tier) < 8
            assert await first.hits(tier) == 8
            assert tier.statistics().bypassed_blocks > 0
            tier.unpin(first.key)
            assert await second.fill(tier) > 0
            assert await first.hits(tier) == 0
            assert await second.hits(tier) == 8

    run(test)


def test_what_an_operator_keeps_makes_room_for_itself_and_stays(kit: Kit) -> None:
    async def test() -> None:
        hot, kept = Content(1, 10 * BLOCK, model="hot"), Content(2, 10 * BLOCK, model="kept")
        now_s = 1e6
        async with running(kit.tier(capacity_bytes=15 * BLOCK, clock=lambda: now_s)) as tier:
            tier.keep(kept.key)
            for _ in range(3):
                now_s += 60
                await hot.fill(tier)
            assert await kept.fill(tier) >= 9  # the first one waits for what gives way
            await kept.fill(tier)
            assert tier.resident_bytes(kept.key) == 10 * BLOCK
            for _ in range(9):
                now_s += 60
                await hot.fill(tier)
            assert tier.resident_bytes(kept.key) == 10 * BLOCK
            assert await tier.evict(kept.key) == 0
            tier.let_go(kept.key)
            assert await tier.evict(kept.key) > 0

    run(test)


def test_a_check_finds_what_is_bad_and_counts_no_hit(kit: Kit) -> None:
    async def test() -> None:
        content = Content(1, 5 * BLOCK)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
            ((facts, keys),) = tier.objects()
            assert (facts.key, facts.size_bytes, facts.path, content.key in keys) == (
                content.key, 5 * BLOCK, content.facts.path, True,
            )  # fmt: skip
            (file,) = kit.files()
            with file.open("r+b") as opened:
                opened.seek(2 * BLOCK)
                opened.write(b"\0wrong\0")
            found = [await tier.check_block(content.key, block, buffer(BLOCK)) for block in content.blocks]
            assert found == [Checked.GOOD, Checked.GOOD, Checked.BAD, Checked.GOOD, Checked.GOOD]
            assert not tier.resident(content.key, 2)
            assert (tier.statistics().corrupt_blocks, tier.statistics().hit_blocks) == (1, 0)
            assert await tier.check_block(content.key, 2, buffer(BLOCK)) is Checked.GONE
            before = tier.statistics().used_bytes
            assert content.offer(tier, 2) is Offer.ACCEPTED
            await tier.flush()
            assert tier.statistics().used_bytes == before  # its space had been counted all the while

    run(test)


def test_another_capacity_is_kept_from_now_on(kit: Kit) -> None:
    async def test() -> None:
        contents = [Content(seed, 4 * BLOCK, model=f"m{seed}") for seed in range(3)]
        async with running(kit.tier()) as tier:
            for content in contents:
                await content.fill(tier)
            tier.resize(capacity_bytes=9 * BLOCK, high_watermark=0.99, low_watermark=0.98, write_queue_bytes=BLOCK)
            assert tier.statistics().high_bytes == int(0.99 * 9 * BLOCK)
            while tier.statistics().used_bytes > 9 * BLOCK:  # noqa: ASYNC110  # the tier shows its state
                await trio.sleep(0.01)
            assert len(tier.objects()) == 2

    run(test)


def test_capacity_is_never_exceeded(kit: Kit) -> None:
    async def test() -> None:
        capacity = 40 * BLOCK
        async with running(kit.tier(capacity_bytes=capacity)) as tier:
            for seed in range(12):
                content = Content(seed, 7 * BLOCK + 5, model=str(seed))
                tier.touch(content.key)
                for number in content.blocks:
                    content.offer(tier, number)
                    allocated = sum(file.stat().st_blocks * 512 for file in kit.files() if file.exists())
                    assert allocated <= capacity
                await tier.flush()
                assert tier.statistics().used_bytes <= capacity
            assert await content.hits(tier) == len(content.blocks)
            assert tier.statistics().evicted_blocks > 0

    run(test)


def test_second_pass_over_a_model_larger_than_the_tier_hits_for_most_of_it(kit: Kit) -> None:
    async def test() -> None:
        capacity = 64 * BLOCK
        shards = [Content(seed, 12 * BLOCK, model="big") for seed in range(8)]  # 96 blocks
        old = Content(99, 20 * BLOCK, model="old")
        async with running(kit.tier(capacity_bytes=capacity)) as tier:
            await old.fill(tier)
            for shard in shards:
                await shard.fill(tier)
            hits = 0
            for shard in shards:
                tier.touch(shard.key)
                hits += await shard.hits(tier)
                for number in shard.blocks:
                    shard.offer(tier, number)
            assert hits >= 0.85 * 64
            assert await old.hits(tier) == 0  # a colder model gives way to it

    run(test)


def test_heat_survives_a_restart(kit: Kit) -> None:
    if not kit.persistent:
        pytest.skip("hot on a tmpfs keeps nothing across runs")

    async def test() -> None:
        now_s = [1e9]
        settings = {"capacity_bytes": 20 * BLOCK, "clock": lambda: now_s[0]}
        favourite = Content(1, 8 * BLOCK, model="favourite")
        async with running(kit.tier(**settings)) as tier:
            for _ in range(3):
                await favourite.fill(tier)
                now_s[0] += 60
        async with running(kit.tier(**settings)) as tier:
            for seed in range(10, 16):
                now_s[0] += 60
                scanned = Content(seed, 9 * BLOCK, model=str(seed))
                await scanned.fill(tier)
            assert await favourite.hits(tier) == 8
            assert await scanned.hits(tier) == 9
        now_s[0] += 2 * 3600  # not used for more than a half-life
        async with running(kit.tier(**settings)) as tier:
            new = Content(99, 18 * BLOCK, model="new")
            await new.fill(tier)
            assert await new.hits(tier) == 18
            assert await favourite.hits(tier) == 0

    run(test)


def test_full_write_queue_refuses_and_counts(kit: Kit) -> None:
    async def test() -> None:
        content = Content(1, 10 * BLOCK)
        async with running(kit.tier(write_queue_bytes=4 * BLOCK)) as tier:
            answers = [content.offer(tier, number) for number in content.blocks]  # no checkpoint: nothing is written
            assert answers == [Offer.ACCEPTED] * 4 + [Offer.FULL] * 6
            assert tier.statistics().skipped_blocks == 6
            await tier.flush()
            assert await content.hits(tier) == 4

    run(test)


@pytest.mark.parametrize("fuller", ["version", "content", "only version", "only content"])
def test_version_and_content_become_one_object(kit: Kit, fuller: str) -> None:
    async def test() -> None:
        content = Content(1, 6 * BLOCK)
        by_content, version = content.key, ObjectKey(b"v" * 16)
        counts = {"version": (5, 2), "content": (2, 5), "only version": (5, 0), "only content": (0, 5)}[fuller]
        tier_settings = {"capacity_bytes": 64 << 20}
        async with running(kit.tier(**tier_settings)) as tier:
            for key, count in zip((version, by_content), counts, strict=True):
                for number in range(count):
                    lease = PoolLease(content.block(number))
                    facts = content.facts.__class__(key, 6 * BLOCK, BLOCK, b"p", b"m")
                    assert tier.offer(facts, number, digest_block(content.block(number)), lease) is Offer.ACCEPTED
            await tier.flush()
            tier.pin(version)
            tier.alias(version, by_content)
            tier.alias(version, by_content)
            for key in (version, by_content):
                assert tier.resident_bytes(key) == 5 * BLOCK
                target = buffer(BLOCK)
                assert await tier.read_block(key, 4, target)
                assert target == content.block(4)
            assert await tier.evict(by_content) == 0  # the pin went along
            tier.unpin(by_content)
            assert content.offer(tier, 5) is Offer.ACCEPTED
            await tier.flush()
        if not kit.persistent:
            return
        async with running(kit.tier(**tier_settings)) as tier:
            assert tier.statistics().objects == 1
            assert tier.resident_bytes(by_content) == 6 * BLOCK
            if fuller in ("version", "only version"):  # what the tier itself stored under both keys
                assert tier.resident_bytes(version) == 6 * BLOCK
            assert await content.hits(tier) == 6
            assert await tier.evict(by_content) > 0
            assert kit.files() == []

    run(test)


def test_content_that_became_known_while_the_object_was_not_here_is_the_same_object(kit: Kit) -> None:
    if not kit.persistent:
        pytest.skip("hot on a tmpfs keeps nothing across runs")

    async def test() -> None:
        content, known_as = Content(1, 3 * BLOCK), ObjectKey(b"c" * 16)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
        early = kit.tier()
        early.alias(content.key, known_as)
        async with running(early) as tier:
            assert tier.resident_bytes(content.key) == tier.resident_bytes(known_as) == 3 * BLOCK
        async with running(kit.tier()) as tier:
            assert tier.resident_bytes(known_as) == 3 * BLOCK
            assert await tier.evict(known_as) > 0
            assert kit.files() == []

    run(test)


def test_concurrent_reads_fills_and_evictions_never_give_a_wrong_byte(kit: Kit) -> None:
    async def test() -> None:
        contents = [Content(seed, 6 * BLOCK + seed * 100, model=str(seed)) for seed in range(4)]
        async with running(kit.tier(open_objects=2)) as tier:

            async def reader(content: Content) -> None:
                for _ in range(6):
                    await content.hits(tier)
                    for number in content.blocks:
                        span = Span(number, 10, content.length(number) - 10)
                        data = await tier.read_span(content.key, span)
                        assert data is None or data == content.block(number)[10:]

            async def churner(content: Content) -> None:
                for _ in range(4):
                    await content.fill(tier)
                    await tier.evict(content.key)

            async with trio.open_nursery() as nursery:
                for content in contents:
                    nursery.start_soon(reader, content)
                    nursery.start_soon(churner, content)
            statistics = tier.statistics()
            assert statistics.corrupt_blocks == 0
            assert statistics.used_bytes == 0
            assert kit.files() == []

    run(test)


def test_hot_views_survive_the_eviction_of_their_object(kit: Kit) -> None:
    if not kit.hot:
        pytest.skip("only hot gives views of a mapping")

    async def test() -> None:
        content = Content(1, 2 * BLOCK)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
            view = tier.read_nowait(content.key, Span(1, 0, BLOCK))
            assert view is not None
            await tier.evict(content.key)
            assert view == content.block(1)
            read_end, write_end = os.pipe()
            os.write(write_end, view[:4096])
            assert os.read(read_end, 4096) == content.block(1)[:4096]
            os.close(read_end)
            os.close(write_end)

    run(test)


def test_two_devices_share_the_objects(tmp_path: Path) -> None:
    async def test() -> None:
        paths = [tmp_path / "a", tmp_path / "b"]
        contents = [Content(seed, 3 * BLOCK) for seed in range(10)]
        async with running(
            DirectoryTier("warm", paths, block_bytes=BLOCK, capacity_bytes=64 << 20, mapped=False)
        ) as tier:
            for content in contents:
                await content.fill(tier)
            assert [len(object_files(path)) for path in paths] == [5, 5]
            assert len(tier.statistics().devices) == 2

    run(test)


def test_automatic_capacity_counts_one_file_system_once(tmp_path: Path) -> None:
    async def test() -> None:
        space = os.statvfs(tmp_path)
        tier = DirectoryTier(
            "warm", [tmp_path / "a", tmp_path / "b"], block_bytes=BLOCK, capacity_bytes=None, mapped=False
        )
        async with running(tier):
            capacity = tier.statistics().capacity_bytes
            assert 0.5 * space.f_bavail * space.f_frsize < capacity < space.f_bavail * space.f_frsize

    run(test)


def test_status_says_where_residency_is_kept(kit: Kit) -> None:
    async def test() -> None:
        async with running(kit.tier()) as tier:
            statistics = tier.statistics()
            expected = {
                "warm": ("directory", "sqlite", False),
                "hot": ("tmpfs (volatile)", "none", True),
                "hot-pool": ("pmem" if DAX else "tmpfs (volatile)", "libpmemobj pool", False),
            }[kit.kind]
            assert (statistics.medium, statistics.residency, bool(statistics.residency_reason)) == expected
            for device in statistics.devices:
                assert device["residency"] == statistics.residency

    run(test)
