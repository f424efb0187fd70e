"""Directory handles that say by themselves what they list, since a daemon may be replaced while the kernel keeps them.

    handle  =  the low 31 bits of the generation  |  the directory's position in that catalog, 32 bits

What must hold: a tree stays as long as a listing on it is open, so that the listing stays stable while generations
change. A handle of an earlier daemon counts from its first use on; the trees it may be of are kept for a while.
"""

from collections.abc import Iterable

from tierfs.blocks.errors import StaleVersion
from tierfs.catalog.schema import Kind
from tierfs.fs.tree import Node, Tree

_POSITION_BITS = 32
_POSITION_MASK = (1 << _POSITION_BITS) - 1
_GENERATION_MASK = (1 << 31) - 1


class Listings:
    """The open listings of a mount. ``Filesystem`` is the only caller."""

    def __init__(self) -> None:
        self._trees: dict[int, Tree] = {}  # by what a handle says of the generation: trees with open listings
        self._opens: dict[int, int] = {}  # by handle
        self._earlier: dict[int, Tree] = {}  # trees that listings of an earlier daemon may be of

    def expect(self, trees: Iterable[Tree]) -> None:
        """Listings of an earlier daemon may be of these trees, until another call."""
        self._earlier = {_name(tree): tree for tree in trees}

    def open(self, tree: Tree, directory: Node) -> int:
        """One more listing of that directory; its handle."""
        handle = _name(tree) << _POSITION_BITS | directory.position
        self._count(handle, tree)
        return handle

    def find(self, handle: int, newest: Tree) -> tuple[Tree, Node]:
        """The tree and the directory of a handle. Raises StaleVersion where its generation is not here (any more)."""
        tree = self._trees.get(handle >> _POSITION_BITS)
        if tree is None and handle >> _POSITION_BITS == _name(newest):
            tree = newest
        tree = tree or self._earlier.get(handle >> _POSITION_BITS)
        position = handle & _POSITION_MASK
        if tree is None or position >= len(tree.catalog.entries):
            raise StaleVersion(
                f"the listing is of a generation that is gone; now it is {newest.catalog.generation}: list again"
            )
        directory = tree.at(position)
        if directory.entry.kind is not Kind.DIRECTORY:
            raise StaleVersion(f"entry {position} of generation {tree.catalog.generation} is no directory")
        if handle not in self._opens:
            self._count(handle, tree)
        return tree, directory

    def close(self, handle: int) -> None:
        """One listing fewer; of a handle that is not known, nothing."""
        opens = self._opens.get(handle, 0)
        if opens > 1:
            self._opens[handle] = opens - 1
        elif opens:
            del self._opens[handle]
            name = handle >> _POSITION_BITS
            if all(other >> _POSITION_BITS != name for other in self._opens):
                del self._trees[name]

    @property
    def generations(self) -> int:
        """How many generations have open listings."""
        return len(self._trees)

    def _count(self, handle: int, tree: Tree) -> None:
        self._trees[_name(tree)] = tree
        self._opens[handle] = self._opens.get(handle, 0) + 1


def _name(tree: Tree) -> int:
    return tree.catalog.generation & _GENERATION_MASK
