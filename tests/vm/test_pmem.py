"""In the VM: libpmem and libpmemobj on real persistent memory: is_pmem, MAP_SYNC, copies, transactions, a tier."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.local_tiers import Content, run, running
from tests.pmem_pools import killed_at_a_random_point
from tests.vm.guest import PMEM
from tests.vm.qemu import ROOT
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


_WITHOUT_LIBRARY = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from tests.local_tiers import Content, run, running
from tierfs.tiers.local import DirectoryTier

async def main():
    content = Content(1, 3 * 65536)
    for start in range(2):
        tier = DirectoryTier("hot", [Path(sys.argv[1])], block_bytes=65536, capacity_bytes=1 << 20, mapped=True)
        async with running(tier):
            assert start or await content.fill(tier) == 3
            assert await content.hits(tier) == 3
            told = asdict(tier.statistics())
    print(json.dumps(told))

run(main, seconds=100)
"""


def test_without_libpmemobj_hot_is_persistent_memory_with_its_residency_in_sqlite_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "libpmemobj.so.1").write_text("no library")
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_LIBRARY, str(PMEM / "without")], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)  # what `tierfs status --json` shows of the tier
    assert (told["kind"], told["medium"], told["residency"], told["state"]) == ("dax", "pmem", "sqlite", "ok")
    assert "install the packages libpmemobj1" in told["residency_reason"]
    assert (PMEM / "without" / "residency.db").exists() and not (PMEM / "without" / "residency.pool").exists()


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
