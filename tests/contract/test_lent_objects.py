"""What a local tier promises of the objects it lends: places of bytes, whole files, and their end."""

import contextlib
import errno
import logging
import os
import shutil
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.local_tiers import BLOCK, Content, FakeLender, FakeLent, object_files, run, running, until
from tests.pmem_pools import persistent_folder
from tierfs.blocks.errors import TierFailed
from tierfs.blocks.ids import ObjectKey
from tierfs.blocks.spans import Span
from tierfs.tiers import filling
from tierfs.tiers.interface import LentFile, Offer, Part
from tierfs.tiers.local import DirectoryTier
from tierfs.tiers.objects import ObjectStore, OpenObject
from tierfs.tiers.persistence import PersistedResidency
from tierfs.tiers.pool_residency import PoolResidency
from tierfs.tiers.residency import Residency, Stored, boot_id

SHM = Path("/dev/shm")


class Kit:
    """Tiers of one kind on the same directory, each with a lender of its own as each daemon has."""

    def __init__(self, root: Path, *, hot: bool, pool: bool = False) -> None:
        self.root, self.hot = root, hot
        self.pool, self.persistent = pool, pool or not hot
        self.lender = FakeLender()

    def tier(self, **more: Any) -> DirectoryTier:
        settings: dict[str, Any] = {"block_bytes": BLOCK, "capacity_bytes": 64 << 20, "probe_s": 0.05, **more}
        if self.pool:
            settings["residency"] = "pool"
        tier = DirectoryTier("hot" if self.hot else "warm", [self.root], mapped=self.hot, **settings)
        self.lender = FakeLender()
        tier.lender = self.lender
        return tier

    @contextlib.contextmanager
    def residency(self) -> Iterator[tuple[PersistedResidency, Stored]]:
        """What was persisted, while no tier runs."""
        residency: PersistedResidency = Residency(self.root / "residency.db", boot=boot_id())
        if self.pool:
            residency = PoolResidency(
                self.root / "residency.pool", boot=boot_id(), capacity_bytes=64 << 20, block_bytes=BLOCK
            )
        yield residency, residency.open()
        residency.close(clean=True)

    def objects(self) -> list[Path]:
        return object_files(self.root)

    async def gone(self, tier: DirectoryTier) -> None:
        """Wait until every object has left, and the tier knows."""
        await until(lambda: self.objects() == [] and not tier._removals._leaving)

    def dying(self) -> list[Path]:
        return list((self.root / "dying").iterdir())


@pytest.fixture(params=["warm", "hot", "hot-pool"])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kit]:
    if request.param == "warm":
        yield Kit(tmp_path / "tier", hot=False)
    elif request.param == "hot-pool":
        for folder in persistent_folder():
            yield Kit(folder / "tier", hot=True, pool=True)
    else:
        if not SHM.is_dir():
            pytest.skip("no /dev/shm here")
        root = SHM / f"tierfs-test-{uuid.uuid4().hex}"
        yield Kit(root, hot=True)
        shutil.rmtree(root, ignore_errors=True)


def damage(file: Path, content: Content) -> None:
    with file.open("r+b") as handle:
        handle.seek(BLOCK + 5)
        handle.write(bytes([content.bytes[BLOCK + 5] ^ 1]))


def test_place_of_a_span_is_that_of_its_bytes(kit: Kit) -> None:
    async def test() -> None:
        content = Content(1, 3 * BLOCK + 100)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
            for span in (Span(0, 0, BLOCK), Span(1, 4000, 5000), Span(3, 50, 50)):
                part = await tier.locate(content.key, span)
                assert part is not None
                assert part.length_bytes == span.length_bytes
                start = span.block * BLOCK + span.start_bytes
                assert kit.lender.read(part) == content.bytes[start : start + span.length_bytes]
                part.hold.release()
                with pytest.raises(AssertionError, match="once"):
                    part.hold.release()
            assert tier.statistics().hit_blocks == 1  # the one that began a block
            assert await tier.locate(content.key, Span(9, 0, 1)) is None
            assert await tier.locate(ObjectKey(bytes(16)), Span(0, 0, 1)) is None
            assert len(kit.lender.lent) == 1
            fd = kit.lender.files[0]
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(fd, b"x")
            tier.lender = None  # direct mode
            assert await tier.locate(content.key, Span(0, 0, BLOCK)) is None
            assert await tier.whole(content.key) is None
            tier.lender = kit.lender
        assert kit.lender.files == {}  # the end of the tier takes everything back

    run(test)


def test_what_is_open_and_lent_has_its_place_at_once(kit: Kit) -> None:
    async def test() -> None:
        content, span = Content(1, 3 * BLOCK), Span(1, 4000, 5000)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
            assert tier.locate_nowait(content.key, span) is None  # not lent yet
            first = await tier.locate(content.key, span)
            part = tier.locate_nowait(content.key, span)
            assert first is not None
            assert part is not None
            assert kit.lender.read(part) == kit.lender.read(first) == content.block(1)[4000:9000]
            assert tier.locate_nowait(content.key, Span(9, 0, 1)) is None
            first.hold.release()
            (file,) = kit.objects()
            os.utime(file)  # somebody else was there
            assert tier.locate_nowait(content.key, span) is None
            tier._evict(tier._index.get(content.key))  # type: ignore[arg-type]
            await kit.gone(tier)
            assert len(kit.lender.files) == 1
            part.hold.release()
            assert kit.lender.files == {}

    run(test)


def test_only_verified_blocks_of_untouched_files_have_a_place(kit: Kit) -> None:
    async def test() -> None:
        content, span = Content(1, 3 * BLOCK), Span(1, 0, 100)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
            (file,) = kit.objects()
            os.utime(file)  # somebody else was there
            assert await tier.locate(content.key, span) is None
            assert await tier.locate(content.key, span) is None
            assert await content.read(tier, 1) == content.block(1)
            part = await tier.locate(content.key, span)
            assert part is not None
            part.hold.release()
            assert await tier.locate(content.key, Span(0, 0, 100)) is None

    run(test)


def test_two_readers_at_once_lend_an_object_once_and_a_cancelled_one_does_not_keep_the_other(kit: Kit) -> None:
    async def test() -> None:
        content = Content(1, 3 * BLOCK)
        parts: list[Part] = []

        async def reader(tier: DirectoryTier, scope: trio.CancelScope) -> None:
            with scope:
                part = await tier.locate(content.key, Span(1, 0, 100))
                assert part is not None
                parts.append(part)

        async with running(kit.tier()) as tier:
            await content.fill(tier)
            scopes = [trio.CancelScope() for _ in range(4)]
            scopes[0].cancel()
            async with trio.open_nursery() as nursery:
                for scope in scopes:
                    nursery.start_soon(reader, tier, scope)
            assert len(parts) == 3
            assert len(kit.lender.lent) == len(kit.lender.files) == 1
            for part in parts:
                part.hold.release()

    run(test)


def test_refused_object_is_not_offered_again_at_once(kit: Kit) -> None:
    async def test() -> None:
        content = Content(1, 3 * BLOCK)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
            kit.lender.refuse = True
            assert await tier.locate(content.key, Span(0, 0, 1)) is None
            kit.lender.refuse = False
            assert await tier.locate(content.key, Span(0, 0, 1)) is None
            assert await tier.whole(content.key) is None
            assert kit.lender.files == {}
            assert await content.hits(tier) == 3  # it is as good as before

    run(test)


def test_held_object_outlives_its_eviction_and_is_taken_back_after_the_hold(kit: Kit) -> None:
    async def test() -> None:
        content = Content(1, 3 * BLOCK)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
            part = await tier.locate(content.key, Span(2, 0, BLOCK))
            assert part is not None
            assert part.lent is not None
            tier._evict(tier._index.get(content.key))  # type: ignore[arg-type]  # without waiting for the space
            await kit.gone(tier)
            assert kit.lender.read(part) == content.block(2)
            assert tier.statistics().used_bytes > 0
            await tier.failed(part.lent, 0, 5)  # nobody's any more: nothing happens
            assert tier.statistics().failed_reads == 0
            part.hold.release()
            assert kit.lender.files == {}
            await until(lambda: tier.statistics().used_bytes == 0)

    run(test)


def test_descriptor_budget_takes_back_what_nobody_holds(kit: Kit) -> None:
    async def test() -> None:
        contents = [Content(seed, BLOCK) for seed in range(4)]
        async with running(kit.tier(open_objects=2)) as tier:
            held = []
            for content in contents:
                await content.fill(tier)
                part = await tier.locate(content.key, Span(0, 0, BLOCK))
                assert part is not None
                held.append(part)
            assert len(kit.lender.files) == 4
            assert [kit.lender.read(part) for part in held] == [content.block(0) for content in contents]
            for part in held:
                part.hold.release()
            await Content(9, BLOCK).fill(tier)
            assert len(kit.lender.files) < 2

    run(test)


def test_only_what_is_complete_and_verified_is_handed_out(kit: Kit) -> None:
    async def test() -> None:
        content = Content(1, 3 * BLOCK + 7)
        async with running(kit.tier()) as tier:
            for number in (0, 1, 3):
                content.offer(tier, number)
            await tier.flush()
            assert await tier.whole(content.key) is None
            assert content.offer(tier, 2) is Offer.ACCEPTED
            assert await tier.whole(content.key) is None  # on its way is not there
            await tier.flush()
            (file,) = kit.objects()
            os.utime(file)
            assert await tier.whole(content.key) is None  # touched
            assert await tier.whole(content.key) is None  # not verified since
            assert tier.statistics().kept_back == {"changed by somebody else": 1, "not verified": 1}
            assert await content.hits(tier) == 4
            lent = await tier.whole(content.key)
            assert lent is not None
            assert os.pread(kit.lender.files[lent.slot], 1 << 20, 0) == content.bytes
            assert await tier.whole(content.key) is lent
            assert await tier.whole(ObjectKey(bytes(16))) is None

    run(test)


def test_two_batches_of_one_object_do_not_take_each_others_writes_for_a_strangers(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, one = Content(1, 3 * BLOCK), Content(2, BLOCK)
    waiting, gate = threading.Event(), threading.Event()
    open_all = filling._open_all

    def slow_to_open(store: ObjectStore, wanted: Sequence[tuple[bytes, int]]) -> list[OpenObject]:
        if any(name == one.key for name, _ in wanted):
            waiting.set()
            assert gate.wait(10)
        return open_all(store, wanted)

    monkeypatch.setattr(filling, "_open_all", slow_to_open)

    async def test() -> None:
        async with running(kit.tier()) as tier:
            assert both.offer(tier, 0) is Offer.ACCEPTED
            await tier.flush()
            try:
                # The first batch has a block of both, and waits for the other object to be opened.
                assert both.offer(tier, 1) is one.offer(tier, 0) is Offer.ACCEPTED
                await until(waiting.is_set)
                assert both.offer(tier, 2) is Offer.ACCEPTED
                await until(lambda: tier.resident(both.key, 2))
                assert not tier.resident(both.key, 1)
            finally:
                gate.set()
            await tier.flush()
            assert await tier.whole(both.key) is not None

    run(test)


def test_file_that_somebody_touches_while_it_is_lent_is_not_handed_out(kit: Kit) -> None:
    async def test() -> None:
        content = Content(1, 3 * BLOCK)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
            (file,) = kit.objects()
            kit.lender.meanwhile = lambda: damage(file, content)
            assert await tier.whole(content.key) is None
            assert await content.hits(tier) == 2  # one block is lost, and not all of it: it was not handed out
            assert content.offer(tier, 1) is Offer.ACCEPTED

    run(test)


def test_evicted_while_it_is_lent_is_no_place_and_stays_nowhere(kit: Kit) -> None:
    async def test() -> None:
        content = Content(1, 3 * BLOCK)
        async with running(kit.tier()) as tier:
            for ask in (tier.whole, lambda key: tier.locate(key, Span(0, 0, 1))):
                await content.fill(tier)
                kit.lender.meanwhile = lambda: tier._removals.remove(tier._index.get(content.key))  # type: ignore[arg-type]
                assert await ask(content.key) is None
                kit.lender.meanwhile = lambda: None
                await until(lambda: kit.lender.files == {} and tier.statistics().used_bytes == 0)

    run(test)


Break = Callable[[DirectoryTier, Content, LentFile, Path], Any]


async def find_damage(tier: DirectoryTier, content: Content, lent: LentFile, file: Path) -> None:
    damage(file, content)
    assert await content.read(tier, 1) is None


async def fail_there(tier: DirectoryTier, content: Content, lent: LentFile, file: Path) -> None:
    await tier.failed(lent, BLOCK + 5, 5)
    assert tier.statistics().failed_reads == 1


async def find_a_hole(tier: DirectoryTier, content: Content, lent: LentFile, file: Path) -> None:
    with file.open("r+b") as handle:
        handle.truncate(BLOCK)
        handle.truncate(3 * BLOCK)
    assert await tier.read_span(content.key, Span(1, 0, 10)) is None


@pytest.mark.parametrize("breaking", [find_damage, fail_there, find_a_hole])
def test_bad_block_costs_a_handed_out_object_all_of_it_and_the_file_is_never_written_again(
    kit: Kit, breaking: Break, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        content = Content(1, 3 * BLOCK)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
            lent = await tier.whole(content.key)
            assert lent is not None
            (file,) = kit.objects()
            with kit.lender.map(lent) as mapped:
                await breaking(tier, content, lent, file)
                assert not tier.resident(content.key, 0)
                before = bytes(mapped)
                assert content.offer(tier, 1) is not Offer.ACCEPTED  # its name is not free yet
                await kit.gone(tier)
                assert await content.fill(tier) == 3
                assert await content.hits(tier) == 3
                assert bytes(mapped) == before
                assert len(kit.dying()) == 1
                statistics = tier.statistics()
                assert statistics.corrupt_blocks + statistics.failed_reads == 1
        assert caplog.text.count("object_quarantined") == 1

    run(test)


def test_failed_read_of_an_object_that_was_not_handed_out_costs_one_block(kit: Kit) -> None:
    async def test() -> None:
        content = Content(1, 3 * BLOCK)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
            part = await tier.locate(content.key, Span(1, 0, 100))
            assert part is not None
            assert part.lent is not None
            await tier.failed(part.lent, 2 * BLOCK, 0)
            part.hold.release()
            assert [tier.resident(content.key, block) for block in content.blocks] == [True, True, False]
            assert tier.statistics().failed_reads == 1
            await tier.failed(FakeLent(77), 0, 5)
            assert tier.statistics().failed_reads == 1

    run(test)


def test_a_lent_read_that_took_too_long_stalls_the_device_and_costs_nothing(kit: Kit) -> None:
    async def test() -> None:
        content = Content(1, 3 * BLOCK)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
            lent = await tier.whole(content.key)
            assert lent is not None
            await tier.failed(lent, 0, errno.EINPROGRESS)
            assert tier.statistics().state == "failed"  # asked now, the next tier answers
            assert await tier.locate(content.key, Span(0, 0, 100)) is None
            await until(lambda: tier.statistics().state == "ok")
            assert await content.hits(tier) == 3
            assert tier.statistics().failed_reads == 0

    run(test)


def test_evicted_object_counts_until_nobody_maps_it(kit: Kit) -> None:
    async def test() -> None:
        content, other = Content(1, 6 * BLOCK), Content(2, 6 * BLOCK, model="other")
        async with running(kit.tier(capacity_bytes=10 * BLOCK)) as tier:
            await content.fill(tier)
            lent = await tier.whole(content.key)
            assert lent is not None
            mapped = kit.lender.map(lent)
            with trio.fail_after(5):
                assert await tier.evict(content.key) >= 6 * BLOCK
            assert kit.objects() == []
            assert kit.lender.files == {}
            assert tier.statistics().dying_bytes == tier.statistics().used_bytes >= 6 * BLOCK
            await until(lambda: tier._space.leaving_bytes == 0)  # nobody waits for it any more
            with trio.fail_after(3):
                await other.fill(tier)
            assert tier.statistics().used_bytes <= 10 * BLOCK
            assert 0 < await other.hits(tier) < 6
            (file,) = kit.dying()
            assert file.name == f"{content.key.hex()}.0"
            assert mapped[:] == content.bytes
            mapped.close()
            await until(lambda: tier.statistics().dying_bytes == 0)
            assert kit.dying() == []
            await other.fill(tier)
            assert await other.hits(tier) == 6

    run(test)


def test_evicted_object_that_nobody_maps_makes_room_for_what_it_was_evicted_for(kit: Kit) -> None:
    async def test() -> None:
        content, other = Content(1, 8 * BLOCK), Content(2, 8 * BLOCK, model="other")
        async with running(kit.tier(capacity_bytes=10 * BLOCK)) as tier:
            await content.fill(tier)
            assert await tier.whole(content.key) is not None
            tier._clock = lambda: 4e9  # the old one is cold by now
            assert await other.fill(tier) == 8
            assert await other.hits(tier) == 8

    run(test)


def test_a_model_that_turned_out_to_be_mapped_is_not_evicted_object_after_object_for_nothing(kit: Kit) -> None:
    async def test() -> None:
        shards = [Content(seed, 4 * BLOCK) for seed in range(1, 5)]
        other = Content(9, 4 * BLOCK, model="other")
        async with running(kit.tier(capacity_bytes=17 * BLOCK)) as tier:
            maps = []
            for shard in shards:
                await shard.fill(tier)
                lent = await tier.whole(shard.key)
                assert lent is not None
                maps.append(kit.lender.map(lent))
            tier._clock = lambda: 4e9  # the old ones are cold by now
            for _ in range(4):
                await other.fill(tier)
                await until(lambda: tier._space.leaving_bytes == 0)
                tier._placement.room_changed()  # else "no room" is remembered for a second
            assert len(kit.dying()) == 1  # one had to show it
            assert [await shard.hits(tier) for shard in shards] == [0, 4, 4, 4]
            for mapped in maps:
                mapped.close()
            await until(lambda: tier.statistics().dying_bytes == 0)
            await other.fill(tier)
            assert await other.hits(tier) == 4

    run(test)


def test_dying_file_of_an_earlier_run_counts_and_goes_when_it_may(kit: Kit) -> None:
    async def test() -> None:
        content = Content(1, 3 * BLOCK)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
            lent = await tier.whole(content.key)
            assert lent is not None
            mapped = kit.lender.map(lent)
            await tier.evict(content.key)
        assert len(kit.dying()) == 1
        async with running(kit.tier()) as tier:
            assert tier.statistics().dying_bytes == tier.statistics().used_bytes >= 3 * BLOCK
            await content.fill(tier)
            lent = await tier.whole(content.key)
            assert lent is not None
            again = kit.lender.map(lent)
            await tier.evict(content.key)  # the same name dies twice
            assert len(kit.dying()) == 2
            mapped.close()
            again.close()
            await until(lambda: tier.statistics().used_bytes == 0)
            assert kit.dying() == []

    run(test)


def test_unknown_object_is_unlinked_at_start_unless_somebody_maps_it(kit: Kit) -> None:
    async def test() -> None:
        content, other = Content(1, 3 * BLOCK), Content(2, 3 * BLOCK)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
            await other.fill(tier)
            lent = await tier.whole(content.key)
            assert lent is not None
            mapped = kit.lender.map(lent)
        if kit.persistent:
            (kit.root / ("residency.pool" if kit.pool else "residency.db")).unlink()
        async with running(kit.tier()) as tier:
            assert kit.objects() == []
            assert [file.name for file in kit.dying()] == [f"{content.key.hex()}.0"]
            assert 3 * BLOCK <= tier.statistics().used_bytes < 6 * BLOCK
            assert mapped[:] == content.bytes
            mapped.close()
            await until(lambda: tier.statistics().used_bytes == 0)

    run(test)


def test_handed_out_is_known_to_the_next_run(kit: Kit) -> None:
    if not kit.persistent:
        pytest.skip("hot on a tmpfs keeps nothing across runs")

    async def test() -> None:
        content = Content(1, 3 * BLOCK)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
            assert await tier.whole(content.key) is not None
        (file,) = kit.objects()
        damage(file, content)
        async with running(kit.tier()) as tier:
            assert await content.read(tier, 1) is None
            assert tier.resident_bytes(content.key) == 0
        with kit.residency() as (_, stored):
            assert stored.objects == []

    run(test)


def test_handed_out_object_that_is_found_incomplete_is_not_completed_in_place(kit: Kit) -> None:
    if not kit.persistent:
        pytest.skip("hot on a tmpfs keeps nothing across runs")

    async def test() -> None:
        content = Content(1, 3 * BLOCK)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
            assert await tier.whole(content.key) is not None
        with kit.residency() as (residency, _):
            residency.remove_blocks(content.key, [1])
        async with running(kit.tier()) as tier:
            assert content.offer(tier, 1) is Offer.BYPASSED
            await kit.gone(tier)
            assert await content.fill(tier) == 3

    run(test)


def test_handed_out_object_that_an_alias_makes_superfluous_goes_whole(kit: Kit) -> None:
    async def test() -> None:
        content, version = Content(1, 3 * BLOCK), ObjectKey(b"v" * 16)
        twin = Content(1, 3 * BLOCK)
        twin.key = version
        twin.facts = content.facts.__class__(version, 3 * BLOCK, BLOCK, b"p", b"m")
        async with running(kit.tier()) as tier:
            await content.fill(tier)
            await twin.fill(tier)
            lent = await tier.whole(version)
            assert lent is not None
            with kit.lender.map(lent) as mapped:
                tier.pin(version)
                tier.alias(version, content.key)
                await until(lambda: len(kit.objects()) == 1)
                assert [file.name for file in kit.dying()] == [f"{version.hex()}.0"]
                assert mapped[:] == content.bytes
                assert await content.hits(tier) == 3

    run(test)


def test_directory_of_format_1_is_migrated_even_when_a_first_try_was_killed(
    kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    if kit.hot:
        pytest.skip("format 1 had no pools, and a tmpfs keeps nothing")

    async def test() -> None:
        content = Content(1, 3 * BLOCK)
        async with running(kit.tier()) as tier:
            await content.fill(tier)
        shutil.rmtree(kit.root / "dying")
        (kit.root / "format").write_text("1\n")  # with today's database: killed between the two
        async with running(kit.tier()) as tier:
            assert (kit.root / "format").read_text() == "2\n"
            assert await content.hits(tier) == 3
        with contextlib.closing(sqlite3.connect(kit.root / "residency.db")) as db, db:
            db.execute("ALTER TABLE objects DROP COLUMN handed_out")
        (kit.root / "format").write_text("1\n")
        async with running(kit.tier()) as tier:
            assert await content.hits(tier) == 3
            assert await tier.whole(content.key) is not None
        assert (kit.root / "format").read_text() == "2\n"
        (kit.root / "format").write_text("3\n")
        with pytest.raises(TierFailed, match="format 3.*upgrade"):
            await kit.tier().run()
        assert (kit.root / "format").read_text() == "3\n"

    with caplog.at_level(logging.WARNING):
        run(test)
    assert caplog.text.count("tier_format_upgraded") == 2
