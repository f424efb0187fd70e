"""Handles that outlive a daemon: they say by themselves what they are, and what was superseded is kept."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tierfs.blocks.errors import StaleVersion
from tierfs.blocks.ids import ContentId
from tierfs.cache.block_cache import BlockCache
from tierfs.cache.buffers import BufferPool
from tierfs.cache.prefetcher import Prefetcher
from tierfs.catalog.schema import Publication
from tierfs.catalog.superseded import Superseded, SupersededStore
from tierfs.fs.filesystem import Filesystem
from tierfs.fs.inodes import Inodes
from tierfs.fs.tree import Tree
from tierfs.policy.readahead import ReadaheadConfig
from tierfs.testing.sources import MemorySource, version_of

BLOCK = 16 << 10
OLD, NEW = b"old" * 100, b"new" * 100


@asynccontextmanager
async def daemon(source: MemorySource, superseded: list[Superseded] | None = None) -> AsyncIterator[Filesystem]:
    """All that one daemon has; two after another share nothing but the source and what was kept."""
    publication = await source.publication()
    pool = BufferPool(limit_bytes=16 * BLOCK, block_bytes=BLOCK)
    cache = BlockCache(source=source, tiers=[], pool=pool, block_bytes=BLOCK, source_timeout_s=5)
    cache.learn(publication.contents)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            await nursery.start(lambda task_status: cache.run(task_status=task_status))
            inodes = Inodes(None)
            yield Filesystem(
                Tree(publication.catalog, inodes),
                inodes=inodes,
                cache=cache,
                prefetcher=Prefetcher(cache),
                readahead=ReadaheadConfig(window_max_bytes=4 * BLOCK),
                request_timeout_s=10,
                superseded=superseded or [],
            )
            nursery.cancel_scope.cancel()


def tree_of(publication: Publication, filesystem: Filesystem) -> Tree:
    return Tree(publication.catalog, filesystem.inodes)


def record(number: int) -> Superseded:
    return Superseded(number, b"v" * 16, b"", b"m/\xff", 5, 0o644, 1, 1, b"m", 5)


# -- files


def test_a_superseded_file_that_is_open_is_still_read_by_the_next_daemon(tmp_path: Path) -> None:
    content = ContentId(b"c" * 16)

    async def test() -> None:
        source = MemorySource({b"m/f": OLD}, block_bytes=BLOCK)
        version = version_of(b"m/f", OLD)
        store = SupersededStore(tmp_path / "superseded.json")
        async with daemon(source) as first:
            inode = first.resolve(b"m/f").inode
            view = first.open(inode)
            first.open(inode)
            first.cache.learn({version: content})
            source.publish({b"m/f": NEW})
            tree = tree_of(await source.publication(), first)
            assert not store.covers(first.superseded_by(tree))
            store.replace(first.superseded_by(tree))
            assert store.covers(first.superseded_by(tree))
            first.replace(tree)
        source._versions[version] = OLD  # the source reads it still
        async with daemon(source, SupersededStore(tmp_path / "superseded.json").load()) as second:
            assert version in second.open_versions()
            before, links = second.attributes(inode)
            assert (before.entry.size_bytes, before.entry.mode, links) == (len(OLD), 0o644, 0)
            second.adopt_all({inode: 2})
            assert second.view(inode).facts == view.facts
            assert second.cache.key(version) == content
            assert bytes(await second.view(inode).read(0, 1000)) == OLD
            with pytest.raises(StaleVersion):
                second.open(inode)
            second.close(inode)
            assert second.attributes(inode)[0].entry.version == version
            second.close(inode)
            with pytest.raises(StaleVersion):
                second.attributes(inode)
            assert second.superseded_by(second.tree) == []

    trio.run(test)


def test_what_is_open_no_longer_is_kept_no_longer() -> None:
    async def test() -> None:
        source = MemorySource({b"f": OLD}, block_bytes=BLOCK)
        async with daemon(source, [record(70), record(71)]) as filesystem:
            assert len(filesystem.superseded_by(filesystem.tree)) == 2  # nobody has said yet what is open
            filesystem.adopt_all({71: 1, 99: 3})
            assert [kept.inode for kept in filesystem.superseded_by(filesystem.tree)] == [71]
            with pytest.raises(StaleVersion):
                filesystem.view(70)
            with pytest.raises(StaleVersion):
                filesystem.view(99)  # known nowhere
            filesystem.close(99)
            assert filesystem.open_files == 1

    trio.run(test)


def test_a_version_that_comes_back_is_kept_no_longer() -> None:
    async def test() -> None:
        source = MemorySource({b"f": OLD}, block_bytes=BLOCK)
        async with daemon(source) as filesystem:
            inode = filesystem.resolve(b"f").inode
            filesystem.open(inode)
            original = filesystem.tree
            source.publish({b"f": NEW})
            newer = tree_of(await source.publication(), filesystem)
            filesystem.replace(newer)
            assert [kept.inode for kept in filesystem.superseded_by(newer)] == [inode]
            assert filesystem.superseded_by(original) == []
            filesystem.replace(original)
            assert filesystem.open(inode).opens == 2

    trio.run(test)


def test_a_change_while_no_daemon_ran_is_made_up_for_from_the_tree_before() -> None:
    async def test() -> None:
        source = MemorySource({b"f": OLD, b"same": b"s"}, block_bytes=BLOCK)
        async with daemon(source) as first:
            before = first.tree
            inode, same = first.resolve(b"f").inode, first.resolve(b"same").inode
        source.publish({b"f": NEW, b"same": b"s"})
        async with daemon(source) as second:
            kept = second.superseded_since(before, [inode, same, 1, 12345])
            assert [(one.inode, one.version, one.path) for one in kept] == [(inode, version_of(b"f", OLD), b"f")]
            second.adopt_all({inode: 1, same: 1})
            assert second.view(inode).facts.size_bytes == len(OLD)
            assert second.view(same).facts.version == version_of(b"same", b"s")

    trio.run(test)


def test_a_handle_of_an_earlier_daemon_is_adopted_with_its_first_read_and_counts_never_go_below_zero() -> None:
    async def test() -> None:
        source = MemorySource({b"f": OLD}, block_bytes=BLOCK)
        async with daemon(source) as filesystem:
            inode = filesystem.resolve(b"f").inode
            filesystem.close(inode)  # of a handle this daemon never saw
            assert bytes(await filesystem.view(inode).read(0, 3)) == b"old"
            assert filesystem.open_files == 1
            assert filesystem.open(inode).opens == 2
            for left in (1, 0, 0, 0):
                filesystem.close(inode)
                assert filesystem.open_files == left
            assert filesystem.open(inode).opens == 1
            with pytest.raises(StaleVersion):
                filesystem.view(1)  # the root is no file

    trio.run(test)


def test_adopted_handles_are_all_counted_once() -> None:
    async def test() -> None:
        source = MemorySource({b"f": OLD}, block_bytes=BLOCK)
        async with daemon(source) as filesystem:
            inode = filesystem.resolve(b"f").inode
            filesystem.adopt(inode, 0)
            assert filesystem.open_files == 0
            filesystem.adopt(inode, 3)
            filesystem.adopt(inode, 3)
            for left in (1, 1, 0):
                filesystem.close(inode)
                assert filesystem.open_files == left

    trio.run(test)


# -- what is kept


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    store = SupersededStore(tmp_path / "superseded.json")
    assert store.load() == []
    assert store.covers([]) and not store.covers([record(7)])
    store.replace([record(7), record(8)])
    again = SupersededStore(tmp_path / "superseded.json")
    assert again.load() == [record(7), record(8)]
    assert again.covers([record(8)])
    again.replace([])
    assert SupersededStore(tmp_path / "superseded.json").load() == []


def test_an_unreadable_file_is_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "superseded.json"
    path.write_bytes(b'[{"inode": 7')
    assert SupersededStore(path).load() == []
    assert "superseded_versions_unreadable" in caplog.text


def test_a_write_that_fails_is_logged_and_not_tried_for_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = SupersededStore(tmp_path / "missing" / "superseded.json")
    store.replace([record(7)])
    assert "superseded_versions_not_kept" in caplog.text
    assert store.covers([record(7)])


# -- directories


def names(filesystem: Filesystem, handle: int, start: int = 0) -> list[bytes]:
    return [name for name, _, _ in filesystem.entries(handle, start)]


def test_a_directory_handle_works_in_the_next_daemon() -> None:
    async def test() -> None:
        source = MemorySource({b"d/a": b"1", b"d/b": b"2", b"e": b"3"}, block_bytes=BLOCK)
        async with daemon(source) as first:
            handle = first.open_directory(first.resolve(b"d").inode)
            assert 0 < handle < 1 << 63
            assert first.open_directory(1) != handle
        async with daemon(source) as second:
            assert names(second, handle, 3) == [b"b"]
            source.publish({b"e": b"3"})
            second.replace(tree_of(await source.publication(), second))
            assert names(second, handle) == [b".", b"..", b"a", b"b"]  # counted since its first use
            second.close_directory(handle)
            with pytest.raises(StaleVersion):
                names(second, handle)
            second.close_directory(handle)

    trio.run(test)


def test_a_listing_of_a_generation_that_is_not_here_is_stale_at_any_position() -> None:
    async def test() -> None:
        source = MemorySource({b"d/a": b"1"}, block_bytes=BLOCK)
        async with daemon(source) as first:
            handle = first.open_directory(1)
        source.publish({b"d/a": b"2"})
        async with daemon(source) as second:
            for start in (0, 2):
                with pytest.raises(StaleVersion):
                    names(second, handle, start)
            current = second.open_directory(1)
            for foreign in (current + 2, current + 1000):  # a file, and beyond the end
                with pytest.raises(StaleVersion):
                    names(second, foreign)
            assert names(second, current) == [b".", b"..", b"d"]

    trio.run(test)


def test_a_listing_begun_before_a_change_and_another_daemon_goes_on() -> None:
    async def test() -> None:
        source = MemorySource({b"d/a": b"1", b"d/b": b"2"}, block_bytes=BLOCK)
        async with daemon(source) as first:
            before = first.tree
            handle, other = (first.open_directory(first.resolve(path).inode) for path in (b"d", b""))
        source.publish({b"c/a": b"1", b"d/b": b"2"})
        async with daemon(source) as second:
            second.expect_listings([before, second.tree])
            assert names(second, handle, 3) == [b"b"]
            source.publish({b"e": b"2"})
            current = second.open_directory(1)
            second.close_directory(current)
            second.replace(tree_of(await source.publication(), second))
            assert names(second, current) == [b".", b"..", b"c", b"d"]  # a daemon without its source shows such a tree
            second.expect_listings(())
            assert names(second, handle, 2) == [b"a", b"b"]  # counted since its first use
            second.close_directory(handle)  # the last one of that generation
            with pytest.raises(StaleVersion):
                names(second, other)

    trio.run(test)


def test_an_old_tree_stays_until_its_last_listing_is_closed() -> None:
    async def test() -> None:
        source = MemorySource({b"d/a": b"1"}, block_bytes=BLOCK)
        async with daemon(source) as filesystem:
            root, again, below = (filesystem.open_directory(n) for n in (1, 1, filesystem.resolve(b"d").inode))
            assert root == again
            source.publish({b"x": b"2"})
            filesystem.replace(tree_of(await source.publication(), filesystem))
            assert names(filesystem, filesystem.open_directory(1)) == [b".", b"..", b"x"]
            for closed in (root, again):
                filesystem.close_directory(closed)
                assert names(filesystem, below) == [b".", b"..", b"a"]
            filesystem.close_directory(below)
            assert filesystem._listings.generations == 1

    trio.run(test)
