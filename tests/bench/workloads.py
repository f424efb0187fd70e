"""What is measured: each workload is one way of reading, the peers it is tried on, and the bars it has to reach.

Called by main.py.  A workload's `run` returns a Result whose `rate` is always better when larger, so that a ratio of
two rates is a speed-up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import data
import peers as other
import tierfs_peers as ours
from processes import PeerFailed

if TYPE_CHECKING:
    from readers import Reading

GIB = 1 << 30
RUN_TIMEOUT_S = 600
SHARED_READERS = 8


@dataclass(frozen=True)
class Options:
    """What the command line says about the readers."""

    seed: int
    random_reads: int
    random_time_s: float


@dataclass(frozen=True)
class Result:
    """One run. `extra` holds further figures for the JSON file."""

    rate: float
    seconds: float
    bytes: int
    extra: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Bar:
    """The median of rate(peer) / rate(against) is to be `at_least`; without `against`, the rate itself."""

    peer: str
    against: str | None
    at_least: float
    wording: str


Run = Callable[[other.Peer, Options, bool], Result]


@dataclass(frozen=True)
class Workload:
    """`run(peer, options, first)`: `first` is set in the peer's first run, whose bytes are checked by digest."""

    name: str
    title: str
    unit: str
    peers: tuple[type[other.Peer], ...]
    run: Run
    bars: tuple[Bar, ...]
    # The server's side is read into the page cache beforehand, so that the disk is not what is measured.
    source_cached: bool = False

    @property
    def small_files(self) -> bool:
        """Whether it is about the directory of small files."""
        return other.PlainTree in self.peers or ours.TierfsTree in self.peers


def read_with(kind: str, paths: list[Path], *arguments: str) -> list[Reading]:
    """Start one reader for each path, let all go at once, and collect what they say. Raises PeerFailed."""
    script = str(Path(__file__).with_name("readers.py"))
    children = []
    try:
        for path in paths:
            command = [sys.executable, script, kind, str(path), *arguments]
            children.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        for child in children:
            assert child.stdout is not None
            if child.stdout.readline() != "ready\n":
                raise PeerFailed(f"the reader did not start: {child.communicate()[1].strip()[-200:]}")
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        readings: list[Reading] = []
        deadline = monotonic() + RUN_TIMEOUT_S
        for child in children:
            output, errors = child.communicate(timeout=max(0.1, deadline - monotonic()))
            if child.returncode != 0:
                raise PeerFailed(f"the reader failed: {errors.strip()[-200:]}")
            readings.append(json.loads(output))
        return readings
    except subprocess.TimeoutExpired as error:
        raise PeerFailed(f"the reader was not done after {RUN_TIMEOUT_S} s") from error
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()


def require(condition: bool, message: str) -> None:
    """Raises PeerFailed: a wrong byte is never a figure in a table."""
    if not condition:
        raise PeerFailed(f"WRONG BYTES: {message}")


def throughput(readings: list[Reading]) -> Result:
    """GiB/s from the first start to the last end."""
    seconds = max(reading["end_s"] for reading in readings) - min(reading["start_s"] for reading in readings)
    total = sum(reading["bytes"] for reading in readings)
    extra = {"reader_cpu_s": sum(reading["cpu_s"] for reading in readings)}
    return Result(rate=total / GIB / seconds, seconds=seconds, bytes=total, extra=extra)


def sequential(peer: other.Peer, options: Options, first: bool) -> Result:
    """The whole file in order by 4 MiB reads."""
    large = peer.setting.large
    if isinstance(peer, other.Curl):
        report = peer.work.run(
            ["curl", "-s", "-o", "/dev/null", "-w", "%{time_total} %{size_download}", peer.url]
        ).stdout
        seconds, size = report.split()
        require(int(size) == large.size_bytes, f"curl got {size} bytes")
        return Result(rate=int(size) / GIB / float(seconds), seconds=float(seconds), bytes=int(size))
    readings = read_with("sequential", [peer.file], *(["--digest"] if first else []))
    require(readings[0]["bytes"] == large.size_bytes, f"{readings[0]['bytes']} instead of {large.size_bytes} bytes")
    require(not first or readings[0]["checksum"] == large.digest, "the digest differs from the plain file's")
    return throughput(readings)


def mapped(peer: other.Peer, options: Options, first: bool) -> Result:
    """Every page of a map of the file in order."""
    readings = read_with("mapped", [peer.file])
    require(
        readings[0]["checksum"] == peer.setting.large.word_sum, "the sum over the map differs from the plain file's"
    )
    return throughput(readings)


def first_half(peer: other.Peer, options: Options, first: bool) -> Result:
    """The first half of the file in order by 4 MiB reads."""
    readings = read_with("sequential", [peer.file], "--length-max", str(peer.setting.large.size_bytes // 2))
    return throughput(readings)


def first_half_random(peer: other.Peer, options: Options, first: bool) -> Result:
    """As `random_reads`, in the first half of the file."""
    return random_reads(peer, options, first, "--length-max", str(peer.setting.large.size_bytes // 2))


def safetensors(peer: other.Peer, options: Options, first: bool) -> Result:
    """Every tensor of the file by the safetensors library."""
    readings = read_with("safetensors", [peer.file], *(["--digest"] if first else []))
    large = peer.setting.large
    require(not first or readings[0]["checksum"] == large.tensors_digest, "the tensors differ from the plain file's")
    return throughput(readings)


def llama(peer: other.Peer, options: Options, first: bool) -> Result:
    """A llama.cpp server with the GGUF model, until it is ready."""
    if not peer.setting.gguf.exists():
        raise PeerFailed(f"the package {data.GGUF_PACKAGE} is not installed (examples/setup.sh demo)")
    readings = read_with("llama", [peer.gguf], "--reference", str(peer.setting.gguf))
    require(readings[0]["checksum"] == "same", "the model differs from the plain file")
    return throughput(readings)


def random_reads(peer: other.Peer, options: Options, first: bool, *arguments: str) -> Result:
    """4 KiB preads at the same random places for every peer, another set in each run would not be comparable."""
    readings = read_with(
        "random",
        [peer.file],
        *arguments,
        "--seed",
        str(options.seed),
        "--reads-max",
        str(options.random_reads),
        "--time-max-s",
        str(options.random_time_s),
        "--reference",
        str(peer.setting.large.path),
    )
    require(readings[0]["checksum"] == "same", "a random read differs from the plain file")
    seconds = readings[0]["end_s"] - readings[0]["start_s"]
    extra = {"reader_cpu_s": readings[0]["cpu_s"]}
    return Result(rate=readings[0]["reads"] / seconds, seconds=seconds, bytes=readings[0]["bytes"], extra=extra)


def shared(peer: other.Peer, options: Options, first: bool) -> Result:
    """Eight processes read the same cold file at once; the rate is 1 only if each block was fetched exactly once."""
    before = peer.counters()["fetched_bytes"]
    readings = read_with("sequential", [peer.file] * SHARED_READERS, "--digest")
    for reading in readings:
        require(reading["checksum"] == peer.setting.large.digest, "one of the readers got other bytes")
    copies = (peer.counters()["fetched_bytes"] - before) / peer.setting.large.size_bytes
    result = throughput(readings)
    extra = {**result.extra, "fetched_blocks_per_block": copies, "read_gib_per_s": result.rate}
    return Result(rate=1.0 if copies == 1 else 0.0, seconds=result.seconds, bytes=result.bytes, extra=extra)


def listing(*flags: str) -> Run:
    """`ls` with these flags over the directory of small files."""

    def run(peer: other.Peer, options: Options, first: bool) -> Result:
        start = monotonic()
        done = subprocess.run(
            ["ls", *flags, str(peer.file)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=RUN_TIMEOUT_S,
            env={**os.environ, "LC_ALL": "C", "TZ": "UTC"},
            check=False,
        )
        seconds = monotonic() - start
        if done.returncode != 0:
            raise PeerFailed(f"ls: {done.stderr.decode(errors='replace').strip()[-200:]}")
        if first:
            found = len(os.listdir(peer.file))
            require(found == peer.setting.entries, f"{found} entries instead of {peer.setting.entries}")
        return Result(rate=peer.setting.entries / seconds, seconds=seconds, bytes=0)

    return run


def mounting(peer: other.Peer, options: Options, first: bool) -> Result:
    """`tierfs mount` of the export with many files, until its directory can be listed."""
    assert isinstance(peer, ours.TierfsTree)
    seconds = peer.remount()
    return Result(rate=1 / seconds, seconds=seconds, bytes=0)


def against_juicefs(peer: str, at_least: float) -> Bar:
    """A bar relative to JuiceFS with its cache filled."""
    return Bar(peer, "JuiceFS", at_least, f"{at_least:g} x JuiceFS")


PASSTHROUGH_BAR = Bar("tierfs warm", "tier file", 0.97, "0.97 x the tier file itself")
HOT_BAR = Bar("tierfs hot", "tmpfs file", 0.97, "0.97 x a file on the tmpfs")
# In the order in which they are run: what is compared most closely is next to each other.
_CLIENTS = (other.Plain, other.Rclone, other.JuiceFs, ours.TierfsWarmDirect, ours.TierfsWarm, ours.TierFile)
_RESIDENT = (*_CLIENTS, ours.MemoryFile, ours.TierfsHot)
_PARTLY = (ours.TierfsPartly, ours.TierfsPartlyDirect)
_PARTLY_BARS = (Bar("tierfs partly warm", "tierfs partly warm, direct mode", 1.0, "direct mode"),)
_COLD = (other.Curl, other.RcloneCold, ours.TierfsCold)
_COLD_BARS = (
    Bar("tierfs cold", "rclone cold", 2.0, "2 x rclone"),
    Bar("tierfs cold", "curl from nginx", 0.5, "0.5 x curl"),
)
_TREES = (other.PlainTree, other.JuiceFsTree, ours.TierfsTree)
_LIST_BARS = (Bar("tierfs directory", "JuiceFS directory", 0.5, "within 2 x the time of JuiceFS"),)

ALL = (
    Workload(
        "sequential",
        "sequential 4 MiB reads",
        "GiB/s",
        _RESIDENT,
        sequential,
        (PASSTHROUGH_BAR, HOT_BAR, against_juicefs("tierfs warm", 2.0), against_juicefs("tierfs hot", 2.5)),
    ),
    Workload(
        "mmap",
        "mmap walk",
        "GiB/s",
        _RESIDENT,
        mapped,
        (PASSTHROUGH_BAR, HOT_BAR, against_juicefs("tierfs warm", 2.0)),
    ),
    Workload(
        "random",
        "random 4 KiB reads",
        "reads/s",
        _RESIDENT,
        random_reads,
        (PASSTHROUGH_BAR, HOT_BAR, against_juicefs("tierfs warm", 2.0)),
    ),
    Workload("safetensors", "safetensors, all tensors", "GiB/s", _CLIENTS, safetensors, (PASSTHROUGH_BAR,)),
    Workload("llama", "llama.cpp, ready to answer", "GiB/s", _CLIENTS, llama, (PASSTHROUGH_BAR,)),
    Workload("partly", "sequential, the file partly resident", "GiB/s", _PARTLY, first_half, _PARTLY_BARS),
    Workload(
        "partly-random",
        "random 4 KiB reads, the file partly resident",
        "reads/s",
        _PARTLY,
        first_half_random,
        _PARTLY_BARS,
    ),
    Workload("cold", "cold sequential, source on the disk", "GiB/s", _COLD, sequential, _COLD_BARS),
    Workload(
        "cold-net",
        "cold sequential, source in the server's page cache",
        "GiB/s",
        _COLD,
        sequential,
        _COLD_BARS,
        source_cached=True,
    ),
    Workload(
        "shared",
        f"{SHARED_READERS} processes read one cold file",
        "fetched once",
        (ours.TierfsCold,),
        shared,
        (Bar("tierfs cold", None, 1.0, "each block fetched exactly once"),),
    ),
    Workload("ls-unsorted", "ls -lU of the small files", "entries/s", _TREES, listing("-l", "-U"), _LIST_BARS),
    Workload("ls", "ls -l of the small files", "entries/s", _TREES, listing("-l"), _LIST_BARS),
    Workload(
        "mount",
        "mount the export of the small files",
        "mounts/s",
        (ours.TierfsTree,),
        mounting,
        (Bar("tierfs directory", None, 1 / 3, "under 3 s"),),
    ),
)
