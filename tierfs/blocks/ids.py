"""Identities and digests. All are 16 bytes of xxh3_128.

version id   what a scanned file is known as at once: a hash of where it was found and of its stat.
content id   what a file *is*: a hash of its block digests and its size.
object key   names an object in a local tier: a content id, or a version id while the content id is not known.
"""

import struct
from typing import NewType

import xxhash

VersionId = NewType("VersionId", bytes)
ContentId = NewType("ContentId", bytes)
ObjectKey = NewType("ObjectKey", bytes)
BlockDigest = NewType("BlockDigest", bytes)

ID_BYTES = 16


def digest_block(data: bytes | bytearray | memoryview) -> BlockDigest:
    """xxh3_128 of one block's bytes. Releases the GIL for large buffers."""
    return BlockDigest(xxhash.xxh3_128_digest(data))


def content_id(block_digests: bytes | bytearray, size_bytes: int) -> ContentId:
    """The content id of a file: its block digests, concatenated in order, and its size."""
    return ContentId(xxhash.xxh3_128_digest(bytes(block_digests) + struct.pack("<Q", size_bytes)))


def version_id(*, export: str, path: bytes, inode: int, size_bytes: int, mtime_ns: int, ctime_ns: int) -> VersionId:
    """The version id of a scanned file.

    ``path`` is the first path of its hard-link group, relative to the export. No device number goes in:
    those change across reboots, and warm content must stay warm.
    """
    stat = struct.pack("<QQqq", inode, size_bytes, mtime_ns, ctime_ns)
    name = export.encode("utf-8", "surrogateescape")
    return VersionId(xxhash.xxh3_128_digest(struct.pack("<II", len(name), len(path)) + name + path + stat))
