"""In the VM: bad blocks of persistent memory. They are misses where the daemon reads, and cost the object where the
kernel reads; they are counted, and no process but the reader's own ever dies of one.

The pmem driver's list of bad blocks takes more of them by its file in sysfs, and answers with errors from then on,
before it touches the memory. They stay until the next boot: each test keeps its files open, so that no other gets them.
"""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.test_lent_objects import FakeLender
from tests.local_tiers import BLOCK, Content, object_files, run, running, until
from tests.vm.guest import BLOCK_BYTES, PMEM, Mounted, eventually, write_model
from tests.vm.test_tiers import open_in_passthrough
from tierfs.blocks.spans import Span
from tierfs.tiers import watching
from tierfs.tiers.bad_blocks import extents
from tierfs.tiers.interface import Offer
from tierfs.tiers.local import DirectoryTier

pytestmark = pytest.mark.vm

LIST = Path("/sys/block/pmem0/badblocks")
BAD_BYTES = 4096
TOUCH = "import mmap, sys; mmap.mmap(int(sys.argv[1]), 0, prot=1)[int(sys.argv[2])]"
kept: list[int] = []


def make_bad(file: Path, offset_bytes: int) -> None:
    """One page of that file is bad from now on."""
    fd = os.open(file, os.O_RDONLY)
    kept.append(fd)
    for logical, (begin, end) in extents(fd):
        if logical <= offset_bytes < logical + end - begin:
            LIST.write_text(f"{(begin + offset_bytes - logical) // 512} {BAD_BYTES // 512}\n")
            with pytest.raises(OSError, check=lambda error: error.errno == errno.EIO):
                os.pread(fd, BAD_BYTES, offset_bytes)
            return
    raise AssertionError(f"{file} has no byte {offset_bytes}")


def hot(name: str) -> DirectoryTier:
    return DirectoryTier(
        "hot", [PMEM / name], block_bytes=BLOCK, capacity_bytes=64 << 20, mapped=True, probe_s=0.2
    )  # fmt: skip


def test_a_bad_block_is_a_miss_for_what_the_daemon_reads() -> None:
    content = Content(1, 8 * BLOCK)

    async def test() -> None:
        async with running(hot("bad-direct")) as tier:
            await content.fill(tier)
            (file,) = object_files(PMEM / "bad-direct")
            make_bad(file, 2 * BLOCK + 8192)
            make_bad(file, 5 * BLOCK)
            assert tier.read_nowait(content.key, Span(2, 100, 50)) is not None, "another page of that block"
            span = Span(2, 8000, 1000)
            assert tier.read_nowait(content.key, span) is None
            assert await tier.read_span(content.key, span) is None
            assert not tier.resident(content.key, 2)
            assert await content.read(tier, 5) is None  # as a whole, with its digest
            assert await content.hits(tier) == 6
            assert tier.read_nowait(content.key, Span(3, 0, BLOCK)) is not None
            statistics = tier.statistics()
            assert (statistics.failed_reads, statistics.corrupt_blocks, statistics.objects) == (2, 0, 1)

            # Fetched again, it is written to the same place. Where that does not mend it, it is left alone.
            assert content.offer(tier, 2) is Offer.ACCEPTED
            await tier.flush()
            print("written again:", tier.resident(content.key, 2), tier.statistics().reason)
            if not tier.resident(content.key, 2):
                await until(lambda: tier.statistics().state == "ok")
                assert content.offer(tier, 2) is Offer.BYPASSED
                assert tier.statistics().failed_writes == 1
            assert await content.hits(tier) >= 6
            other = Content(2, 3 * BLOCK)
            await other.fill(tier)
            assert await other.hits(tier) == 3

        async with running(hot("bad-direct")) as tier:
            assert await content.hits(tier) >= 6

    run(test, seconds=120)


def test_a_bad_block_of_what_was_handed_out_is_noticed_without_any_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_EVERY_S", 0.2)
    content, other = Content(3, 8 * BLOCK), Content(4, 8 * BLOCK)

    async def test() -> None:
        async with running(hot("bad-watched")) as tier:
            tier.lender = FakeLender()
            for one in (content, other):
                await one.fill(tier)
                assert await tier.whole(one.key) is not None
            bad = next(file for file in object_files(PMEM / "bad-watched") if file.name == content.key.hex())
            make_bad(bad, 7 * BLOCK)
            await until(lambda: tier.statistics().media_errors == 1)
            assert tier.resident_bytes(content.key) == 0
            assert await tier.whole(content.key) is None
            assert await tier.whole(other.key) is not None, "what has no bad block stays"

            # The list tells before anybody could read: what was not handed out yet loses the block alone.
            late = Content(8, 8 * BLOCK)
            await late.fill(tier)
            make_bad(PMEM / "bad-watched" / "objects" / late.key.hex()[:2] / late.key.hex(), BLOCK)
            assert await tier.whole(late.key) is None
            assert await late.hits(tier) == 7
            assert tier.statistics().media_errors == 1

    run(test, seconds=120)


def test_a_bad_block_in_the_pool_costs_the_pool_at_the_next_start() -> None:
    content = Content(5, 2 * BLOCK)

    async def test() -> None:
        async with running(hot("bad-pool")) as tier:
            await content.fill(tier)
        make_bad(PMEM / "bad-pool" / "residency.pool", 4 << 20)
        async with running(hot("bad-pool")) as tier:
            statistics = tier.statistics()
            assert (statistics.state, statistics.residency, statistics.objects) == ("ok", "libpmemobj pool", 0)
            assert (PMEM / "bad-pool" / "residency.pool.corrupt").exists()
            await content.fill(tier)
            assert await content.hits(tier) == 2

    run(test, seconds=120)


def test_a_reader_in_passthrough_meets_the_error_and_the_next_open_is_right(tmp_path: Path) -> None:
    source = tmp_path / "source"
    size_bytes = 2 * BLOCK_BYTES + 5
    contents = {name: write_model(source / name / "weights.bin", size_bytes, seed=ord(name)) for name in "ab"}
    with Mounted(f"dir:{source}", tmp_path, "bad-mount", hot="") as mounted:
        mounted.ask("warm", paths=["a", "b"], tier="hot")
        status = mounted.status()
        if not status["kernel"]["passthrough"]:
            pytest.skip(f"no passthrough: {status['kernel']['passthrough_reason']}")
        daemon = status["daemon"]["pid"]
        stored = {file.read_bytes()[:4096]: file for file in object_files(mounted.hot)}

        place = mounted.path / "a" / "weights.bin"
        with open_in_passthrough(mounted, place) as file:
            make_bad(stored[contents["a"][:4096]], BLOCK_BYTES)
            with pytest.raises(OSError, check=lambda error: error.errno == errno.EIO):
                os.pread(file.fileno(), 4096, BLOCK_BYTES)
        eventually(lambda: mounted.status()["open_files"] == 0, "the handle is released")
        assert place.read_bytes() == contents["a"]
        assert mounted.status()["tiers"]["hot"]["media_errors"] == 1

        place = mounted.path / "b" / "weights.bin"
        with open_in_passthrough(mounted, place) as file:
            make_bad(stored[contents["b"][:4096]], BLOCK_BYTES + 4096)
            touch = [sys.executable, "-S", "-c", TOUCH, str(file.fileno()), str(BLOCK_BYTES + 4097)]
            reader = subprocess.run(touch, pass_fds=[file.fileno()], stderr=subprocess.DEVNULL)
            assert reader.returncode == -signal.SIGBUS
        eventually(lambda: mounted.status()["open_files"] == 0, "the handle is released")
        assert place.read_bytes() == contents["b"]
        status = mounted.status()
        assert status["tiers"]["hot"]["media_errors"] == 2
        assert status["daemon"]["pid"] == daemon
        assert mounted.log().count("object_quarantined") == 2
