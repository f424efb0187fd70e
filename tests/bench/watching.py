"""Watches the daemons of a peer while something reads through them: peak memory and CPU time.

Called by main.py around each run.  `memory` is RssAnon + RssShmem: what the daemon itself holds.  Mapped pages of a
tier on a tmpfs count as RssShmem as well, although they are the tier and not the daemon's, so they are subtracted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

SAMPLE_PERIOD_S = 0.05
# The kernel walks the page tables for smaps, so mapped tiers are looked at less often than plain counters.
MAPPED_EVERY_SAMPLES = 5

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """What a run cost, summed over the watched processes."""

    cpu_s: float
    peak_rss_bytes: int
    peak_memory_bytes: int


def cpu_seconds(pid: int) -> float:
    """User and system time of a process with all its threads; 0.0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def memory_bytes(pid: int) -> tuple[int, int]:
    """(VmRSS, RssAnon + RssShmem) of a process; zeros when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    values = {
        name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if " kB" in rest
    }
    return values.get("VmRSS", 0), values.get("RssAnon", 0) + values.get("RssShmem", 0)


def mapped_bytes(pid: int, directory: Path) -> int:
    """Resident bytes of the mappings of files below `directory`."""
    total, inside = 0, False
    try:
        with Path(f"/proc/{pid}/smaps").open() as lines:
            for line in lines:
                if not line[0].isupper():
                    inside = f"{directory}/" in line
                elif inside and line.startswith("Rss:"):
                    total += int(line.split()[1]) * 1024
    except OSError:
        return total
    return total


class Watch:
    """Context manager: samples in a thread of its own from enter to exit; `usage()` afterwards."""

    def __init__(self, pids: Sequence[int], *, memory_tier: Path | None) -> None:
        self._pids = pids
        self._memory_tier = memory_tier
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, daemon=True)
        self._cpu_before_s = 0.0
        self._cpu_s = 0.0
        self._peak_rss_bytes = 0
        self._peak_memory_bytes = 0

    def __enter__(self) -> Self:
        self._cpu_before_s = sum(cpu_seconds(pid) for pid in self._pids)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Below zero when a daemon was replaced in between, as by a mount that is what is measured.
        self._cpu_s = max(0.0, sum(cpu_seconds(pid) for pid in self._pids) - self._cpu_before_s)
        self._stop.set()
        self._thread.join()

    def usage(self) -> Usage:
        """Peaks since the start, and the CPU time in between."""
        return Usage(self._cpu_s, self._peak_rss_bytes, self._peak_memory_bytes)

    def _sample_until_stopped(self) -> None:
        sample = 0
        while True:
            last = self._stop.wait(SAMPLE_PERIOD_S if sample else 0)
            look_at_maps = self._memory_tier is not None and (last or sample % MAPPED_EVERY_SAMPLES == 0)
            self._sample(look_at_maps=look_at_maps)
            sample += 1
            if last:
                return

    def _sample(self, *, look_at_maps: bool) -> None:
        counts = [memory_bytes(pid) for pid in self._pids]
        self._peak_rss_bytes = max(self._peak_rss_bytes, sum(rss for rss, _ in counts))
        memory = sum(own for _, own in counts)
        if self._memory_tier is not None:
            if not look_at_maps:
                return
            memory -= sum(mapped_bytes(pid, self._memory_tier) for pid in self._pids)
        self._peak_memory_bytes = max(self._peak_memory_bytes, memory)
