"""What mount options of a tmpfs do for a hot tier: filling it, read() and mmap of a resident model through passthrough.

    python -m tests.bench.tmpfs_pages [--mib 512] [--rounds 9] [OPTIONS ...]

Each OPTIONS is one set of tmpfs options (default: `huge=never`, `huge=advise`, `huge=within_size`, `huge=always`); the
first is what the others are compared with. Rounds are interleaved; the table has medians, and medians of the ratios of
each round. Needs root, the channel and three times the size in memory for each set. Results: docs/HOT-TIER.md.
"""

import argparse
import contextlib
import mmap
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import xxhash

from tests.integration.processes import Mount, tierfs

MIB = 1 << 20
_BUFFER_BYTES = 4 * MIB


def read_all(path: Path) -> None:
    """read() from begin to end."""
    buffer = bytearray(_BUFFER_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def walk_map(path: Path) -> None:
    """Map it and digest every byte, as a loader touches each page once."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        xxhash.xxh3_128_digest(mapped)


def touch_map(path: Path) -> None:
    """Map it and touch one byte of each page: the faults alone."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        mapped[:: mmap.PAGESIZE]


def write_blocks(path: Path, size_mib: int) -> None:
    """Fill a sparse file block by block, as the tier does, and remove it."""
    block = memoryview(bytes(_BUFFER_BYTES))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.ftruncate(descriptor, size_mib * MIB)
        for offset in range(0, size_mib * MIB, _BUFFER_BYTES):
            os.pwrite(descriptor, block, offset)
    finally:
        os.close(descriptor)
        path.unlink()


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


class Side:
    """One set of options: its tmpfs and its mount."""

    def __init__(self, options: str, models: Path, work: Path, size_mib: int) -> None:
        self.options = options
        self.size_mib = size_mib
        self.tmpfs = work / "hot"
        self.tmpfs.mkdir(parents=True)
        line = ["mount", "-t", "tmpfs", "-o", f"size={size_mib * 3}m,{options}", "tmpfs", str(self.tmpfs)]
        subprocess.run(line, check=True)
        self.mount = Mount(f"dir:{models}", work, hot=f'path = "{self.tmpfs}/tier"', mode="channel")
        self.times: dict[str, list[float]] = {}

    def start(self) -> None:
        """Mount, and bring the model into the hot tier."""
        self.mount.mount()
        tierfs("warm", "--tier", "hot", self.mount.path, timeout_s=300)

    def round(self) -> None:
        """One of each measurement."""
        model = self.mount.path / "model.bin"
        # Not timed: a virtual machine may have given free huge pages back to its host, and waits for them.
        write_blocks(self.tmpfs / "written", self.size_mib)
        for name, took_s in (
            ("write", seconds(lambda: write_blocks(self.tmpfs / "written", self.size_mib))),
            ("read", seconds(lambda: read_all(model))),
            ("mmap, all bytes", seconds(lambda: walk_map(model))),
            ("mmap, faults", seconds(lambda: touch_map(model))),
        ):
            self.times.setdefault(name, []).append(took_s)

    def end(self) -> None:
        """Leave nothing."""
        with contextlib.suppress(AssertionError):
            self.mount.cleanup()
        subprocess.run(["umount", "-l", str(self.tmpfs)], check=False)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("options", nargs="*", default=["huge=never", "huge=advise", "huge=within_size", "huge=always"])
    given = parser.parse_args()
    sides: list[Side] = []
    with tempfile.TemporaryDirectory(prefix="tierfs-tmpfs-") as name:
        work = Path(name)
        models = work / "models"
        models.mkdir()
        with (models / "model.bin").open("wb") as file:
            for _ in range(given.mib):
                file.write(os.urandom(MIB))
        try:
            for number, options in enumerate(given.options):
                sides.append(Side(options, models, work / f"side{number}", given.mib))
                sides[-1].start()
            for _ in range(given.rounds):
                for side in sides:
                    side.round()
            for side in sides:
                status = side.mount.status()
                assert status["channel"]["passthrough_opens"] >= 3 * given.rounds, "not through passthrough"
            report(sides, given.mib)
        finally:
            for side in sides:
                side.end()


def report(sides: list[Side], size_mib: int) -> None:
    """The table."""
    first = sides[0]
    for what, base in first.times.items():
        for side in sides:
            times = side.times[what]
            ratio = statistics.median(a / b for a, b in zip(base, times, strict=True))
            rate = size_mib / 1024 / statistics.median(times)
            print(f"{what:16} {side.options:24} {rate:6.2f} GiB/s  x{ratio:.2f} of {first.options}")


if __name__ == "__main__":
    main()
