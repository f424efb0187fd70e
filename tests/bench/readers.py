"""The readers: each in a process of its own, as a framework is; says "ready", reads when told, prints one line of JSON.

Called by workloads.py as ``python readers.py KIND PATH …``.  Importing is done before "ready", so what is timed is
open, read and close.  The readers do as little as they can beside reading, so that they are not what is measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
import mmap
import os
import random
import sys
import time
from pathlib import Path
from typing import TypedDict

import numpy
import xxhash

READ_BYTES = 4 << 20
RANDOM_READ_BYTES = 4 << 10
LIBRARIES = {"safetensors": "safetensors", "llama": "xllamacpp"}


class Reading(TypedDict):
    """What one reader prints. Times are CLOCK_MONOTONIC, the same clock in every process; ``cpu_s`` is its own."""

    start_s: float
    end_s: float
    cpu_s: float
    bytes: int
    reads: int
    checksum: str


class Clock:
    """Runs from when it is made until `reading`."""

    def __init__(self) -> None:
        self._cpu_before_s = time.process_time()
        self._start_s = time.monotonic()

    def reading(self, *, size_bytes: int, reads: int = 0) -> Reading:
        """What a reader that has just finished prints, but for the checksum."""
        end_s = time.monotonic()
        cpu_s = time.process_time() - self._cpu_before_s
        return Reading(start_s=self._start_s, end_s=end_s, cpu_s=cpu_s, bytes=size_bytes, reads=reads, checksum="")


def read_sequential(path: str, *, length_max: int, digest: bool) -> Reading:
    """The file, or its first part, in 4 MiB reads, as a loader that copies to the GPU does; xxh3_128 of it if asked."""
    buffer = bytearray(READ_BYTES)
    hasher = xxhash.xxh3_128()
    view = memoryview(buffer)
    total = reads = 0
    clock = Clock()
    descriptor = os.open(path, os.O_RDONLY)
    while total < length_max and (count := os.readv(descriptor, [buffer])):
        total += count
        reads += 1
        if digest:
            hasher.update(view[:count])
    os.close(descriptor)
    result = clock.reading(size_bytes=total, reads=reads)
    result["checksum"] = hasher.hexdigest() if digest else ""
    return result


def walk_mapped(path: str) -> Reading:
    """Every page of a private read-only map in order, as safetensors maps it, summed as 64-bit words."""
    total = 0
    clock = Clock()
    with Path(path).open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        with mmap.mmap(file.fileno(), size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as mapping:
            words = numpy.frombuffer(mapping, dtype=numpy.uint64, count=size_bytes // 8)
            step = READ_BYTES // 8
            for first in range(0, len(words), step):
                total += int(words[first : first + step].sum(dtype=numpy.uint64))
            del words
    result = clock.reading(size_bytes=size_bytes)
    result["checksum"] = f"{total % 2**64:016x}"
    return result


def load_safetensors(path: str, *, digest: bool) -> Reading:
    """All tensors by the safetensors library, each into memory of its own, as transformers does without a GPU."""
    import safetensors

    hasher = xxhash.xxh3_128()
    clock = Clock()
    total = 0
    with safetensors.safe_open(path, framework="numpy") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            total += tensor.nbytes
            if digest:
                hasher.update(memoryview(tensor))
    result = clock.reading(size_bytes=total)
    result["checksum"] = hasher.hexdigest() if digest else ""
    return result


def load_llama(path: str, *, reference: str) -> Reading:
    """A llama.cpp server until it can answer: it maps the file whole; what it read is compared afterwards."""
    import xllamacpp as llama

    parameters = llama.CommonParams()
    parameters.model.path = path
    parameters.n_ctx = 256
    parameters.n_parallel = 1
    parameters.warmup = False
    clock = Clock()
    server = llama.Server(parameters)
    result = clock.reading(size_bytes=os.stat(path).st_size)
    result["checksum"] = "same" if Path(path).read_bytes() == Path(reference).read_bytes() else "different"
    del server
    return result


def read_random(path: str, *, seed: int, length_max: int, reads_max: int, time_max_s: float, reference: str) -> Reading:
    """4 KiB preads at random aligned places; what was read is compared with `reference` after the clock has stopped."""
    size_bytes = min(length_max, os.stat(reference).st_size)
    choose = random.Random(seed)
    places = [choose.randrange(size_bytes // RANDOM_READ_BYTES) * RANDOM_READ_BYTES for _ in range(reads_max)]
    results = []
    give_up_s = time.monotonic() + time_max_s
    clock = Clock()
    descriptor = os.open(path, os.O_RDONLY)
    for place in places:
        results.append(os.pread(descriptor, RANDOM_READ_BYTES, place))
        if time.monotonic() > give_up_s:
            break
    os.close(descriptor)
    result = clock.reading(size_bytes=len(results) * RANDOM_READ_BYTES, reads=len(results))
    with Path(reference).open("rb") as file:
        same = all(
            os.pread(file.fileno(), RANDOM_READ_BYTES, at) == data for at, data in zip(places, results, strict=False)
        )
    result["checksum"] = "same" if same else "different"
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["sequential", "mapped", "random", "safetensors", "llama"])
    parser.add_argument("path")
    parser.add_argument("--digest", action="store_true")
    parser.add_argument("--length-max", type=int, default=1 << 62)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reads-max", type=int, default=5000)
    parser.add_argument("--time-max-s", type=float, default=3.0)
    parser.add_argument("--reference", default="")
    options = parser.parse_args()
    if options.kind in LIBRARIES:
        importlib.import_module(LIBRARIES[options.kind])
    print("ready", flush=True)
    if not sys.stdin.readline():
        return  # the benchmark is gone
    if options.kind == "sequential":
        found = read_sequential(options.path, length_max=options.length_max, digest=options.digest)
    elif options.kind == "mapped":
        found = walk_mapped(options.path)
    elif options.kind == "safetensors":
        found = load_safetensors(options.path, digest=options.digest)
    elif options.kind == "llama":
        found = load_llama(options.path, reference=options.reference)
    else:
        found = read_random(
            options.path,
            seed=options.seed,
            length_max=options.length_max,
            reads_max=options.reads_max,
            time_max_s=options.time_max_s,
            reference=options.reference,
        )
    print(json.dumps(found), flush=True)
    os._exit(0)  # without a library's own winding down


if __name__ == "__main__":
    main()
