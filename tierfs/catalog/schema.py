"""The catalog: the tree of an export at one generation. Immutable; an export moves from one to the next atomically.

A catalog lists entries so that a parent always comes before its children; entry 0 is the root, whose ``parent`` is 0
and whose name is empty. Names are bytes as the source's file system has them. Hard links are entries that share a
version. Content ids are no part of it: they arrive later (see Publication).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import msgspec
import xxhash

from tierfs.blocks.errors import ProtocolError
from tierfs.blocks.ids import ContentId, VersionId


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
    entries: list[Entry]


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
    entries = catalog.entries
    if not entries or entries[0].kind is not Kind.DIRECTORY or entries[0].name:
        raise ProtocolError("catalog has no root")
    seen: set[tuple[int, bytes]] = set()
    for index, entry in enumerate(entries[1:], start=1):
        name = entry.name
        if not 0 <= entry.parent < index or entries[entry.parent].kind is not Kind.DIRECTORY:
            raise ProtocolError(f"catalog entry {index} has no directory above it")
        if not 0 < len(name) <= 255 or name in (b".", b"..") or b"/" in name or b"\0" in name:
            raise ProtocolError(f"catalog entry {index} has an unusable name {name!r}")
        if (entry.parent, name) in seen:
            raise ProtocolError(f"catalog entry {index} repeats the name {name!r}")
        seen.add((entry.parent, name))
        if entry.kind is Kind.FILE and (len(entry.version) != 16 or not 0 <= entry.size_bytes < 1 << 62):
            raise ProtocolError(f"catalog entry {index} has an unusable version or size")
        if entry.kind is Kind.SYMLINK and not 0 < len(entry.target) < 4096:
            raise ProtocolError(f"catalog entry {index} has an unusable symlink target")
