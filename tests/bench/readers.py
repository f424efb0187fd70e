"""The readers: each in a process of its own, as a framework is; says "ready", reads when told, prints one line of JSON.

Called by workloads.py as ``python readers.py KIND PATH …``.  Importing is done before "ready", so what is timed is
open, read and close.  The readers do as little as they can beside reading, so that they are not what is measured.
"""

from __future__ import annotations

import argparse
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


class Reading(TypedDict):
    """What one reader prints. Times are CLOCK_MONOTONIC, the same clock in every process."""

    start_s: float
    end_s: float
    bytes: int
    reads: int
    checksum: str


def read_sequential(path: str, *, digest: bool) -> Reading:
    """The whole file in 4 MiB reads, as a loader that copies to the GPU does; xxh3_128 of it if asked."""
    buffer = bytearray(READ_BYTES)
    hasher = xxhash.xxh3_128()
    view = memoryview(buffer)
    total = reads = 0
    start_s = time.monotonic()
    descriptor = os.open(path, os.O_RDONLY)
    while count := os.readv(descriptor, [buffer]):
        total += count
        reads += 1
        if digest:
            hasher.update(view[:count])
    os.close(descriptor)
    return Reading(
        start_s=start_s, end_s=time.monotonic(), bytes=total, reads=reads, checksum=hasher.hexdigest() if digest else ""
    )


def walk_mapped(path: str) -> Reading:
    """Every page of a private read-only map in order, as safetensors maps it, summed as 64-bit words."""
    total = 0
    start_s = time.monotonic()
    with Path(path).open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        with mmap.mmap(file.fileno(), size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as mapping:
            words = numpy.frombuffer(mapping, dtype=numpy.uint64, count=size_bytes // 8)
            step = READ_BYTES // 8
            for first in range(0, len(words), step):
                total += int(words[first : first + step].sum(dtype=numpy.uint64))
            del words
    checksum = f"{total % 2**64:016x}"
    return Reading(start_s=start_s, end_s=time.monotonic(), bytes=size_bytes, reads=0, checksum=checksum)


def read_random(path: str, *, seed: int, reads_max: int, time_max_s: float, reference: str) -> Reading:
    """4 KiB preads at random aligned places; what was read is compared with `reference` after the clock has stopped."""
    size_bytes = os.stat(reference).st_size
    choose = random.Random(seed)
    places = [choose.randrange(size_bytes // RANDOM_READ_BYTES) * RANDOM_READ_BYTES for _ in range(reads_max)]
    results = []
    start_s = time.monotonic()
    descriptor = os.open(path, os.O_RDONLY)
    for place in places:
        results.append(os.pread(descriptor, RANDOM_READ_BYTES, place))
        if time.monotonic() - start_s > time_max_s:
            break
    os.close(descriptor)
    end_s = time.monotonic()
    with Path(reference).open("rb") as file:
        same = all(
            os.pread(file.fileno(), RANDOM_READ_BYTES, at) == data for at, data in zip(places, results, strict=False)
        )
    done_bytes = len(results) * RANDOM_READ_BYTES
    return Reading(
        start_s=start_s, end_s=end_s, bytes=done_bytes, reads=len(results), checksum="same" if same else "different"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["sequential", "mapped", "random"])
    parser.add_argument("path")
    parser.add_argument("--digest", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reads-max", type=int, default=5000)
    parser.add_argument("--time-max-s", type=float, default=3.0)
    parser.add_argument("--reference", default="")
    options = parser.parse_args()
    print("ready", flush=True)
    if not sys.stdin.readline():
        return  # the benchmark is gone
    if options.kind == "sequential":
        reading = read_sequential(options.path, digest=options.digest)
    elif options.kind == "mapped":
        reading = walk_mapped(options.path)
    else:
        reading = read_random(
            options.path,
            seed=options.seed,
            reads_max=options.reads_max,
            time_max_s=options.time_max_s,
            reference=options.reference,
        )
    print(json.dumps(reading), flush=True)


if __name__ == "__main__":
    main()
