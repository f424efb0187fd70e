"""Residency in a libpmemobj pool: the promises of residency.py, kept by slots and bits; what a kill, a full pool,
another size, damage leave.
"""

import contextlib
import errno
import os
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.pmem_pools import killed_at_a_random_point, persistent_folder
from tierfs.blocks.errors import TierFailed
from tierfs.blocks.ids import BlockDigest, ObjectKey, digest_block
from tierfs.policy.eviction import Heat
from tierfs.tiers import pool_layout
from tierfs.tiers.pmem.library import PmemError
from tierfs.tiers.pmem.pool import Pool
from tierfs.tiers.pool_layout import Layout, Sizes
from tierfs.tiers.pool_residency import PoolResidency
from tierfs.tiers.residency import Stored, StoredObject

A, B, C = (ObjectKey(letter * 16) for letter in (b"a", b"b", b"c"))
DIGEST = BlockDigest(b"d" * 16)
BLOCK = 4096


@pytest.fixture
def folder() -> Iterator[Path]:
    yield from persistent_folder()


def stored(name: ObjectKey = A, blocks: int = 3) -> StoredObject:
    rows = [(number, DIGEST) for number in range(blocks)]
    return StoredObject(name, name, 10 * BLOCK, BLOCK, b"p\xff\n", b"model", 99, 1.5, rows)


def residency(folder: Path, *, boot: str = "boot-1", capacity_bytes: int = 1 << 20) -> PoolResidency:
    return PoolResidency(folder / "r.pool", boot=boot, capacity_bytes=capacity_bytes, block_bytes=BLOCK)


@contextlib.contextmanager
def opened(
    folder: Path, *, boot: str = "boot-1", clean: bool = True, capacity_bytes: int = 1 << 20
) -> Iterator[tuple[PoolResidency, Stored]]:
    one = residency(folder, boot=boot, capacity_bytes=capacity_bytes)
    yield one, one.open()
    one.close(clean=clean)


def in_use(folder: Path) -> tuple[int, int, int]:
    """How many slots of objects, models and records the pool itself says are in use."""
    pool = Pool.open(folder / "r.pool", pool_layout.LAYOUT_NAME)
    layout = Layout.from_header(pool.read(0, pool_layout.HEADER_BYTES), root_bytes=pool.root_bytes)
    objects, models, records = (
        int.from_bytes(pool.read(table.bits_offset, table.bits_bytes), "little").bit_count()
        for table in (layout.objects, layout.models, layout.records)
    )
    pool.close()
    return objects, models, records


def test_what_was_committed_comes_back(folder: Path) -> None:
    with opened(folder) as (one, found):
        assert found == Stored()
        first = stored()
        first.aliases = [B]
        assert not one.commit([first])
        more = stored()
        more.blocks = [(7, DIGEST)]
        assert not one.commit([more, stored(C, 1)])
        one.save(models=[(b"model", Heat(2.0, 3.0, 4.0))], used=[(A, 8.5)], stamps=[(A, (5, 6)), (C, (7, 8))])
    with opened(folder) as (one, found):
        assert not found.unclean
        by_name = {item.name: item for item in found.objects}
        assert sorted(block for block, _ in by_name[A].blocks) == sorted(by_name[A].verified) == [0, 1, 2, 7]
        assert (by_name[A].path, by_name[A].model, by_name[A].last_use_s) == (b"p\xff\n", b"model", 8.5)
        assert (by_name[A].aliases, by_name[A].stamp, by_name[C].stamp) == ([B], (5, 6), (7, 8))
        assert by_name[A].sound()
        assert found.models == [(b"model", Heat(2.0, 3.0, 4.0))]
        one.save(models=[(b"model", Heat(3.0, 3.0, 5.0)), (b"other", Heat(1.0, 1.0, 1.0))])
        one.save(models=[(b"other", Heat(1.0, 1.0, 2.0))])
    with opened(folder) as (_, found):
        assert found.models == [(b"other", Heat(1.0, 1.0, 2.0))]
    assert in_use(folder) == (2, 1, 6)


def test_key_of_an_object_changes_when_its_content_is_known(folder: Path) -> None:
    with opened(folder) as (one, _):
        one.commit([stored(), stored(C, 1)])
        one.save(keys=[(A, B, A), (A, B, C), (A, B, C), (b"unknown" * 2, B, A)])  # type: ignore[list-item]
        one.save(keys=[(C, C, A)])  # that key means another object from now on
    with opened(folder) as (one, found):
        items = {item.name: item for item in found.objects}
        assert (items[A].key, items[A].aliases) == (B, [C])
        assert (items[C].key, items[C].aliases) == (C, [A])
        one.remove_objects([A])
    with opened(folder) as (one, found):
        assert found.objects[0].aliases == [A]
    assert in_use(folder) == (1, 0, 2)


def test_removed_is_gone_and_leaves_nothing(folder: Path) -> None:
    with opened(folder, clean=False) as (one, _):
        one.commit([stored(A), stored(B)])
        one.save(keys=[(A, C, A)])
        one.remove_blocks(B, [0, 2, 2, 9])
        one.remove_blocks(C, [0])
        one.remove_objects([A, C, A])
    with opened(folder) as (_, found):
        (item,) = found.objects
        assert (item.name, item.blocks) == (B, [(1, DIGEST)])
    assert in_use(folder) == (1, 0, 1)


def test_block_that_is_committed_again_has_its_new_digest(folder: Path) -> None:
    with opened(folder) as (one, _):
        one.commit([stored(A, 2)])
        one.save(unverified=[A])
        again = stored(A)
        again.blocks = [(1, BlockDigest(b"e" * 16))]
        one.commit([again])
    with opened(folder) as (_, found):
        assert dict(found.objects[0].blocks) == {0: DIGEST, 1: b"e" * 16}
        assert found.objects[0].verified == [1]
    assert in_use(folder) == (1, 0, 2)


STOPS = [(True, "boot-1", 3), (True, "boot-2", 3), (False, "boot-1", 3), (False, "boot-2", 0)]


@pytest.mark.parametrize(("clean", "boot", "verified"), STOPS)
def test_only_another_boot_without_a_clean_mark_loses_verified(
    folder: Path, clean: bool, boot: str, verified: int
) -> None:
    with opened(folder, clean=clean) as (one, _):
        one.commit([stored()])
    with opened(folder, boot=boot, clean=False) as (one, found):
        assert found.unclean == (verified == 0)
        assert len(found.objects[0].blocks) == 3  # resident all the same
        assert len(found.objects[0].verified) == verified
        one.save(verified=[(A, 1), (A, 9), (B, 0)])
    with opened(folder, boot=boot) as (_, found):
        assert sorted(found.objects[0].verified) == ([0, 1, 2] if verified else [1])
    with opened(folder, boot="boot-3", clean=False):
        pass  # the clean mark lasts for one start
    with opened(folder, boot="boot-4") as (_, found):
        assert found.unclean


def test_failed_transaction_leaves_nothing_of_itself(folder: Path) -> None:
    with opened(folder) as (one, _):
        one.commit([stored(A, 1)])
        bad = stored(B, 2)
        bad.blocks[1] = (1, None)  # type: ignore[call-overload]
        with pytest.raises(TypeError):
            one.commit([stored(C, 5), bad])
        one.commit([stored(C, 1)])
        one.remove_objects([C])
        one.commit([stored(C, 1)])
    with opened(folder) as (_, found):
        assert {item.name: len(item.blocks) for item in found.objects} == {A: 1, C: 1}
    assert in_use(folder) == (2, 0, 2)


def test_full_pool_refuses_by_name_and_takes_again_what_was_given_up(folder: Path) -> None:
    sizes = Sizes.wanted(capacity_bytes=1 << 20, block_bytes=BLOCK)
    names = [ObjectKey(number.to_bytes(16, "big")) for number in range(sizes.objects + 2)]
    with opened(folder, clean=False) as (one, _):
        assert one.commit([stored(name, 1) for name in names]) == set(names[-2:])
        assert one.commit([stored(names[0], 2)]) == set()  # more blocks of an object that is there
        one.remove_objects(names[5:7])
        assert one.commit([stored(name, 1) for name in names[-2:]]) == set()
    with opened(folder) as (one, found):
        assert {item.name for item in found.objects} == {*names} - {*names[5:7]}
        one.remove_objects(names)
        whole = stored(A, 0)
        whole.blocks = [(number, DIGEST) for number in range(sizes.records + 1)]
        assert one.commit([whole]) == {A}
        whole.blocks.pop()
        whole.aliases = [B]  # finds no record, and is learnt again
        assert one.commit([whole]) == set()
    with opened(folder) as (one, found):
        assert (len(found.objects[0].blocks), found.objects[0].aliases) == (sizes.records, [])
        assert one.commit([stored(B, 1)]) == {B}
        one.remove_objects([A])
        assert one.commit([stored(B, 1)]) == set()


def test_more_models_than_there_are_slots_keep_the_ones_used_last(folder: Path) -> None:
    models = [(b"m%d" % number, Heat(1.0, 1.0, float(number))) for number in range(1500)]
    with opened(folder) as (one, _):
        one.save(models=models[:1000])
        one.save(models=[*models, (b"x" * 2000, Heat(9.0, 9.0, 9999.0))])
        one.save(models=models)
    with opened(folder) as (_, found):
        assert dict(found.models) == dict(models[-1024:])


def test_thousands_of_fills_and_removals_leave_the_pool_as_it_was(folder: Path) -> None:
    with opened(folder) as (one, _):
        one.commit([stored(A, 4)])
        before = (folder / "r.pool").stat().st_size, in_use_now(one)
        for number in range(2000):
            name = ObjectKey((number + 1).to_bytes(16, "big"))
            one.commit([stored(name, 5), stored(A, 4)])
            one.remove_objects([name])
        assert ((folder / "r.pool").stat().st_size, in_use_now(one)) == before
    with opened(folder) as (_, found):
        assert [(item.name, len(item.blocks)) for item in found.objects] == [(A, 4)]


def in_use_now(one: PoolResidency) -> tuple[int, ...]:
    return tuple(len(list(bits)) for bits in (one._object_bits, one._record_bits, one._verified_bits))


def test_larger_capacity_makes_a_larger_pool_with_all_it_held(folder: Path) -> None:
    with opened(folder) as (one, _):
        first = stored()
        first.aliases = [B]
        one.commit([first, stored(C, 1)])
        one.save(models=[(b"model", Heat(2.0, 3.0, 4.0))], stamps=[(A, (5, 6))], unverified=[C])
        one.hand_out(C)
    with opened(folder) as (_, before):
        pass
    small_bytes = (folder / "r.pool").stat().st_size
    for _ in range(2):
        with opened(folder, capacity_bytes=8 << 30) as (_, found):
            assert found == before
    assert (folder / "r.pool").stat().st_size > small_bytes
    grown = (folder / "r.pool").stat().st_ino
    with opened(folder) as (_, found):  # and a smaller one changes nothing
        assert found == before
    assert (folder / "r.pool").stat().st_ino == grown
    assert [path.name for path in folder.iterdir()] == ["r.pool"]


def test_pool_that_cannot_grow_is_used_as_it_is(folder: Path) -> None:
    with opened(folder) as (one, _):
        one.commit([stored()])
    with opened(folder, capacity_bytes=1 << 50) as (one, found):  # more than this machine has
        assert len(found.objects) == 1
        assert not one.commit([stored(B)])
    assert [path.name for path in folder.iterdir()] == ["r.pool"]


def test_a_half_made_pool_is_swept(folder: Path) -> None:
    (folder / "r.pool.new").write_bytes(b"half")
    with opened(folder) as (_, found):
        assert found == Stored()
    assert [path.name for path in folder.iterdir()] == ["r.pool"]


@pytest.mark.parametrize("damage", ["noise", "truncated", "empty", "header"])
def test_damaged_pool_is_moved_aside(folder: Path, damage: str) -> None:
    with opened(folder) as (one, _):
        one.commit([stored()])
    if damage == "header":
        pool = Pool.open(folder / "r.pool", pool_layout.LAYOUT_NAME)
        pool.write_persist(8, b"\xff")
        pool.write_persist(20, b"\xff")
        pool.write_persist(0, b"x")
        pool.close()
    elif damage == "noise":
        (folder / "r.pool").write_bytes(b"no pool at all" * 1_000_000)
    else:
        os.truncate(folder / "r.pool", 5 << 20 if damage == "truncated" else 0)
    with opened(folder) as (one, found):
        assert found.objects == []
        assert found.replaced == str(folder / "r.pool.corrupt")
        one.commit([stored()])
    with opened(folder) as (_, found):
        assert len(found.objects) == 1


def test_pool_of_a_newer_version_is_refused_and_kept(folder: Path) -> None:
    with opened(folder) as (one, _):
        one.commit([stored()])
    pool = Pool.open(folder / "r.pool", pool_layout.LAYOUT_NAME)
    pool.write_persist(8, b"\x63")
    pool.close()
    with pytest.raises(TierFailed, match="version 99.*upgrade"):
        residency(folder).open()
    pool = Pool.open(folder / "r.pool", pool_layout.LAYOUT_NAME)  # closed, and as it was
    pool.write_persist(8, b"\x01")
    pool.close()
    with opened(folder) as (_, found):
        assert len(found.objects) == 1


def test_slots_whose_checksum_does_not_hold_are_dropped(folder: Path) -> None:
    with opened(folder) as (one, _):
        one.commit([stored(A), stored(B)])
        one.save(models=[(b"model", Heat(1.0, 1.0, 1.0))])
    pool = Pool.open(folder / "r.pool", pool_layout.LAYOUT_NAME)
    layout = Layout.from_header(pool.read(0, pool_layout.HEADER_BYTES), root_bytes=pool.root_bytes)
    pool.write_persist(layout.records.slot(1) + 4, b"\x09")  # another block's number
    pool.write_persist(layout.objects.slot(1) + 64, b"\x09")  # another key
    pool.write_persist(layout.models.slot(0), b"\x09")
    pool.close()
    with opened(folder) as (_, found):
        assert [(item.name, sorted(block for block, _ in item.blocks)) for item in found.objects] == [(A, [0, 2])]
        assert found.models == []
    assert in_use(folder) == (1, 0, 2)


def test_pool_that_cannot_be_opened_is_not_thrown_away(folder: Path) -> None:
    with opened(folder), pytest.raises(PmemError, check=lambda error: error.errno == errno.EAGAIN):
        residency(folder).open()
    assert [path.name for path in folder.iterdir()] == ["r.pool"]


def test_closed_residency_is_an_error_of_the_device(folder: Path) -> None:
    one = residency(folder)
    one.open()
    one.commit([stored()])
    one.close(clean=True)
    for call in (lambda: one.commit([stored(B)]), lambda: one.remove_objects([A]), lambda: one.hand_out(A)):
        with pytest.raises(PmemError):
            call()
    one.close(clean=True)


def test_handed_out_survives_and_later_blocks_do_not_undo_it(folder: Path) -> None:
    with opened(folder, clean=False) as (one, _):
        one.commit([stored(A), stored(B)])
        one.hand_out(A)
        one.commit([stored(A, 4)])
        one.save(used=[(A, 3.0)], stamps=[(A, (1, 2))], keys=[(A, C, A)])
        with pytest.raises(PmemError):
            one.hand_out(C)
    with opened(folder) as (_, found):
        assert {item.name: item.handed_out for item in found.objects} == {A: True, B: False}


def churn_for_ever(folder: Path, seed: int, tell: Callable[[bytes], object]) -> None:
    """Fill and remove in batches. What is about to be removed is told before, what is durable when it is so: whatever
    the moment of the kill, the pool may hold no block whose data was not durable then."""

    def say(what: str, number: int, blocks: Iterable[int] = (0,)) -> None:
        tell("".join(f"{what} {number} {block}\n" for block in blocks).encode())

    point = random.Random(seed)
    one = residency(folder)
    one.open()
    while True:
        batch = point.sample(range(1, 30), point.randrange(1, 6))
        names = [ObjectKey(number.to_bytes(16, "big")) for number in batch]
        deed = point.choice(["fill", "fill", "remove", "punch"])
        if deed == "fill":
            items = []
            for name, number in zip(names, batch, strict=True):
                blocks = point.sample(range(20), point.randrange(1, 8))
                say("durable", number, blocks)
                items.append(stored(name, 0))
                items[-1].blocks = [(block, digest_block(name + bytes([block]))) for block in blocks]
            assert not one.commit(items)
            for item, number in zip(items, batch, strict=True):
                say("resident", number, [block for block, _ in item.blocks])
        elif deed == "remove":
            for number in batch:
                say("removing", number)
            one.remove_objects(names)
            for number in batch:
                say("unlinked", number)
        else:
            blocks = point.sample(range(20), 5)
            say("dropping", batch[0], blocks)
            one.remove_blocks(names[0], blocks)
            say("punched", batch[0], blocks)


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(400)])])
def test_kill_at_random_points_never_leaves_more_than_was_durable(folder: Path, kills: int) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    point = random.Random(seed)
    may, must = set[tuple[int, int]](), set[tuple[int, int]]()
    most = 0
    for round_number in range(kills):
        work = partial(churn_for_ever, folder, seed + round_number)
        told = killed_at_a_random_point(work, point, 0.02)
        for line in told.decode().splitlines(keepends=True):
            if not line.endswith("\n"):
                break
            what, number, block = line.split()
            place = int(number), int(block)
            if what == "durable":
                may.add(place)
            elif what == "resident":
                must.add(place)
            else:
                gone = {one for one in may if one[0] == place[0]} if what in ("removing", "unlinked") else {place}
                must -= gone
                if what in ("unlinked", "punched"):
                    may -= gone
        with opened(folder, clean=False) as (one, found):
            records = in_use_now(one)[1]
        there = {(int.from_bytes(item.name, "big"), block) for item in found.objects for block, _ in item.blocks}
        assert found.replaced == ""
        assert must <= there <= may, (sorted(there - may), sorted(must - there))
        assert records == len(there), "a slot leaked"
        may, must = set(there), set(there)
        most = max(most, len(there))
    assert most > 0
