"""The tree against a real directory: a state machine changes a directory, publishes it, and asks both the same things.

The directory is scanned by the real scanner, its catalog kept by the real store, and the tree asked through Filesystem,
as the FUSE operations and the commands ask it. What the kernel makes of a path is asked of the kernel: openat2(2) with
RESOLVE_BENEATH, which knows the same border as the tree.
"""

import ctypes
import errno
import os
import shutil
import stat
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest
import trio
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.model.machines import run_long, run_short
from tierfs.blocks.errors import NameTooLong, NotFound, StaleVersion
from tierfs.blocks.ids import VersionId
from tierfs.cache.block_cache import BlockCache
from tierfs.cache.buffers import BufferPool
from tierfs.cache.prefetcher import Prefetcher
from tierfs.catalog import schema
from tierfs.catalog.beneath import open_root
from tierfs.catalog.remembered import Remembered
from tierfs.catalog.scan import scan_tree
from tierfs.catalog.schema import Catalog, Kind, Publication
from tierfs.fs.filesystem import Filesystem
from tierfs.fs.inodes import Inodes
from tierfs.fs.tree import Tree
from tierfs.policy.readahead import ReadaheadConfig
from tierfs.testing.sources import MemorySource

BLOCK = 4096
EARLIER = 4  # catalogs that a daemon keeps beside the newest
_OPENAT2, _RESOLVE_NO_MAGICLINKS, _RESOLVE_BENEATH = 437, 0x02, 0x08
_libc = ctypes.CDLL(None, use_errno=True)

NAMES = [b"a", b"b", b"c", b"model.bin", b"\xff\n", b"x" * 255]
Answer = TypeVar("Answer")

names = st.sampled_from(NAMES)
# Parts of paths and of symlinks' targets: mostly names that are there, and what path_resolution(7) has rules for.
parts = st.sampled_from([*NAMES[:3], *NAMES, b"..", b"..", b".", b"", b"nowhere", b"y" * 256])
paths = st.one_of(
    st.lists(parts, min_size=1, max_size=7).map(b"/".join),
    st.sampled_from([b"a/" * 2047 + b"a", b"./" * 2047 + b"a", b"./" * 2047 + b"ab", b"/" * 5000]),
)
targets = st.one_of(
    st.lists(parts, min_size=1, max_size=5).map(b"/".join).filter(bool), st.sampled_from([b"/", b"/tmp", b"/a"])
)


def resolved_by_kernel(root_fd: int, path: bytes) -> tuple[int, int] | int:
    """Device and inode of what that path leads to beneath the root, or the errno."""
    how = struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC, 0, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
    for _ in range(1000):
        fd = _libc.syscall(_OPENAT2, root_fd, path, how, len(how))
        if fd >= 0:
            found = os.fstat(fd)
            os.close(fd)
            return found.st_dev, found.st_ino
        if ctypes.get_errno() != errno.EAGAIN:  # somebody renamed something, anywhere, while `..` was followed
            break
    return ctypes.get_errno()


def no_openat2() -> bool:
    """Whether this kernel (or a seccomp filter) has none."""
    with tempfile.TemporaryDirectory() as directory:
        fd = open_root(directory)
        try:
            return isinstance(resolved_by_kernel(fd, b"."), int)
        finally:
            os.close(fd)


def in_trio(call: Callable[..., Answer], *arguments: object) -> Answer:
    """What looks at trio's clock, called where there is one."""

    async def inside() -> Answer:
        return call(*arguments)

    return trio.run(inside)


@dataclass
class Seen:
    """A directory as it was when it was published: by path, what lstat, readlink and read said."""

    kinds: dict[bytes, Kind] = field(default_factory=dict)
    stats: dict[bytes, os.stat_result] = field(default_factory=dict)
    targets: dict[bytes, bytes] = field(default_factory=dict)
    data: dict[bytes, bytes] = field(default_factory=dict)
    lists: dict[bytes, list[bytes]] = field(default_factory=dict)

    @classmethod
    def of(cls, root: bytes) -> "Seen":
        seen = cls(kinds={b"": Kind.DIRECTORY}, stats={b"": os.lstat(root)})
        pending = [b""]
        while pending:
            above = pending.pop()
            seen.lists[above] = sorted(os.listdir(os.path.join(root, above)))
            for name in seen.lists[above]:
                path = above + b"/" + name if above else name
                found = seen.stats[path] = os.lstat(os.path.join(root, path))
                if stat.S_ISDIR(found.st_mode):
                    seen.kinds[path] = Kind.DIRECTORY
                    pending.append(path)
                elif stat.S_ISLNK(found.st_mode):
                    seen.kinds[path] = Kind.SYMLINK
                    seen.targets[path] = os.readlink(os.path.join(root, path))
                else:
                    seen.kinds[path] = Kind.FILE
                    with open(os.path.join(root, path), "rb") as file:
                        seen.data[path] = file.read()
        return seen


@dataclass
class Listing:
    """An open directory: what it must show, however much is published meanwhile."""

    handle: int
    path: bytes
    generation: int
    expected: list[bytes]


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(prefix="tierfs-model-"))
        self.root = os.fsencode(self.place / "export")
        os.mkdir(self.root)
        self.root_fd = open_root(self.root)
        (self.place / "state").mkdir()
        self.remembered = Remembered(self.place / "state")
        self.generation = 0
        self.seen = Seen.of(self.root)
        self.dirty = True
        self.generations: list[int] = []
        self.listings: list[Listing] = []
        self.open_files: dict[int, tuple[bytes, VersionId]] = {}  # by inode: the bytes, the version
        self.contents: dict[VersionId, tuple[bytes, bytes]] = {}  # what a version was: first path, bytes
        self.numbers: dict[int, bytes] = {}  # what an inode number has stood for, ever
        self.filesystem: Filesystem | None = None
        self.stamp_ns = 10**18

    def teardown(self) -> None:
        os.close(self.root_fd)
        shutil.rmtree(self.place)

    @initialize()
    def begin(self) -> None:
        for name in (b"a", b"a/b"):
            os.mkdir(self.at(name))
        self.put(b"a/b/model.bin", b"first")
        self.publish()

    def at(self, path: bytes) -> bytes:
        return os.path.join(self.root, path)

    def put(self, path: bytes, data: bytes) -> None:
        with open(self.at(path), "wb") as file:
            file.write(data)
        self.stamp_ns += 1  # so that equal ones in one tick of the clock differ by more than their ctime
        os.utime(self.at(path), ns=(self.stamp_ns, self.stamp_ns))

    def directory(self, data: st.DataObject) -> bytes:
        """Any directory that is there now; not too deep."""
        there = [path for path, kind in Seen.of(self.root).kinds.items() if kind is Kind.DIRECTORY]
        return data.draw(st.sampled_from(sorted(path for path in there if path.count(b"/") < 5)))

    def anything(self, data: st.DataObject) -> bytes | None:
        there = sorted(Seen.of(self.root).kinds.keys() - {b""})
        return data.draw(st.sampled_from(there)) if there else None

    # -- what somebody does to the export

    def changed(self, publish: bool) -> None:
        self.dirty = True
        if publish and self.filesystem is not None:
            self.publish()

    @rule(
        data=st.data(), name=names, publish=st.booleans(),
        what=st.sampled_from(["file", "file", "directory", "symlink", "symlink"]),
    )  # fmt: skip
    def make(self, data: st.DataObject, name: bytes, publish: bool, what: str) -> None:
        path = os.path.join(self.directory(data), name)
        if os.path.lexists(self.at(path)):
            return
        if what == "file":
            self.put(path, data.draw(st.binary(max_size=20)))
        elif what == "directory":
            os.mkdir(self.at(path), data.draw(st.sampled_from([0o755, 0o700, 0o2775])))
        else:
            os.symlink(data.draw(targets), self.at(path))
        self.changed(publish)

    @rule(
        data=st.data(), publish=st.booleans(),
        how=st.sampled_from(["overwrite", "replace", "touch", "chmod", "remove"]),
    )  # fmt: skip
    def change(self, data: st.DataObject, publish: bool, how: str) -> None:
        path = self.anything(data)
        if path is None:
            return
        found = os.lstat(self.at(path))
        if how == "remove":
            shutil.rmtree(self.at(path)) if stat.S_ISDIR(found.st_mode) else os.unlink(self.at(path))
        elif not stat.S_ISREG(found.st_mode):
            return
        elif how == "overwrite":
            self.put(path, data.draw(st.binary(max_size=20)))
        elif how == "replace":
            self.put(b"new", data.draw(st.binary(max_size=20)))
            os.rename(self.at(b"new"), self.at(path))
        elif how == "touch":
            os.utime(self.at(path))
        else:
            os.chmod(self.at(path), data.draw(st.sampled_from([0o644, 0o600])))
        self.changed(publish)

    @rule(data=st.data(), name=names, publish=st.booleans(), how=st.sampled_from(["rename", "link"]))
    def move(self, data: st.DataObject, name: bytes, publish: bool, how: str) -> None:
        path = self.anything(data)
        if path is None:
            return
        target = os.path.join(self.directory(data), name)
        try:
            if how == "rename":
                os.rename(self.at(path), self.at(target))
            else:
                os.link(self.at(path), self.at(target), follow_symlinks=False)
        except OSError:
            return  # into itself, over what is there, or a directory: the kernel refuses, and nothing has changed
        self.changed(publish)

    # -- publishing, and what a mount does with it

    @rule()
    @precondition(lambda self: self.dirty)
    def publish(self) -> None:
        scan = scan_tree(self.root_fd, export="e")
        assert scan.steady and not scan.skipped and not scan.unreadable
        before, self.seen = self.seen, Seen.of(self.root)
        self.dirty = False
        if self.generations and scan.entries == self.tree.catalog.entries:  # as a source sees it
            assert before.data == self.seen.data
            return
        self.generation += 1
        catalog = schema.decode(schema.encode(Catalog("e", self.generation, BLOCK, scan.entries)))
        self.remembered.replace(Publication(catalog, {}, self.generation))
        self.generations.append(self.generation)
        if self.filesystem is None:
            self.filesystem = self.mounted(catalog)
        else:
            self.filesystem.replace(Tree(catalog, self.filesystem.inodes))
        self.versions()

    def mounted(self, catalog: Catalog) -> Filesystem:
        inodes = Inodes(self.place / "state" / "inodes.json")
        cache = BlockCache(
            source=MemorySource({}, block_bytes=BLOCK), tiers=[],
            pool=BufferPool(limit_bytes=4 * BLOCK, block_bytes=BLOCK), block_bytes=BLOCK, source_timeout_s=1,
        )  # fmt: skip
        return Filesystem(
            Tree(catalog, inodes), inodes=inodes, cache=cache, prefetcher=Prefetcher(cache),
            readahead=ReadaheadConfig(window_max_bytes=BLOCK), request_timeout_s=1,
        )  # fmt: skip

    @property
    def tree(self) -> Tree:
        assert self.filesystem is not None
        return self.filesystem.tree

    def versions(self) -> None:
        """A version is one content for ever, a number one thing for ever."""
        for index in range(1, len(self.tree.catalog.entries)):
            node = self.tree.at(index)
            path = self.tree.path(node)
            if node.entry.kind is Kind.FILE:
                version = VersionId(node.entry.version)
                first = self.tree.facts(node).path
                assert self.contents.setdefault(version, (first, self.seen.data[path])) == (first, self.seen.data[path])
                identity = b"f" + version
            else:
                identity = b"d" + path if node.entry.kind is Kind.DIRECTORY else b"l" + path + b"\0" + node.entry.target
            assert self.numbers.setdefault(node.inode, identity) == identity

    @rule()
    @precondition(lambda self: self.filesystem is not None)
    def restart(self) -> None:
        """Another daemon, from what this one kept: its listings go on, files too whose version is still there."""
        loaded = self.remembered.load()
        assert loaded is not None and loaded.catalog == self.tree.catalog
        inodes_before = {self.tree.path(self.tree.at(i)): self.tree.at(i).inode for i in range(len(self.seen.kinds))}
        superseded = self.filesystem.superseded_by(self.tree)
        handles = list(self.open_files)
        self.filesystem = self.mounted(loaded.catalog)
        self.filesystem._superseded = {record.inode: record for record in superseded}
        earlier = self.remembered.earlier(0.0, 1e9)
        assert [catalog.generation for catalog in earlier] == self.generations[-2 : -2 - EARLIER : -1]
        self.filesystem.expect_listings([*(Tree(catalog, self.filesystem.inodes) for catalog in earlier), self.tree])
        assert inodes_before == {
            self.tree.path(self.tree.at(i)): self.tree.at(i).inode for i in range(len(self.seen.kinds))
        }
        in_trio(self.filesystem.adopt_all, dict.fromkeys(handles, 1))
        kept = set(self.generations[-1 - EARLIER :])
        for listing in list(self.listings):
            if listing.generation not in kept:
                with pytest.raises(StaleVersion):
                    next(self.filesystem.entries(listing.handle, 2))
                self.listings.remove(listing)
            else:
                list(self.filesystem.entries(listing.handle, 2))  # it counts from its first use on

    # -- what readers do

    @rule(data=st.data())
    @precondition(lambda self: self.filesystem is not None and len(self.listings) < 6)
    def opendir(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(p for p, kind in self.seen.kinds.items() if kind is Kind.DIRECTORY)))
        handle = self.filesystem.open_directory(self.lookup(path))
        self.listings.append(Listing(handle, path, self.generation, [b".", b"..", *self.seen.lists[path]]))

    @rule(data=st.data())
    @precondition(lambda self: self.listings)
    def closedir(self, data: st.DataObject) -> None:
        listing = data.draw(st.sampled_from(self.listings))
        self.listings.remove(listing)
        self.filesystem.close_directory(listing.handle)

    @rule(data=st.data())
    @precondition(lambda self: self.filesystem is not None and self.seen.data)
    def open(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(self.seen.data)))
        inode = self.lookup(path)
        view = in_trio(self.filesystem.open, inode)
        if inode in self.open_files:
            self.filesystem.close(inode)
        assert view.facts.size_bytes == len(self.seen.data[path])
        self.open_files[inode] = (self.seen.data[path], view.facts.version)

    @rule(data=st.data())
    @precondition(lambda self: self.open_files)
    def close(self, data: st.DataObject) -> None:
        inode = data.draw(st.sampled_from(list(self.open_files)))
        del self.open_files[inode]
        self.filesystem.close(inode)

    @rule(data=st.data(), path=paths)
    @precondition(lambda self: self.filesystem is not None and not self.dirty)
    def resolve(self, data: st.DataObject, path: bytes) -> None:
        self.same_resolution(path)
        there = data.draw(st.sampled_from(sorted(self.seen.kinds)))
        for after in (b"", b"/", b"/.", b"/..", b"//", b"/../" + there.rpartition(b"/")[2], b"/" + path):
            self.same_resolution(there + after)

    @rule()
    @precondition(lambda self: self.filesystem is not None and not self.dirty)
    def follow(self) -> None:
        for path in self.seen.targets:
            expected = resolved_by_kernel(self.root_fd, path)
            found = self.tree.follow(self.filesystem.node(self.lookup(path)))
            assert (found is None) == isinstance(expected, int), (path, expected, found)
            if found is not None:
                assert self.identity(self.tree.path(found)) == expected

    def same_resolution(self, path: bytes) -> None:
        expected = resolved_by_kernel(self.root_fd, path.lstrip(b"/") or b".")
        if len(path) >= 4096:
            with pytest.raises(NameTooLong):
                self.filesystem.resolve(path)
            return
        if isinstance(expected, int):
            assert expected in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENAMETOOLONG), expected
            with pytest.raises(NotFound):
                self.filesystem.resolve(path)
            return
        assert self.identity(self.tree.path(self.filesystem.resolve(path))) == expected

    def identity(self, path: bytes) -> tuple[int, int]:
        found = os.lstat(self.at(path))
        return found.st_dev, found.st_ino

    def lookup(self, path: bytes) -> int:
        """The inode number at a path, name by name, as the kernel asks."""
        inode = 1
        for name in path.split(b"/") if path else ():
            inode = self.filesystem.lookup(inode, name).inode
        return inode

    # -- what must hold after each step

    @invariant()
    def every_name_is_what_it_was_when_published(self) -> None:
        if self.filesystem is None:
            return
        assert {self.tree.path(self.tree.at(i)) for i in range(len(self.tree.catalog.entries))} == set(self.seen.kinds)
        groups: dict[int, set[bytes]] = {}
        for path, kind in self.seen.kinds.items():
            inode = self.lookup(path)
            node, links = self.filesystem.attributes(inode)
            status = self.seen.stats[path]
            entry = self.filesystem.tree.at(self.tree.node(inode).position).entry
            assert (entry.kind, entry.mode, entry.mtime_ns) == (kind, status.st_mode & 0o7777, status.st_mtime_ns), path
            if kind is Kind.FILE:
                assert (entry.size_bytes, links) == (len(self.seen.data[path]), status.st_nlink), path
                groups.setdefault(inode, set()).add(path)
            elif kind is Kind.SYMLINK:
                assert (node.entry.target, entry.size_bytes) == (self.seen.targets[path], status.st_size)
            else:
                below = [p for p in self.seen.lists[path] if self.seen.kinds[os.path.join(path, p)] is Kind.DIRECTORY]
                assert links == 2 + len(below)
                assert [child.entry.name for child in self.tree.children(inode, 0)] == self.seen.lists[path]
        for paths_ in groups.values():  # one number, one file: hard links share it and nothing else does
            assert len({self.seen.stats[path].st_ino for path in paths_}) == 1
            assert len(paths_) == self.seen.stats[next(iter(paths_))].st_nlink

    @invariant()
    def listings_stay_what_they_were(self) -> None:
        for listing in self.listings:
            for start in range(len(listing.expected) + 1):
                found = [name for name, _, _ in self.filesystem.entries(listing.handle, start)]
                assert found == listing.expected[start:]

    @invariant()
    def open_files_keep_their_version(self) -> None:
        for inode, (data, version) in self.open_files.items():
            view = self.filesystem.view(inode)
            assert (view.facts.version, view.facts.size_bytes) == (version, len(data))
            node, links = self.filesystem.attributes(inode)
            assert node.entry.size_bytes == len(data)
            if self.tree.node(inode) is None:
                assert links == 0
                with pytest.raises(StaleVersion):
                    self.filesystem.open(inode)
        assert self.filesystem is None or self.filesystem.open_files == len(self.open_files)

    @invariant()
    def no_generation_is_kept_for_nothing(self) -> None:
        if self.filesystem is not None:
            wanted = {listing.generation for listing in self.listings}
            assert self.filesystem._listings.generations <= len(wanted)


pytestmark = pytest.mark.skipif(no_openat2(), reason="this kernel (or a seccomp filter) has no openat2 to compare with")


def test_the_tree_is_the_directory_it_was_published_from() -> None:
    run_short(TreeMachine, examples=40, steps=30)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_tree_is_the_directory_it_was_published_from_on_long_walks() -> None:
    run_long(TreeMachine, steps=60)
