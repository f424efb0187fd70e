"""Makes the bytes that are read: one large file of incompressible data, and a directory of many small files.

Called by main.py once per run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy
import xxhash

LARGE_NAME = "model.safetensors"
# Read after the large file where a daemon's own memory is to be rid of it; must be larger than that memory.
CHASER_NAME = "chaser/zeros.bin"
CHASER_BYTES = 512 << 20
SMALL_FILE_BYTES = 4096
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class LargeFile:
    """The file on the plain file system, and what every reader of it has to find."""

    path: Path
    size_bytes: int
    digest: str
    word_sum: str


def make_large(directory: Path, *, size_bytes: int, seed: int) -> LargeFile:
    """Write the large file and sync it. The content depends on the seed and the size alone."""
    generator = numpy.random.Generator(numpy.random.SFC64(seed))
    hasher, total, path = xxhash.xxh3_128(), 0, directory / LARGE_NAME
    with path.open("wb", buffering=0) as file:
        for start in range(0, size_bytes, _CHUNK_BYTES):
            chunk = generator.bytes(min(_CHUNK_BYTES, size_bytes - start))
            file.write(chunk)
            hasher.update(chunk)
            total += int(numpy.frombuffer(chunk, dtype=numpy.uint64).sum(dtype=numpy.uint64))
        os.fsync(file.fileno())
    return LargeFile(path, size_bytes, hasher.hexdigest(), f"{total % 2**64:016x}")


def make_chaser(directory: Path) -> None:
    """The chaser: a hole, which takes no room on the disk."""
    path = directory / CHASER_NAME
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(CHASER_BYTES)


def small_name(index: int) -> str:
    """The name of a small file."""
    return f"shard-{index:06d}.bin"


def make_small(directory: Path, *, count: int) -> None:
    """`count` small files: sparse, since only their names and attributes are looked at."""
    for index in range(count):
        descriptor = os.open(directory / small_name(index), os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644)
        os.ftruncate(descriptor, SMALL_FILE_BYTES)
        os.close(descriptor)
