"""Scan a directory tree into catalog entries, as the tree was at one instant.

Called by the directory source in a thread; blocking, without state, and it opens directories only.

A listing is not atomic, and a tree is many listings. A publisher who renames the shards first and the index last must
never be seen with the index and without a shard. So after all listings every directory is looked at again:

    list all ── look again at all ──┬── none has changed ──> steady: at one instant all listings were true
                    ^               │
                    └── list again what has changed, at most ROUNDS times

A change shows as another mtime or ctime, but these come from a clock that ticks: a directory that changed within the
last tick when its listing began may change again without a trace, so it counts as changed (``TICK_NS``).
"""

import errno
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from tierfs.blocks.errors import SourceUnavailable
from tierfs.blocks.ids import VersionId, version_id
from tierfs.catalog.beneath import open_directory_beneath
from tierfs.catalog.schema import (
    ENTRIES_LIMIT,
    MTIME_END_NS,
    NAME_LIMIT_BYTES,
    PATHS_LIMIT_BYTES,
    SIZE_LIMIT_BYTES,
    Entry,
    Kind,
)

TICK_NS = 20_000_000  # the kernel stamps files from a clock of 1 to 10 ms; twice that
ROUNDS = 20
MAXIMUM_ENTRIES = ENTRIES_LIMIT - 1  # and the root
_CHECK_EVERY = 4096  # entries between two looks at the limits within one directory


class FileFacts(msgspec.Struct, frozen=True, gc=False):
    """What is needed to open a version again and to see whether it is still the same."""

    path: bytes  # first path of its hard-link group, relative to the root
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True)
class Scan:
    """A tree as it was found.

    ``steady`` is False when the tree kept changing during every round: then the entries may never have existed
    together and must not be published.
    """

    entries: list[Entry]
    files: dict[VersionId, FileFacts]
    steady: bool
    skipped: dict[str, int]  # kind of thing -> how many were left out
    unreadable: dict[bytes, str]  # path -> why it was left out
    settles_at_ns: int | None  # when the next file kept out by ``settle_s`` will have settled (time.time_ns)


def scan_tree(
    root_fd: int,
    *,
    export: str,
    settle_s: float = 0.0,
    maximum_entries: int = MAXIMUM_ENTRIES,
    checkpoint: Callable[[], None] = lambda: None,
) -> Scan:
    """Scan the tree beneath ``root_fd`` (from open_root).

    Files and symlinks whose ctime or mtime is younger than ``settle_s`` are kept out. ``checkpoint`` is called at
    least once per directory and stops the scan by raising. Raises SourceUnavailable when the root or a part of the
    tree cannot be read (other than for lack of permission), or when it has more than ``maximum_entries``.
    """
    scanner = _Scanner(root_fd, maximum_entries, checkpoint)
    now_ns = time.time_ns()
    try:
        steady = scanner.scan()
    except OSError as error:
        raise SourceUnavailable(f"export {export!r} cannot be scanned: {error}") from error
    return _Builder(scanner, export, now_ns, int(settle_s * 1e9)).build(steady)


class _Node(msgspec.Struct, frozen=True, gc=False):
    """One name in a directory, with the stat that was found."""

    name: bytes
    kind: Kind
    mode: int
    inode: int
    device: int
    links: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    target: bytes


@dataclass(slots=True)
class _Listing:
    """One directory as it was listed."""

    inode: int
    mode: int
    mtime_ns: int
    ctime_ns: int
    unsure: bool  # it changed within the last tick before it was listed
    unsure_files: bool = False  # a file in it did
    nodes: list[_Node] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    unreadable: dict[bytes, str] = field(default_factory=dict)

    def skip(self, kind: str) -> None:
        self.skipped[kind] = self.skipped.get(kind, 0) + 1


def _join(path: bytes, name: bytes) -> bytes:
    return path + b"/" + name if path else name


def _readable_by_mode() -> Callable[[os.stat_result], bool]:
    """A cheap test by the mode bits; a No must still be confirmed (there are ACLs and capabilities)."""
    user = os.geteuid()
    groups = {os.getegid(), *os.getgroups()}

    def readable(found: os.stat_result) -> bool:
        if user == 0:
            return True
        if found.st_uid == user:
            return bool(found.st_mode & 0o400)
        return bool(found.st_mode & (0o040 if found.st_gid in groups else 0o004))

    return readable


class _Scanner:
    """The listings of one scan, and the rounds that make them agree."""

    def __init__(self, root_fd: int, maximum_entries: int, checkpoint: Callable[[], None]) -> None:
        self.listings: dict[bytes, _Listing] = {}
        self.unreadable: dict[bytes, str] = {}  # directories
        self._root_fd = root_fd
        self._device = os.fstat(root_fd).st_dev
        self._maximum_entries = maximum_entries
        self._checkpoint = checkpoint
        self._maximum_paths_bytes = PATHS_LIMIT_BYTES
        self._total = 0
        self._paths_bytes = 0
        self._readable = _readable_by_mode()

    def scan(self) -> bool:
        """List everything; True when the listings were all true at one instant."""
        self._list_all([b""])
        for number in range(ROUNDS):
            changed = self._changed(unsure_files=number == 0)
            if not changed:
                return True
            self._wait_for_tick(changed)
            self._list_all(changed)
        return not self._changed(unsure_files=False)

    def reachable(self) -> Iterator[tuple[bytes, _Listing]]:
        """Every listed directory under the root with its path; a parent comes before its children."""
        queue = deque([b""])
        while queue:
            path = queue.popleft()
            listing = self.listings.get(path)
            if listing is None:
                continue
            yield path, listing
            queue.extend(_join(path, node.name) for node in listing.nodes if node.kind is Kind.DIRECTORY)

    def _changed(self, *, unsure_files: bool) -> list[bytes]:
        changed = []
        for path, listing in self.reachable():
            self._checkpoint()
            if listing.unsure or (unsure_files and listing.unsure_files):
                changed.append(path)
                continue
            try:
                fd = open_directory_beneath(self._root_fd, path, look_only=True)
            except OSError:
                changed.append(path)  # listing it again tells why
                continue
            try:
                found = os.fstat(fd)
            finally:
                os.close(fd)
            before = (listing.inode, listing.mtime_ns, listing.ctime_ns, listing.mode)
            if (found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_mode) != before:
                changed.append(path)
        return changed

    def _wait_for_tick(self, changed: list[bytes]) -> None:
        """Listing a directory again within the same tick would only be unsure again."""
        if any(self.listings[path].unsure or self.listings[path].unsure_files for path in changed):
            time.sleep(TICK_NS * 1.1e-9)

    def _list_all(self, paths: list[bytes]) -> None:
        """List these directories, and those below them that are not known yet."""
        stack = list(reversed(paths))
        while stack:
            path = stack.pop()
            self._checkpoint()
            old = self.listings.pop(path, None)
            if old is not None:
                self._total -= len(old.nodes)
                self._paths_bytes -= _paths_bytes(path, old)
            self.unreadable.pop(path, None)
            listing = self._list(path)
            if listing is None:
                continue
            self.listings[path] = listing
            self._total += len(listing.nodes)
            self._paths_bytes += _paths_bytes(path, listing)
            if self._paths_bytes > self._maximum_paths_bytes:
                raise SourceUnavailable(
                    f"the paths of the export have more than {self._maximum_paths_bytes} bytes together;"
                    " export a smaller directory, or several"
                )
            for node in listing.nodes:
                if node.kind is Kind.DIRECTORY:
                    child = _join(path, node.name)
                    known = self.listings.get(child)
                    if known is None or known.inode != node.inode:
                        stack.append(child)

    def _list(self, path: bytes) -> _Listing | None:
        """List one directory; None when it is gone or may not be read."""
        began_ns = time.time_ns()
        try:
            fd = open_directory_beneath(self._root_fd, path)
        except PermissionError as error:
            if not path:
                raise
            self.unreadable[path] = str(error.strerror)
            return None
        except OSError as error:
            if not path or error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            return None  # gone, or another kind of thing by now; its parent has changed then
        try:
            found = os.fstat(fd)
            listing = _Listing(
                found.st_ino,
                found.st_mode,
                found.st_mtime_ns,
                found.st_ctime_ns,
                unsure=abs(began_ns - found.st_ctime_ns) < TICK_NS,
            )
            self._fill(fd, path, listing)
        finally:
            os.close(fd)
        return listing

    def _fill(self, fd: int, path: bytes, listing: _Listing) -> None:
        nodes = listing.nodes
        readable = self._readable
        with os.scandir(fd) as names:
            for item in names:
                name = os.fsencode(item.name)
                try:
                    found = item.stat(follow_symlinks=False)
                    mode = found.st_mode
                    target = b""
                    if stat.S_ISREG(mode):
                        kind = Kind.FILE
                        if not readable(found) and not os.access(name, os.R_OK, dir_fd=fd, effective_ids=True):
                            raise PermissionError(0, "no permission to read it")
                        if abs(time.time_ns() - found.st_ctime_ns) < TICK_NS:
                            listing.unsure_files = True
                        if found.st_size >= SIZE_LIMIT_BYTES:
                            raise PermissionError(0, f"it has {SIZE_LIMIT_BYTES} bytes or more")
                    elif stat.S_ISDIR(mode):
                        kind = Kind.DIRECTORY
                        if found.st_dev != self._device:
                            listing.skip("mount point")
                            continue
                    elif stat.S_ISLNK(mode):
                        kind = Kind.SYMLINK
                        target = os.readlink(name, dir_fd=fd)
                    else:
                        listing.skip("special file")
                        continue
                    dated = -MTIME_END_NS <= found.st_mtime_ns < MTIME_END_NS
                    if not dated and kind is not Kind.DIRECTORY:
                        raise PermissionError(0, "its time of modification is out of range")
                    if len(name) > NAME_LIMIT_BYTES:  # some file systems count characters
                        raise PermissionError(0, f"its name is longer than {NAME_LIMIT_BYTES} bytes")
                except FileNotFoundError:
                    continue  # renamed or removed meanwhile: the next look at this directory sees that it changed
                except PermissionError as error:
                    listing.unreadable[_join(path, name)] = str(error.strerror)
                    continue
                nodes.append(
                    _Node(
                        name,
                        kind,
                        mode & 0o7777,
                        found.st_ino,
                        found.st_dev,
                        found.st_nlink,
                        found.st_size,
                        found.st_mtime_ns,
                        found.st_ctime_ns,
                        target,
                    )
                )
                if len(nodes) % _CHECK_EVERY == 0:
                    self._checkpoint()
                    self._check_limit(len(nodes))
        self._check_limit(len(nodes))
        nodes.sort(key=_name_of)

    def _check_limit(self, more: int) -> None:
        if self._total + more > self._maximum_entries:
            raise SourceUnavailable(
                f"the export has more than {self._maximum_entries} entries; export a smaller directory, or several"
            )


def _paths_bytes(path: bytes, listing: _Listing) -> int:
    """Of the paths of a directory's entries, as the catalog counts them."""
    above = len(path) + 1 if path else 0
    return sum(above + 1 + len(node.name) for node in listing.nodes)


def _name_of(node: _Node) -> bytes:
    return node.name


def _directory(parent: int, name: bytes, listing: _Listing) -> Entry:
    mtime_ns = max(-MTIME_END_NS, min(listing.mtime_ns, MTIME_END_NS - 1))
    return Entry(parent, name, Kind.DIRECTORY, listing.mode & 0o7777, mtime_ns)


class _Builder:
    """Listings into entries: breadth first, so that the names of one directory lie together, in order."""

    def __init__(self, scanner: _Scanner, export: str, now_ns: int, settle_ns: int) -> None:
        self._scanner = scanner
        self._export = export
        self._now_ns = now_ns
        self._settle_ns = settle_ns
        self._settles_at_ns: int | None = None
        self._entries: list[Entry] = []
        self._files: dict[VersionId, FileFacts] = {}
        self._groups: dict[tuple[int, int], tuple[VersionId, _Node]] = {}

    def build(self, steady: bool) -> Scan:
        listings = self._scanner.listings
        links = self._count_links()
        skipped: dict[str, int] = {}
        unreadable = dict(self._scanner.unreadable)
        entries = self._entries
        root = listings[b""]
        entries.append(_directory(0, b"", root))
        queue: deque[tuple[int, bytes]] = deque([(0, b"")])
        while queue:
            parent, directory = queue.popleft()
            listing = listings[directory]
            unreadable.update(listing.unreadable)
            for kind, count in listing.skipped.items():
                skipped[kind] = skipped.get(kind, 0) + count
            for node in listing.nodes:
                if node.kind is Kind.DIRECTORY:
                    path = _join(directory, node.name)
                    below = listings.get(path)
                    if below is not None:
                        queue.append((len(entries), path))
                        entries.append(_directory(parent, node.name, below))
                elif not self._settled(node):
                    continue
                elif node.kind is Kind.FILE:
                    self._add_file(parent, directory, node, links)
                else:
                    target = node.target
                    entries.append(
                        Entry(parent, node.name, Kind.SYMLINK, node.mode, node.mtime_ns, len(target), target=target)
                    )
        if unreadable:
            skipped["unreadable"] = len(unreadable)
        return Scan(entries, self._files, steady, skipped, unreadable, self._settles_at_ns)

    def _add_file(self, parent: int, directory: bytes, node: _Node, links: dict[tuple[int, int], int]) -> None:
        group = (node.device, node.inode)
        known = self._groups.get(group) if node.links > 1 else None
        if known is not None:
            version, node_of_group = known
        else:
            node_of_group = node
            path = _join(directory, node.name)
            version = version_id(
                export=self._export,
                path=path,
                inode=node.inode,
                size_bytes=node.size_bytes,
                mtime_ns=node.mtime_ns,
                ctime_ns=node.ctime_ns,
            )
            self._files[version] = FileFacts(path, node.inode, node.size_bytes, node.mtime_ns, node.ctime_ns)
            if node.links > 1:
                self._groups[group] = (version, node)
        # All names of a group carry what its first name had: they are one file, looked at at slightly different times.
        self._entries.append(
            Entry(
                parent,
                node.name,
                Kind.FILE,
                node_of_group.mode,
                node_of_group.mtime_ns,
                node_of_group.size_bytes,
                version,
                b"",
                links[group] if node.links > 1 else 1,
            )
        )

    def _count_links(self) -> dict[tuple[int, int], int]:
        links: dict[tuple[int, int], int] = {}
        for _path, listing in self._scanner.reachable():
            for node in listing.nodes:
                if node.links > 1 and node.kind is Kind.FILE and self._settled(node):
                    group = (node.device, node.inode)
                    links[group] = links.get(group, 0) + 1
        return links

    def _settled(self, node: _Node) -> bool:
        """Whether it has been still for long enough. An mtime in the future was set by hand and says nothing."""
        if not self._settle_ns:
            return True
        newest_ns = node.ctime_ns
        if newest_ns < node.mtime_ns <= self._now_ns:
            newest_ns = node.mtime_ns
        settles_at_ns = newest_ns + self._settle_ns
        if settles_at_ns <= self._now_ns:
            return True
        if self._settles_at_ns is None or settles_at_ns < self._settles_at_ns:
            self._settles_at_ns = settles_at_ns
        return False
