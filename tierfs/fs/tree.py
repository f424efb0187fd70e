"""The tree of one catalog, indexed for lookups: by inode number, by name in a directory, by path.

Built once per generation, in a thread; immutable afterwards. Directory entries keep the catalog's order, so a readdir
cookie is a position in it.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tierfs.blocks.ids import VersionId
from tierfs.cache.block_cache import FileFacts
from tierfs.catalog.schema import Catalog, Entry, Kind
from tierfs.formats.models import model_path
from tierfs.fs.inodes import ROOT_INODE, Inodes

PATH_MAX_BYTES = 4096  # linux/limits.h, with the closing NUL
_SYMLINKS_MAX = 40  # MAXSYMLINKS of linux/namei.h


class Node(NamedTuple):
    """One entry with its inode number and its position in the catalog (-1: in an older one)."""

    inode: int
    position: int
    entry: Entry


class Tree:
    """See the head of this file."""

    def __init__(self, catalog: Catalog, inodes: Inodes) -> None:
        """Blocking. Raises ProtocolError where the entries cannot all have inode numbers."""
        self.catalog = catalog
        entries = catalog.entries
        self._inodes = [ROOT_INODE] * len(entries)
        self._by_inode: dict[int, int] = {ROOT_INODE: 0}
        self._children: dict[int, dict[bytes, int]] = {0: {}}
        self._order: dict[int, list[int]] = {0: []}  # the same in the catalog's order, for readdir
        self._paths: list[bytes] = [b""]
        self._model_bytes: dict[bytes, int] = {}
        self._subdirectories: dict[int, int] = {}
        self.total_bytes = 0
        taken: dict[int, bytes] = {}
        counted: set[bytes] = set()
        for index in range(1, len(entries)):
            entry = entries[index]
            above = self._paths[entry.parent]
            path = above + b"/" + entry.name if above else entry.name
            self._paths.append(path)
            self._children[entry.parent][entry.name] = index
            self._order[entry.parent].append(index)
            if entry.kind is Kind.FILE:
                identity = b"f" + entry.version
                if entry.version not in counted:
                    counted.add(entry.version)
                    self.total_bytes += entry.size_bytes
                    model = model_path(path)
                    self._model_bytes[model] = self._model_bytes.get(model, 0) + entry.size_bytes
            elif entry.kind is Kind.DIRECTORY:
                identity = b"d" + path
                self._children[index] = {}
                self._order[index] = []
                self._subdirectories[entry.parent] = self._subdirectories.get(entry.parent, 0) + 1
            else:
                identity = b"l" + path + b"\0" + entry.target
            inode = inodes.number(identity, taken)
            self._inodes[index] = inode
            self._by_inode.setdefault(inode, index)  # hard links share a number; the first path stands for it
        inodes.keep()

    def node(self, inode: int) -> Node | None:
        """The node with that number in this generation."""
        index = self._by_inode.get(inode)
        return None if index is None else self._node(index)

    def child(self, directory: int, name: bytes) -> Node | None:
        """The node of that name in the directory with that inode number."""
        index = self._by_inode.get(directory)
        child = self._children.get(index, {}).get(name) if index is not None else None
        return None if child is None else self._node(child)

    def children(self, directory: int, start: int) -> Iterator[Node]:
        """The nodes of a directory from position ``start`` on."""
        order = self._order[self._by_inode[directory]]
        for position in range(start, len(order)):
            yield self._node(order[position])

    def links(self, node: Node) -> int:
        """st_nlink: of a directory 2 and one for each subdirectory."""
        if node.entry.kind is Kind.DIRECTORY:
            return 2 + self._subdirectories.get(node.position, 0)
        return max(node.entry.links, 1)

    def parent(self, node: Node) -> Node:
        """The directory above (the root is its own)."""
        return self._node(node.entry.parent)

    def path(self, node: Node) -> bytes:
        """Path relative to the root, without a leading slash; the root is empty."""
        return self._paths[node.position]

    def siblings(self, node: Node) -> Mapping[bytes, int]:
        """Names in the node's directory, to positions in the catalog."""
        return self._children[node.entry.parent]

    def at(self, index: int) -> Node:
        """The node at a position of the catalog."""
        return self._node(index)

    def facts(self, node: Node) -> FileFacts:
        """What the cache must know of a file node."""
        path = self._paths[self._by_inode[node.inode]]
        model = model_path(path)
        return FileFacts(
            version=VersionId(node.entry.version),
            size_bytes=node.entry.size_bytes,
            path=path,
            model=model,
            model_bytes=self._model_bytes[model],
        )

    def resolve(self, path: bytes) -> Node | None:
        """The node at a path relative to the root, symlinks followed inside the tree, by the rules of
        path_resolution(7). None: not there, longer than a path can be, through too many symlinks, or outside.
        """
        return self._walk(self._node(0), path) if len(path) < PATH_MAX_BYTES else None

    def follow(self, node: Node) -> Node | None:
        """Where a symlink node leads to, likewise; any other node is where it leads to itself."""
        return self._walk(self.parent(node), node.entry.name) if node.entry.kind is Kind.SYMLINK else node

    def _walk(self, start: Node, path: bytes) -> Node | None:
        """What bounds it: the length of the path, and that of the targets of so many symlinks (see schema.check)."""
        node, links = start, 0
        ahead = _components(path)  # the next one last
        while ahead:
            name = ahead.pop()
            if node.entry.kind is not Kind.DIRECTORY:
                return None
            if name == b".":
                continue
            if name == b"..":
                if node.position == 0:
                    return None
                node = self.parent(node)
                continue
            found = self.child(node.inode, name)
            if found is None:
                return None
            if found.entry.kind is Kind.SYMLINK:
                links += 1
                if links > _SYMLINKS_MAX or found.entry.target.startswith(b"/"):
                    return None
                ahead += _components(found.entry.target)
                continue
            node = found
        return node

    def files_below(self, node: Node) -> Iterator[Node]:
        """All file nodes at or below a node, each version once; symlinks are followed to files inside the tree."""
        seen: set[bytes] = set()
        pending = [node]
        while pending:
            current = pending.pop()
            if current.entry.kind is Kind.SYMLINK:
                target = self.follow(current)
                if target is None or target.entry.kind is not Kind.FILE:
                    continue
                current = target
            if current.entry.kind is Kind.DIRECTORY:
                pending.extend(self._node(index) for index in reversed(self._children[current.position].values()))
            elif current.entry.version not in seen:
                seen.add(current.entry.version)
                yield current

    def _node(self, index: int) -> Node:
        return Node(self._inodes[index], index, self.catalog.entries[index])


def _components(path: bytes) -> list[bytes]:
    """From the last to the first; a slash at the end asks for a directory."""
    found = [part for part in path.split(b"/") if part]
    if path.endswith(b"/"):
        found.append(b".")
    found.reverse()
    return found
