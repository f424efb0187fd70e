"""The file system without FUSE: names, attributes, open files, over the newest catalog.

Called by fuse/operations (by inode number) and by the control interface (by path). An open file keeps the version it
opened; a new open of a superseded version is answered StaleVersion, which makes the kernel look the path up again.

Handles say by themselves what they are, since the kernel keeps them while one daemon follows another: that of a file
is its inode number, that of a directory see listings.py. A handle of an earlier daemon is adopted: from the newest
generation, or from what was kept of the versions that were open when their generation was superseded.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping

from tierfs.blocks.errors import NameTooLong, NotFound, StaleVersion
from tierfs.blocks.ids import ContentId, VersionId
from tierfs.cache.block_cache import BlockCache, FileFacts
from tierfs.cache.memory import BlockKey
from tierfs.cache.prefetcher import Prefetcher
from tierfs.catalog.schema import NAME_LIMIT_BYTES, Entry, Kind
from tierfs.catalog.superseded import Superseded
from tierfs.formats.shards import following_shard
from tierfs.fs.file_view import FileView
from tierfs.fs.inodes import Inodes
from tierfs.fs.listings import Listings
from tierfs.fs.tree import PATH_MAX_BYTES, Node, Tree
from tierfs.policy.readahead import Readahead, ReadaheadConfig

log = logging.getLogger(__name__)

_EXPECTED_FILES = 64
_FOLLOWED_FILES = (
    4  # at once: a window may reach over thousands of small numbered files, and each read would walk them all
)


class Filesystem:
    """All state of the mount but the cache's.

    ``superseded``: what an earlier daemon kept of versions that may still be open.
    """

    def __init__(
        self,
        tree: Tree,
        *,
        inodes: Inodes,
        cache: BlockCache,
        prefetcher: Prefetcher,
        readahead: ReadaheadConfig,
        request_timeout_s: float,
        superseded: Iterable[Superseded] = (),
        on_open: Callable[[FileFacts], None] = lambda file: None,
    ) -> None:
        self.tree = tree
        self.inodes = inodes
        self.cache = cache
        self._prefetcher = prefetcher
        self._readahead = readahead
        self._request_timeout_s = request_timeout_s
        self._on_open = on_open
        self._views: dict[int, FileView] = {}  # by inode number
        self._superseded = {record.inode: record for record in superseded}
        self._listings = Listings()
        self._expected: OrderedDict[int, Readahead] = OrderedDict()  # of files a loader will open next
        cache.memory.on_wasted = self._wasted
        # Version -> a symlink that leads to it (hub cache: the snapshot's name of a blob); built on first use.
        self._linked_names: dict[bytes, Node] | None = None
        cache.learn({VersionId(r.version): ContentId(r.content) for r in self._superseded.values() if r.content})

    def configure(self, readahead: ReadaheadConfig, *, request_timeout_s: float) -> None:
        """Other settings: readahead's for files opened from now on, the deadline for all requests from now on."""
        self._readahead = readahead
        self._request_timeout_s = request_timeout_s
        for view in self._views.values():
            view.request_timeout_s = request_timeout_s

    def superseded_by(self, tree: Tree) -> list[Superseded]:
        """What must be kept of open versions that the tree lacks, before it is put in place."""
        records = {inode: record for inode, record in self._superseded.items() if tree.node(inode) is None}
        for inode, view in self._views.items():
            if tree.node(inode) is None:
                records[inode] = self._record(inode, view.facts, view.entry)
        return list(records.values())

    def superseded_since(self, before: Tree, inodes: Iterable[int]) -> list[Superseded]:
        """As superseded_by, of a change that no daemon followed: what a tree of an earlier daemon has of these inodes
        and the newest one lacks. They count as kept from now on.
        """
        for inode in inodes:
            node = before.node(inode)
            if node is not None and node.entry.kind is Kind.FILE and self.tree.node(inode) is None:
                self._superseded[inode] = self._record(inode, before.facts(node), node.entry)
        return self.superseded_by(self.tree)

    def replace(self, tree: Tree) -> None:
        """A new generation; what is open stays as it is. See superseded_by."""
        self._superseded = {record.inode: record for record in self.superseded_by(tree)}
        log.info("generation number=%d entries=%d", tree.catalog.generation, len(tree.catalog.entries))
        self.tree = tree
        self._linked_names = None

    # -- names and attributes, by inode number ------------------------------------------------------------------

    def lookup(self, directory: int, name: bytes) -> Node:
        """The node of that name. Raises NotFound, NameTooLong."""
        if len(name) > NAME_LIMIT_BYTES:
            raise NameTooLong(f"a name of {len(name)} bytes; there is none of more than {NAME_LIMIT_BYTES}")
        if name == b".":
            return self.node(directory)
        if name == b"..":
            return self.tree.parent(self.node(directory))
        node = self.tree.child(directory, name)
        if node is None:
            raise NotFound(f"no such name {name!r} in this generation")
        return node

    def node(self, inode: int) -> Node:
        """The node with that number in the newest generation. Raises StaleVersion."""
        node = self.tree.node(inode)
        if node is None:
            raise StaleVersion(f"inode {inode} is not in generation {self.tree.catalog.generation}")
        return node

    def attributes(self, inode: int) -> tuple[Node, int]:
        """A node and its link count; an open file answers from its view when the tree has moved on."""
        node = self.tree.node(inode)
        if node is not None:
            return node, self.tree.links(node)
        view = self._views.get(inode)
        if view is not None:
            return Node(inode, -1, view.entry), 0
        record = self._superseded.get(inode)
        if record is not None:
            return Node(inode, -1, _entry(record)), 0
        raise StaleVersion(f"inode {inode} is not in generation {self.tree.catalog.generation}")

    # -- open files and directories --------------------------------------------------------------------------------

    def open(self, inode: int) -> FileView:
        """Open a version for reading. Raises StaleVersion when it is not the newest one at its path."""
        node = self.node(inode)
        view = self._views.get(inode) or self._view_of(node)
        view.opens += 1
        self._on_open(view.facts)
        return view

    def view(self, inode: int) -> FileView:
        """The view of a handle; one of an earlier daemon is adopted. Raises StaleVersion where it is not known."""
        return self._views.get(inode) or self._adopted(inode, 1)

    def adopt(self, inode: int, opens: int) -> None:
        """So many handles of an earlier daemon are open. Of an inode known nowhere nothing is (reads: StaleVersion)."""
        if opens <= 0:
            return
        try:
            self._adopted(inode, opens)
        except StaleVersion:
            log.warning("open_version_not_known inode=%d handles=%d: its reads fail with ESTALE", inode, opens)

    def adopt_all(self, handles: Mapping[int, int]) -> None:
        """All handles of an earlier daemon that are open, by inode. What else was kept is open no longer."""
        for inode, opens in handles.items():
            self.adopt(inode, opens)
        self._superseded = {inode: record for inode, record in self._superseded.items() if inode in self._views}

    def close(self, inode: int) -> None:
        """One handle fewer; the last one lets the view go. A handle that is not known is nothing to close."""
        view = self._views.get(inode)
        if view is None:
            return
        view.opens -= 1
        if view.opens == 0:
            del self._views[inode]
            self._superseded.pop(inode, None)
            self._prefetcher.forget(view.facts)
            self.cache.closed(view.facts.version)

    def _adopted(self, inode: int, opens: int) -> FileView:
        view = self._views.get(inode)
        if view is None:
            node = self.tree.node(inode)
            record = self._superseded.get(inode)
            if node is not None and node.entry.kind is Kind.FILE:
                view = self._view_of(node)
            elif record is not None:
                # There is no tree to go on in.
                view = self._new_view(inode, _facts(record), _entry(record), lambda window_bytes: None)
            else:
                raise StaleVersion(f"inode {inode} is open, but in no generation that is known here")
        view.opens = max(view.opens, opens)
        return view

    def _view_of(self, node: Node) -> FileView:
        tree = self.tree
        return self._new_view(
            node.inode, tree.facts(node), node.entry, lambda window_bytes: self._go_on(tree, node, window_bytes)
        )

    def _new_view(self, inode: int, facts: FileFacts, entry: Entry, go_on: Callable[[int], None]) -> FileView:
        """A view that nobody counts yet."""
        view = self._views[inode] = FileView(
            facts,
            entry,
            cache=self.cache,
            prefetcher=self._prefetcher,
            request_timeout_s=self._request_timeout_s,
            readahead=self._expected.pop(inode) if inode in self._expected else self._new_readahead(facts),
            go_on=go_on,
        )
        self.cache.opened(facts.version)
        return view

    def _record(self, inode: int, facts: FileFacts, entry: Entry) -> Superseded:
        key = bytes(self.cache.key(facts.version))
        return Superseded(
            inode=inode,
            version=facts.version,
            content=b"" if key == facts.version else key,
            path=facts.path,
            size_bytes=facts.size_bytes,
            mode=entry.mode,
            mtime_ns=entry.mtime_ns,
            links=entry.links,
            model=facts.model,
            model_bytes=facts.model_bytes,
        )

    def open_versions(self) -> set[VersionId]:
        """The versions that are open, or may be."""
        kept = {VersionId(record.version) for record in self._superseded.values()}
        return kept | {view.facts.version for view in self._views.values()}

    @property
    def open_files(self) -> int:
        """How many versions are open."""
        return len(self._views)

    def open_directory(self, inode: int) -> int:
        """A handle for a stable listing."""
        node = self.node(inode)
        assert node.entry.kind is Kind.DIRECTORY
        return self._listings.open(self.tree, node)

    def expect_listings(self, trees: Iterable[Tree]) -> None:
        """Listings of an earlier daemon may be of the newest generation or of these, until another call."""
        self._listings.expect(trees)

    def entries(self, handle: int, start: int) -> Iterator[tuple[bytes, Node, int]]:
        """Name, node and link count from a position on; the two dots come first.

        Raises StaleVersion for a handle of an earlier daemon on a generation that is not here.
        """
        tree, directory = self._listings.find(handle, self.tree)
        for name, node in ((b".", directory), (b"..", tree.parent(directory)))[start:]:
            yield name, node, tree.links(node)
        for node in tree.children(directory.inode, max(0, start - 2)):
            yield node.entry.name, node, tree.links(node)

    def close_directory(self, handle: int) -> None:
        """The listing is over. A handle that is not known is nothing to close."""
        self._listings.close(handle)

    # -- by path, for the control interface ------------------------------------------------------------------------

    def resolve(self, path: bytes) -> Node:
        """The node at a path relative to the mountpoint. Raises NotFound, NameTooLong."""
        if len(path) >= PATH_MAX_BYTES:
            raise NameTooLong(f"a path of {len(path)} bytes; none of the mount has more than {PATH_MAX_BYTES - 1}")
        node = self.tree.resolve(path)
        if node is None:
            raise NotFound(f"no such path: {path.decode('utf-8', 'backslashreplace')}")
        return node

    def files_below(self, path: bytes) -> list[FileFacts]:
        """All files at or below a path, each version once. Raises NotFound, NameTooLong."""
        return [self.tree.facts(node) for node in self.tree.files_below(self.resolve(path))]

    def files_of_model(self, model: bytes) -> list[FileFacts]:
        """All files of one model, each version once. Raises NotFound."""
        node = self.tree.resolve(model)
        if node is None:  # or its path is longer than one can be asked for
            raise NotFound(f"no such path: {model.decode('utf-8', 'backslashreplace')}")
        files = (self.tree.facts(file) for file in self.tree.files_below(node))
        return [file for file in files if file.model == model]

    # -- readahead across files -----------------------------------------------------------------------------------

    def _new_readahead(self, facts: FileFacts) -> Readahead:
        return Readahead(self._readahead, size_bytes=facts.size_bytes, block_bytes=self.cache.block_bytes)

    def _go_on(self, tree: Tree, node: Node, window_bytes: int) -> None:
        """A stream's window reaches that far beyond the end of a file: into the shards that follow it."""
        for _ in range(_FOLLOWED_FILES):
            if window_bytes <= 0:
                return
            following = self._following(tree, node)
            if following is None:
                return
            node = following
            facts = tree.facts(node)
            view = self._views.get(node.inode)
            readahead = view.readahead if view is not None else self._expected.get(node.inode)
            if readahead is None:
                readahead = self._expected[node.inode] = self._new_readahead(facts)
                if len(self._expected) > _EXPECTED_FILES:
                    self._expected.popitem(last=False)
            plan = readahead.expect(window_bytes)
            if plan.blocks:
                dropped = self._prefetcher.plan(facts, plan.blocks)
                if dropped is not None:
                    readahead.replan(dropped)
            window_bytes = plan.next_file_bytes

    def _wasted(self, key: BlockKey) -> None:
        """A prefetched block was dropped unread: the window of its file is too long for the memory there is."""
        for view in self._views.values():
            if self.cache.key(view.facts.version) == key[0]:
                view.readahead.wasted(range(key[1], key[1] + 1))

    def _following(self, tree: Tree, node: Node) -> Node | None:
        name_node = node
        name = following_shard(node.entry.name, tree.siblings(node).keys())
        if name is None:
            # A blob of a hub cache: its own name says nothing, the symlink's name in the snapshot does.
            link = self._links(tree).get(node.entry.version)
            if link is None:
                return None
            name_node = link
            name = following_shard(link.entry.name, tree.siblings(link).keys())
        if name is None:
            return None
        found = tree.at(tree.siblings(name_node)[name])
        if found.entry.kind is Kind.SYMLINK:
            target = tree.follow(found)
            if target is None:
                return None
            found = target
        return found if found.entry.kind is Kind.FILE else None

    def _links(self, tree: Tree) -> dict[bytes, Node]:
        if tree is not self.tree:
            return {}
        if self._linked_names is None:
            self._linked_names = {}
            for index, entry in enumerate(tree.catalog.entries):
                if entry.kind is Kind.SYMLINK:
                    target = tree.follow(tree.at(index))
                    if target is not None and target.entry.kind is Kind.FILE:
                        self._linked_names[target.entry.version] = tree.at(index)
        return self._linked_names


def _facts(record: Superseded) -> FileFacts:
    return FileFacts(VersionId(record.version), record.size_bytes, record.path, record.model, record.model_bytes)


def _entry(record: Superseded) -> Entry:
    name = record.path.rpartition(b"/")[2]
    return Entry(
        0, name, Kind.FILE, record.mode, record.mtime_ns, record.size_bytes, record.version, links=record.links
    )
