"""The catalog: the tree of an export at one generation. Immutable; an export moves from one to the next atomically.

A catalog lists entries so that a parent always comes before its children; entry 0 is the root, whose ``parent`` is 0
and whose name is empty. Names are bytes as the source's file system has them. Hard links are entries that share a
version. Content ids are no part of it: they arrive later (see Publication).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

import msgspec
import xxhash

from tierfs.blocks.errors import ProtocolError
from tierfs.blocks.ids import ContentId, VersionId

ENTRIES_LIMIT = 5_000_000
PATHS_LIMIT_BYTES = 1 << 30  # of all paths together: a chain of directories has more of them than its catalog has bytes
NAME_LIMIT_BYTES = 255  # NAME_MAX of linux/limits.h
SIZE_LIMIT_BYTES = 1 << 48  # of a file: beyond, the lists of its blocks would not fit into memory
MTIME_END_NS = 1 << 63  # and from -MTIME_END_NS on; file systems can hold others


class Kind(IntEnum):
    """What an entry is."""

    DIRECTORY = 0
    FILE = 1
    SYMLINK = 2


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One name in the tree."""

    parent: int
    name: bytes
    kind: Kind
    mode: int  # permission bits only, 0o7777
    mtime_ns: int
    size_bytes: int = 0  # of a file; of a symlink the length of its target
    version: bytes = b""  # 16 bytes for a file, else empty
    target: bytes = b""  # of a symlink
    links: int = 1  # hard links of a file inside the export


class Catalog(msgspec.Struct, frozen=True, array_like=True):
    """The tree of one export at one generation. ``block_bytes`` is the export's one block size."""

    export: str
    generation: int
    block_bytes: int
    entries: Annotated[list[Entry], msgspec.Meta(max_length=ENTRIES_LIMIT)]


@dataclass(frozen=True)
class Publication:
    """What a source says now: a catalog, and the content ids known so far.

    ``revision`` grows with every change of either, within one life of the source; ``contents`` only grows while the
    catalog stays the same. Treat both as immutable.
    """

    catalog: Catalog
    contents: Mapping[VersionId, ContentId]
    revision: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Catalog)


def encode(catalog: Catalog) -> bytes:
    """The catalog as bytes, for the wire and for the state directories."""
    return _encoder.encode(catalog)


def decode(data: bytes | memoryview) -> Catalog:
    """The catalog in these bytes. Raises ProtocolError when they are not one, or break its rules."""
    try:
        catalog = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a catalog: {error}") from error
    check(catalog)
    return catalog


def catalog_digest(encoded: bytes | memoryview) -> bytes:
    """16 bytes that name an encoded catalog."""
    return xxhash.xxh3_128_digest(encoded)


def check(catalog: Catalog) -> None:
    """Raise ProtocolError unless the catalog is a tree of sound names (a hostile server may have sent it)."""
    if not 4096 <= catalog.block_bytes <= 64 << 20 or catalog.block_bytes % 4096:
        raise ProtocolError(f"catalog has an unusable block size of {catalog.block_bytes} bytes")
    if not 0 <= catalog.generation < 1 << 62:
        raise ProtocolError(f"catalog has an unusable generation {catalog.generation}")
    entries = catalog.entries
    if not entries or entries[0].kind is not Kind.DIRECTORY or entries[0].name or entries[0].parent:
        raise ProtocolError("catalog has no root")
    seen: set[tuple[int, bytes]] = set()
    sizes: dict[bytes, int] = {}
    path_bytes = [0] * len(entries)
    paths_bytes = 0
    for index, entry in enumerate(entries):
        _check_attributes(index, entry)
        if index == 0:
            continue
        name = entry.name
        if not 0 <= entry.parent < index or entries[entry.parent].kind is not Kind.DIRECTORY:
            raise ProtocolError(f"catalog entry {index} has no directory above it")
        if not 0 < len(name) <= NAME_LIMIT_BYTES or name in (b".", b"..") or b"/" in name or b"\0" in name:
            raise ProtocolError(f"catalog entry {index} has an unusable name {name!r}")
        if (entry.parent, name) in seen:
            raise ProtocolError(f"catalog entry {index} repeats the name {name!r}")
        seen.add((entry.parent, name))
        path_bytes[index] = path_bytes[entry.parent] + 1 + len(name)
        paths_bytes += path_bytes[index]
        if paths_bytes > PATHS_LIMIT_BYTES:
            raise ProtocolError(f"the paths of the catalog have more than {PATHS_LIMIT_BYTES} bytes together")
        if entry.kind is Kind.FILE and sizes.setdefault(entry.version, entry.size_bytes) != entry.size_bytes:
            raise ProtocolError(f"catalog entry {index} gives a version another size")


def _check_attributes(index: int, entry: Entry) -> None:
    if entry.kind is Kind.FILE and (len(entry.version) != 16 or not 0 <= entry.size_bytes < SIZE_LIMIT_BYTES):
        raise ProtocolError(f"catalog entry {index} has an unusable version or size")
    if entry.kind is not Kind.FILE and (entry.version or not 0 <= entry.size_bytes < SIZE_LIMIT_BYTES):
        raise ProtocolError(f"catalog entry {index} is no file, and has a version or an unusable size")
    if entry.kind is Kind.SYMLINK and (not 0 < len(entry.target) < 4096 or b"\0" in entry.target):
        raise ProtocolError(f"catalog entry {index} has an unusable symlink target")
    sound = 0 <= entry.mode <= 0o7777 and -MTIME_END_NS <= entry.mtime_ns < MTIME_END_NS
    if not sound or not 0 <= entry.links < 1 << 31:
        raise ProtocolError(f"catalog entry {index} has an unusable mode, time or count of links")
