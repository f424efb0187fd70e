"""The benchmark: interleaves tierfs with its peers on the same bytes, round by round, and prints what came out.

Called by run.sh.  In each round every workload is run on every peer once, one right after the other, each from a page
cache that mincore has shown to be cold.  A peer that cannot be had is left out with its reason; whatever happens,
nothing is left behind.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from time import sleep
from types import FrameType

import data
import peers as other
import report
import tierfs_peers as ours
import workloads
from coldness import RESIDENT_SHARE_MAX, drop_caches, read_through, resident_share
from processes import PeerFailed, Workspace
from report import Report, Sample
from watching import Watch

CHECKOUT = Path(__file__).resolve().parents[2]
COLD_ATTEMPTS = 4
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def size(text: str) -> int:
    """'64MiB' in bytes; whole MiB, so that every way of reading sees whole words and pages."""
    number = text.rstrip("GMKiB")
    value = int(number) * _UNITS[text[len(number) :]]
    if value <= 0 or value % (1 << 20):
        raise ValueError("a whole number of MiB")
    return value


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/bench/run.sh", description="tierfs beside its peers on the same bytes")
    parser.add_argument("--size", type=size, default=size("2GiB"), help="of the large file (2GiB)")
    parser.add_argument("--entries", type=int, default=100_000, help="in the directory of small files")
    parser.add_argument("--rounds", type=int, default=5)
    names = [workload.name for workload in workloads.ALL]
    parser.add_argument("--only", default=",".join(names), help=f"workloads, of: {', '.join(names)}")
    parser.add_argument(
        "--peers", default="", help="only peers whose name contains one of these words, such as 'tierfs,JuiceFS'"
    )
    parser.add_argument("--random-reads", type=int, default=5000)
    parser.add_argument("--random-time", type=float, default=3.0, help="seconds after which random reads stop")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--config-extra", type=Path, help="TOML that is added to tierfs's configuration")
    parser.add_argument(
        "--output", type=Path, default=CHECKOUT / "build/bench", help="where bench.md and bench.json go"
    )
    parser.add_argument(
        "--work", type=Path, help="an empty directory on a local disk, removed at the end (in /var/tmp)"
    )
    options = parser.parse_args()
    unknown = set(options.only.split(",")) - set(names)
    if unknown:
        parser.error(f"--only: no workload {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return options


def peer_versions() -> str:
    """The versions of the peers, as they give them."""
    commands = [[str(CHECKOUT / ".venv/bin/juicefs"), "--version"], ["rclone", "--version"], ["/usr/sbin/nginx", "-v"]]
    found = []
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except OSError:
            continue
        found += [line.strip() for line in (done.stdout + done.stderr).splitlines()[:1]]
    return ", ".join(found)


def environment(work: Path) -> dict[str, str]:
    """What the figures depend on."""
    found = subprocess.run(
        ["findmnt", "-no", "SOURCE,FSTYPE", "-T", str(work)], capture_output=True, text=True, check=False
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    return {
        "machine": f"{os.cpu_count()} cores, {memory} GiB",
        "software": f"Linux {platform.release()}, Python {platform.python_version()}, {peer_versions()}",
        "disk": " ".join(found.stdout.split()) or "unknown",
    }


class Bench:
    """One run of the benchmark. `samples` and `skipped` hold what came out so far, also after an interrupt."""

    def __init__(self, setting: other.Setting, options: argparse.Namespace) -> None:
        self.setting = setting
        self.options = options
        self.reading = workloads.Options(options.seed, options.random_reads, options.random_time)
        chosen = options.only.split(",")
        self.workloads = [workload for workload in workloads.ALL if workload.name in chosen]
        self.samples: list[Sample] = []
        self.skipped: list[tuple[str, str]] = []
        self._checked: set[tuple[str, str]] = set()

    def wanted(self, chosen: list[workloads.Workload]) -> list[type[other.Peer]]:
        """The peers that these workloads need, in their order."""
        words = [word for word in self.options.peers.split(",") if word]
        kinds = dict.fromkeys(kind for workload in chosen for kind in workload.peers)
        return [kind for kind in kinds if not words or any(word in kind.name for word in words)]

    def build(self, kind: type[other.Peer], nginx: other.Nginx, servers: dict[bool, ours.Server]) -> other.Peer:
        """A peer with what it shares with others."""
        if issubclass(kind, (other.Curl, other.Rclone)):
            return kind(self.setting, nginx)
        if issubclass(kind, ours.Tierfs):
            return kind(self.setting, servers[kind is ours.TierfsTree])
        return kind(self.setting)

    def run(self) -> None:
        """The large file first, then the small ones: a server that looks at so many files takes time from others."""
        for small_files in (False, True):
            chosen = [workload for workload in self.workloads if workload.small_files == small_files]
            if chosen:
                self._run_all(chosen)

    def _run_all(self, chosen: list[workloads.Workload]) -> None:
        """Start the peers, do the rounds, stop the peers."""
        work = self.setting.work
        nginx = other.Nginx(work, self.setting.large.path.parent)
        servers = {
            False: ours.Server(work, self.setting.large.path.parent, name="serve-large"),
            True: ours.Server(work, self.setting.many, name="serve-many"),
        }
        ready: dict[type[other.Peer], other.Peer] = {}
        with ExitStack() as stack:
            for kind in self.wanted(chosen):
                say(f"starting {kind.name}")
                peer = self.build(kind, nginx, servers)
                stack.callback(self._stop, peer)
                try:
                    peer.start()
                except (PeerFailed, OSError, KeyError, ValueError) as error:
                    self.skipped.append((kind.name, str(error)))
                    say(f"  left out: {error}")
                else:
                    ready[kind] = peer
            for number in range(self.options.rounds):
                for workload in chosen:
                    for kind in workload.peers:
                        if kind in ready:
                            self.samples.append(self._measure(number, workload, ready[kind]))

    def _stop(self, peer: other.Peer) -> None:
        try:
            peer.stop()
        except (PeerFailed, OSError) as error:
            say(f"{peer.name} did not stop: {error}")

    def _measure(self, number: int, workload: workloads.Workload, peer: other.Peer) -> Sample:
        try:
            sample = self._run_once(number, workload, peer)
        except PeerFailed as error:
            sample = Sample(number, workload.name, peer.name, problem=str(error))
        except (OSError, KeyError, ValueError) as error:
            sample = Sample(number, workload.name, peer.name, problem=f"{type(error).__name__}: {error}")
        finally:
            self._finish(peer)
        figure = sample.problem or f"{sample.rate:,.2f} {workload.unit} ({sample.seconds:.2f} s)"
        say(f"round {number + 1}  {workload.name:12}{peer.name:20}{figure}")
        return sample

    def _finish(self, peer: other.Peer) -> None:
        try:
            peer.finish()
        except (PeerFailed, OSError) as error:
            say(f"{peer.name} did not finish: {error}")

    def _run_once(self, number: int, workload: workloads.Workload, peer: other.Peer) -> Sample:
        peer.prepare()
        limit_bytes = peer.memory_limit_bytes()
        before = peer.counters()
        # From here to the run as little time as can be: see read_through.
        read_through(self._on_the_disk(peer))
        share = self._make_cold(peer, source_cached=workload.source_cached)
        if share > RESIDENT_SHARE_MAX:
            return Sample(
                number,
                workload.name,
                peer.name,
                cold_share=share,
                problem=f"thrown out: not cold, {share:.1%} of the pages are in memory",
            )
        first = (workload.name, peer.name) not in self._checked
        with Watch(peer.pids(), memory_tier=peer.memory_tier()) as watch:
            result = workload.run(peer, self.reading, first)
        self._checked.add((workload.name, peer.name))
        usage = watch.usage()
        # A mount that was made anew during the run counts from zero.
        counted = {name: max(0.0, value - before.get(name, 0)) for name, value in peer.counters().items()}
        objection = peer.objection(counted)
        return Sample(
            number,
            workload.name,
            peer.name,
            rate=result.rate,
            seconds=result.seconds,
            bytes=result.bytes,
            cold_share=share,
            cpu_s=usage.cpu_s,
            peak_rss_bytes=usage.peak_rss_bytes,
            peak_memory_bytes=usage.peak_memory_bytes,
            memory_limit_bytes=limit_bytes,
            problem=f"thrown out: {objection}" if objection else "",
            extra={**counted, **result.extra},
        )

    def _on_the_disk(self, peer: other.Peer) -> list[Path]:
        """The files behind a peer's."""
        device = os.stat(self.setting.work.directory).st_dev
        return [path for path in peer.cold_files() if os.stat(path).st_dev == device]

    def _make_cold(self, peer: other.Peer, *, source_cached: bool) -> float:
        """Drop the caches and return the share that is in memory all the same."""
        files = peer.cold_files()
        for attempt in range(COLD_ATTEMPTS):
            sleep(0.2 * attempt)  # pages that were dirty or on their way through a socket are free a moment later
            drop_caches(files)
            if source_cached:
                files = [path for path in files if path != self.setting.large.path]
                other.fill_by_reading(self.setting.large.path)
            share = resident_share(files)
            if share <= RESIDENT_SHARE_MAX:
                break
        return share


def say(text: str) -> None:
    """Progress, beside the report."""
    print(text, file=sys.stderr, flush=True)


def interrupt(number: int, frame: FrameType | None) -> None:
    """The first signal ends the run through every `finally`; further ones must not interrupt those."""
    for other_number in SIGNALS:
        signal.signal(other_number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    options = parse_arguments()
    for number in SIGNALS:
        signal.signal(number, interrupt)
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
        if any(options.work.iterdir()):
            say(f"--work {options.work}: not empty")
            return 2
    # /tmp is memory on many machines, and memory is no disk.
    work = Workspace((options.work or Path(tempfile.mkdtemp(prefix="tierfs-bench-", dir="/var/tmp"))).resolve())
    status = 0
    try:
        config_extra = options.config_extra.read_text() if options.config_extra else ""
        say(f"making the data in {work.directory}")
        large = data.make_large(work.path("large"), size_bytes=options.size, seed=options.seed)
        data.make_chaser(large.path.parent)
        data.place_gguf(large.path.parent)
        many = work.path("many")
        bench = Bench(other.Setting(work, CHECKOUT, large, many, options.entries, config_extra), options)
        if any(workload.small_files for workload in bench.workloads):
            data.make_small(many, count=options.entries)
        found = environment(work.directory)
        try:
            bench.run()
        except KeyboardInterrupt:
            say("interrupted: the report holds what was done so far")
            status = 130
        # Nothing may end the cleaning and the report from here on.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        # run.sh puts the directory that it made first; nobody would type it.
        given = sys.argv[3:] if sys.argv[1:2] == ["--work"] else sys.argv[1:]
        command = f"bash tests/bench/run.sh {shlex.join(given)}".strip()
        result = Report(command, found, bench.samples, bench.skipped)
        report.write(result, bench.workloads, options.output)
        print(report.render(result, bench.workloads, markdown=False), end="", flush=True)
        say(f"written to {options.output}/bench.md and bench.json")
        if any("WRONG BYTES" in sample.problem for sample in bench.samples):
            status = 1
    except KeyboardInterrupt:
        status = 130
    finally:
        for message in work.clean_up():
            say(message)
            status = status or 1
    return status


if __name__ == "__main__":
    sys.exit(main())
