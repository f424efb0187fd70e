"""Open files: exact lengths at every border, versions kept, shards followed."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from tierfs.blocks.errors import NotFound, StaleVersion
from tierfs.cache.block_cache import BlockCache
from tierfs.cache.buffers import BufferPool
from tierfs.cache.prefetcher import Prefetcher
from tierfs.fs.filesystem import Filesystem
from tierfs.fs.inodes import Inodes
from tierfs.fs.tree import Tree
from tierfs.policy.readahead import ReadaheadConfig
from tierfs.testing.sources import MemorySource

BLOCK = 16 << 10


@asynccontextmanager
async def mounted(source: MemorySource) -> AsyncIterator[Filesystem]:
    publication = await source.publication()
    pool = BufferPool(limit_bytes=64 * BLOCK, block_bytes=BLOCK)
    cache = BlockCache(source=source, tiers=[], pool=pool, block_bytes=BLOCK, source_timeout_s=5)
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: cache.run(task_status=task_status))
        prefetcher = Prefetcher(cache)
        await nursery.start(lambda task_status: prefetcher.run(task_status=task_status))
        inodes = Inodes(None)
        yield Filesystem(
            Tree(publication.catalog, inodes),
            inodes=inodes,
            cache=cache,
            prefetcher=prefetcher,
            readahead=ReadaheadConfig(window_max_bytes=8 * BLOCK),
            request_timeout_s=10,
        )
        nursery.cancel_scope.cancel()


def inode_of(filesystem: Filesystem, path: bytes) -> int:
    return filesystem.resolve(path).inode


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 7])
def test_every_read_is_exactly_as_long_as_the_file_allows(size: int) -> None:
    data = random.Random(size).randbytes(size)

    async def test() -> None:
        async with mounted(MemorySource({b"m/f": data}, block_bytes=BLOCK)) as filesystem:
            view = filesystem.open(inode_of(filesystem, b"m/f"))
            borders = {0, 1, size - 1, size, size + 1, size + BLOCK, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 3}
            for offset in sorted(border for border in borders if border >= 0):
                for length in (1, 5, BLOCK, BLOCK + 1, 2 * BLOCK + 5, 100 * BLOCK):
                    assert bytes(await view.read(offset, length)) == data[offset : offset + length], (offset, length)

    trio.run(test)


def test_an_open_file_keeps_its_version_and_a_new_open_of_it_is_stale() -> None:
    async def test() -> None:
        source = MemorySource({b"m/f": b"old" * 100}, block_bytes=BLOCK)
        async with mounted(source) as filesystem:
            inode = inode_of(filesystem, b"m/f")
            view = filesystem.open(inode)
            assert bytes(await view.read(0, 3)) == b"old"
            source.publish({b"m/f": b"new" * 100})
            filesystem.replace(Tree((await source.publication()).catalog, filesystem.inodes))
            assert bytes(await view.read(3, 3)) == b"old"
            assert filesystem.attributes(inode)[1] == 0  # no name leads to it any more
            with pytest.raises(StaleVersion):
                filesystem.open(inode)
            new = filesystem.lookup(inode_of(filesystem, b"m"), b"f")
            assert new.inode != inode
            assert bytes(await filesystem.open(new.inode).read(0, 3)) == b"new"
            filesystem.close(inode)
            with pytest.raises(StaleVersion):
                filesystem.attributes(inode)

    trio.run(test)


def test_a_listing_stays_that_of_its_generation() -> None:
    async def test() -> None:
        source = MemorySource({b"a": b"1", b"b": b"2"}, block_bytes=BLOCK)
        async with mounted(source) as filesystem:
            handle = filesystem.open_directory(1)
            source.publish({b"c": b"3"})
            filesystem.replace(Tree((await source.publication()).catalog, filesystem.inodes))
            assert [name for name, _, _ in filesystem.entries(handle, 0)] == [b".", b"..", b"a", b"b"]
            for start in range(5):
                names = [name for name, _, _ in filesystem.entries(handle, start)]
                assert names == [b".", b"..", b"a", b"b"][start:]
            with pytest.raises(NotFound):
                filesystem.lookup(1, b"a")
            filesystem.close_directory(handle)

    trio.run(test)


def test_a_sequential_reader_is_read_ahead_and_goes_on_into_the_next_shard() -> None:
    rng = random.Random(3)
    shards = {b"m/model-%05d-of-00002.safetensors" % i: rng.randbytes(12 * BLOCK) for i in (1, 2)}

    async def test() -> None:
        source = MemorySource(shards, block_bytes=BLOCK)
        async with mounted(source) as filesystem:
            first, second = (filesystem.resolve(path) for path in sorted(shards))
            view = filesystem.open(first.inode)
            for offset in range(0, 12 * BLOCK, BLOCK // 2):
                await view.read(offset, BLOCK // 2)
                await trio.testing.wait_all_tasks_blocked()
            asked = [version for version, _ in source.requests]
            assert asked.count(first.entry.version) == 12  # each block once, though read in halves
            assert asked.count(second.entry.version) >= 2

    trio.run(test)


def test_a_window_over_thousands_of_small_numbered_files_is_followed_into_a_few() -> None:
    files = {b"many/shard-%06d.bin" % number: b"%d" % number for number in range(3000)}

    async def test() -> None:
        source = MemorySource(files, block_bytes=BLOCK)
        async with mounted(source) as filesystem:
            view = filesystem.open(inode_of(filesystem, b"many/shard-000000.bin"))
            assert bytes(await view.read(0, 10)) == b"0"
            await trio.testing.wait_all_tasks_blocked()
            assert len(source.requests) <= 8

    trio.run(test)


def test_the_views_of_all_handles_are_one_and_go_with_the_last() -> None:
    async def test() -> None:
        async with mounted(MemorySource({b"f": b"x"}, block_bytes=BLOCK)) as filesystem:
            inode = inode_of(filesystem, b"f")
            assert filesystem.open(inode) is filesystem.open(inode)
            filesystem.close(inode)
            assert filesystem.open_files == 1
            filesystem.close(inode)
            assert filesystem.open_files == 0

    trio.run(test)
