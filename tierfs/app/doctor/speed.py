"""How fast the warm tier's disk reads in sequence, against what the models need. Called by examination.py.

A bounded read past the page cache (O_DIRECT), with as many requests at once as the daemon's own readers have: of an
object that is there, or, where that was asked for, of a temporary file without a name. Reading takes about a second.
"""

import contextlib
import mmap
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tierfs.app.doctor.finding import Finding, note, ok, warning
from tierfs.blocks.units import format_bytes, format_duration
from tierfs.config.mounts import nearest_existing
from tierfs.config.schema import MountConfig
from tierfs.tiers.device import READ_THREADS

READ_S = 1.0
WRITE_S = 3.0  # for the temporary file
_PIECE_BYTES = 1 << 20
_FILE_BYTES = 512 << 20
_LEAST_BYTES = 64 << 20  # less says nothing
_OBJECTS_MAX = 2000  # looked at, to find a large one
_SLOW_BYTES_PER_S = 1_000_000_000
_LOAD_LONG_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Of one directory; 0 bytes where nothing could be read, with the reason."""

    path: str
    bytes_per_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class SpeedFacts:
    """The warm tier's directories."""

    speeds: tuple[Speed, ...] = ()


def look(config: MountConfig | None, *, temporary: bool) -> SpeedFacts:
    """Measure each warm directory in turn; ``temporary`` allows a file to be written where there is no large object."""
    warm = () if config is None or config.warm is None else config.warm.directories
    return SpeedFacts(speeds=tuple(_measure(path, temporary) for path in warm))


def judge(facts: SpeedFacts, *, largest_model_bytes: int = 0) -> list[Finding]:
    """Pure. ``largest_model_bytes``: of what a mount shows; 0 where that is not known."""
    findings = []
    for speed in facts.speeds:
        if not speed.bytes_per_s:
            what, mend = f"{speed.path} was not measured: {speed.reason}", "tierfs doctor CONFIG --measure"
            findings.append(note("speed.warm", what, "a model that is warm loads no faster than its disk reads", mend))
            continue
        what = f"{speed.path} reads {format_bytes(int(speed.bytes_per_s))}/s in sequence"
        load_s = largest_model_bytes / speed.bytes_per_s
        if largest_model_bytes:
            what += f"; the largest model ({format_bytes(largest_model_bytes)}) needs {format_duration(load_s)} from it"
        if speed.bytes_per_s >= _SLOW_BYTES_PER_S and load_s < _LOAD_LONG_S:
            findings.append(ok("speed.warm", what))
        else:
            why = "a model that is warm loads no faster than this"
            mend = "use NVMe disks, or several: warm.paths; or a hot tier for what is loaded most"
            findings.append(warning("speed.warm", what, why, mend))
    return findings


def _measure(directory: Path, temporary: bool) -> Speed:
    try:
        descriptor = _object(directory)
        if descriptor is None:
            if not temporary:
                return Speed(path=str(directory), reason="no large object is there yet")
            descriptor = _temporary(nearest_existing(directory))
        try:
            return Speed(path=str(directory), bytes_per_s=read_speed(descriptor))
        finally:
            os.close(descriptor)
    except OSError as error:
        return Speed(path=str(directory), reason=error.strerror or str(error))


def _object(directory: Path) -> int | None:
    """A large object that is wholly there, opened past the page cache."""
    best, best_bytes = None, _LEAST_BYTES - 1
    for count, path in enumerate((directory / "objects").glob("*/*")):
        if count == _OBJECTS_MAX:
            break
        with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
            status = path.lstat()
            if status.st_size > best_bytes and status.st_blocks * 512 >= status.st_size:
                best, best_bytes = path, status.st_size
    return None if best is None else os.open(best, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)


def _temporary(directory: Path) -> int:
    """A file without a name, gone with its descriptor, holding what could be written within WRITE_S."""
    descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    with mmap.mmap(-1, _PIECE_BYTES) as piece:  # page-aligned, as O_DIRECT wants
        piece.write(os.urandom(_PIECE_BYTES))  # nothing that a disk could compress
        deadline_s = time.monotonic() + WRITE_S
        written = 0
        while written < _FILE_BYTES and time.monotonic() < deadline_s:
            written += os.pwrite(descriptor, piece, written)
    return descriptor


def read_speed(descriptor: int) -> float:
    """Bytes per second of READ_THREADS readers of one file, from its beginning, for READ_S at most. Raises OSError."""
    pieces = os.fstat(descriptor).st_size // _PIECE_BYTES
    if not pieces:
        raise OSError(0, "the file is too small to measure")
    errors: list[OSError] = []
    counts = [0] * READ_THREADS
    started_s = time.monotonic()

    def read(number: int) -> None:
        with mmap.mmap(-1, _PIECE_BYTES) as buffer, memoryview(buffer) as view:
            try:
                for piece in range(number, pieces, READ_THREADS):
                    counts[number] += os.preadv(descriptor, [view], piece * _PIECE_BYTES)
                    if time.monotonic() - started_s > READ_S:
                        return
            except OSError as error:
                errors.append(error)

    threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(READ_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(counts) / (time.monotonic() - started_s)
