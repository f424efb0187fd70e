"""The last loads of one mount: what each was like over time, kept in its state directory so that they outlive daemons.

A load is one model being read by a framework (cache/model_loads.py says when it begins and ends). Each is a file of its
own, ``loads/NUMBER.json``, replaced atomically: written while the load goes on, so that a killed daemon leaves what was
seen, and for the last time at its end. Only the newest are kept. Names are text here, with surrogates escaped.
"""

import logging
import os
from pathlib import Path
from typing import Annotated

import msgspec

log = logging.getLogger(__name__)

KEPT_MAX = 32
_FILE_BYTES_MAX = 1 << 20  # a load has at most this many slices, files and stalls, and a path at most 4 KiB
_LIST_MAX = 4096

_Bounded = msgspec.Meta(max_length=_LIST_MAX)


class Slice(msgspec.Struct):
    """What happened in one slice of the time: bytes given to readers, and taken from the source and the tiers."""

    read_bytes: int = 0
    source_bytes: int = 0
    hot_bytes: int = 0
    warm_bytes: int = 0


class Stall(msgspec.Struct, frozen=True):
    """A read that was answered late. ``at_s`` is when it came, since the load began."""

    at_s: float
    seconds: float
    path: str
    offset_bytes: int
    place: str


class FileLoad(msgspec.Struct):
    """One file of the model. ``wait_s``: how long its reads took, all of them added up."""

    path: str
    bytes: int
    read_bytes: int = 0
    reads: int = 0
    wait_s: float = 0.0
    first_s: float = 0.0  # since the load began
    last_s: float = 0.0


class LoadRecord(msgspec.Struct):
    """One load. Times are seconds since it began, sizes bytes."""

    number: int
    mountpoint: str
    path: str  # of the model
    bytes: int
    started_s: float  # since 1970
    duration_s: float = 0.0
    end: str = ""  # complete, quiet, stopped; empty while it goes on, or when the daemon was killed
    read_bytes: int = 0
    covered_bytes: int = 0  # of each file no more than its size
    source_bytes: int = 0
    hot_bytes: int = 0
    warm_bytes: int = 0
    reads: int = 0
    failed_reads: int = 0
    passthrough_opens: int = 0
    stalled_reads: int = 0
    stalled_s: float = 0.0
    read_sizes: dict[str, int] = {}  # reads of at most that many bytes
    places: dict[str, int] = {}  # reads by the farthest place their bytes came from
    slice_s: float = 0.0
    slices: Annotated[list[Slice], _Bounded] = []
    stalls: Annotated[list[Stall], _Bounded] = []  # the longest
    file_count: int = 0
    files: Annotated[list[FileLoad], _Bounded] = []  # those that waited longest


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(LoadRecord)


def encode(record: LoadRecord) -> bytes:
    """As it is kept."""
    return _encoder.encode(record)


def decode(data: bytes) -> LoadRecord:
    """The counterpart of encode. Raises msgspec.MsgspecError."""
    return _decoder.decode(data)


class LoadStore:
    """The loads of one mount. Blocking; written from one thread at a time. Nothing depends on it: trouble is logged."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._told = False

    def newest_number(self) -> int:
        """Of all that were kept; 0 when there is none."""
        return max((number for number, _ in _numbered(self._directory)), default=0)

    def replace(self, number: int, data: bytes) -> None:
        """Keep this of that load, and of the others the newest."""
        path = self._directory / f"{number}.json"
        temporary = path.with_suffix(".new")
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            temporary.write_bytes(data)
            temporary.replace(path)
            for _, old in sorted(_numbered(self._directory))[:-KEPT_MAX]:
                old.unlink(missing_ok=True)
            self._told = False
        except OSError as error:
            if not self._told:
                self._told = True
                log.warning("load_not_kept path=%s error=%s", path, error)

    def load(self) -> list[LoadRecord]:
        """All that can be read, the newest first."""
        return read_loads(self._directory)


def read_loads(directory: Path) -> list[LoadRecord]:
    """What is kept there, the newest first. Another user's daemon may have written it: what is odd is left out."""
    found = []
    for _, path in sorted(_numbered(directory), reverse=True)[:KEPT_MAX]:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                found.append(_decoder.decode(file.read(_FILE_BYTES_MAX)))
        except (OSError, ValueError, RecursionError):
            continue  # being replaced just now, or not ours
    return found


def _numbered(directory: Path) -> list[tuple[int, Path]]:
    try:
        paths = list(directory.iterdir())
    except OSError:
        return []
    return [
        (int(path.stem), path)
        for path in paths
        if path.suffix == ".json" and path.stem.isascii() and path.stem.isdigit()
    ]
