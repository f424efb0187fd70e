"""In the VM: libpmem and libpmemobj on real persistent memory: is_pmem, MAP_SYNC, copies, transactions, a tier."""

import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.local_tiers import Content, run, running
from tests.pmem_pools import killed_at_a_random_point
from tests.vm.guest import PMEM
from tierfs.blocks.spans import Span
from tierfs.tiers.local import DirectoryTier
from tierfs.tiers.pmem.memory import MappedFile, maps_sync
from tierfs.tiers.pmem.pool import Pool

pytestmark = pytest.mark.vm

POOL_BYTES, ROOT_BYTES = 16 << 20, 64 << 10
KILLS = int(os.environ.get("TIERFS_VM_KILLS", "2"))


@pytest.fixture
def pool_path() -> Iterator[Path]:
    path = PMEM / "test.pool"
    yield path
    path.unlink()


def test_libpmem_says_that_it_is_persistent_memory_and_its_copies_arrive() -> None:
    assert "PMEM_IS_PMEM_FORCE" not in os.environ
    assert maps_sync(PMEM)
    assert not maps_sync(Path("/dev/shm"))
    data = random.Random(1).randbytes(1 << 20)
    for folder, is_pmem in ((PMEM, True), (Path("/dev/shm"), False)):
        mapped = MappedFile.create(folder / "mapped", len(data))
        assert mapped.is_pmem == is_pmem
        mapped.copy(0, memoryview(data))
        mapped.drain()
        mapped.close()
        assert (folder / "mapped").read_bytes() == data
        (folder / "mapped").unlink()


def test_transaction_that_raises_leaves_nothing_behind(pool_path: Path) -> None:
    pool = Pool.create(pool_path, "test", pool_bytes=POOL_BYTES, root_bytes=ROOT_BYTES)
    with pool.transaction() as transaction:
        transaction.write(0, b"before")
    with pytest.raises(KeyboardInterrupt), pool.transaction() as transaction:
        transaction.write(0, b"AFTER!")
        assert pool.read(0, 6) == b"AFTER!"
        raise KeyboardInterrupt
    assert pool.read(0, 6) == b"before"
    pool.close()
    pool = Pool.open(pool_path, "test")
    assert pool.read(0, 6) == b"before"
    pool.close()


def count_for_ever(path: Path, tell: Callable[[bytes], object]) -> None:
    """Transactions that write one number in many places."""
    pool = Pool.open(path, "test")
    number = int.from_bytes(pool.read(0, 4), "little")
    while True:
        number += 1
        with pool.transaction() as transaction:
            for offset in range(0, 4096, 64):
                transaction.write(offset, number.to_bytes(4, "little"))
        tell(b".")


def test_killed_inside_transactions_the_pool_is_whole(pool_path: Path) -> None:
    Pool.create(pool_path, "test", pool_bytes=POOL_BYTES, root_bytes=ROOT_BYTES).close()
    before = 0
    for _ in range(KILLS):
        told = killed_at_a_random_point(partial(count_for_ever, pool_path), random.Random(), 0.3)
        pool = Pool.open(pool_path, "test")
        cells = {int.from_bytes(pool.read(offset, 4), "little") for offset in range(0, 4096, 64)}
        pool.close()
        assert len(cells) == 1, "part of a transaction"
        assert before + len(told) <= cells.copy().pop() <= before + len(told) + 1
        before = cells.pop()


def test_what_a_tier_reads_from_is_mapped_synchronously_and_nowhere_in_memory() -> None:
    content = Content(1, 40 * 65536 + 5)

    async def test() -> None:
        tier = DirectoryTier("hot", [PMEM / "sync"], block_bytes=65536, capacity_bytes=64 << 20, mapped=True)
        async with running(tier):
            statistics = tier.statistics()
            assert (statistics.kind, statistics.medium, statistics.residency) == ("dax", "pmem", "libpmemobj pool")
            assert statistics.residency_reason == ""
            await content.fill(tier)
            copied = os.memfd_create("copied")
            for block in content.blocks:
                view = tier.read_nowait(content.key, Span(block, 0, content.length(block)))
                assert view is not None
                assert os.write(copied, view) == len(view)  # the kernel copies: Python does not touch the bytes
                view.release()
            assert os.pread(copied, len(content.bytes) + 1, 0) == content.bytes
            os.close(copied)
            fields = fields_of_map(PMEM / "sync" / "objects")
            assert "sf" in fields["VmFlags"], fields  # synchronous page faults: MAP_SYNC
            assert fields["Rss"] == ["0", "kB"], fields

    run(test, seconds=120)


def fields_of_map(folder: Path) -> dict[str, list[str]]:
    """The fields in smaps of the one mapping of a file below a folder."""
    found: list[dict[str, list[str]]] = []
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *words = line.split()
        if not name.endswith(":"):
            here = f" {folder}/" in line
            if here:
                found.append({})
        elif here:
            found[-1][name.removesuffix(":")] = words
    (one,) = found
    return one
