"""Turns the samples of a run into tables: text, Markdown (for docs/PERFORMANCE.md), and JSON with every single run.

Called by main.py.  Pure except for `write`.  A ratio is taken within a round, between runs that lie next to each
other in time, and the median is taken of those ratios: the disk's speed drifts by more than what is to be seen.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import workloads

MEMORY_ALLOWANCE_BYTES = 150_000_000
MIB = 1 << 20


@dataclass(frozen=True)
class Sample:
    """One run of one workload on one peer, or why there is no figure."""

    round: int
    workload: str
    peer: str
    problem: str = ""
    rate: float = 0.0
    seconds: float = 0.0
    bytes: int = 0
    cold_share: float = 0.0
    cpu_s: float = 0.0
    peak_rss_bytes: int = 0
    peak_memory_bytes: int = 0
    memory_limit_bytes: int | None = None
    extra: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """One bar and whether it was reached; `reached` is None when it could not be measured."""

    what: str
    bar: str
    figure: str
    reached: bool | None


@dataclass(frozen=True)
class Report:
    """All that was found."""

    command: str
    environment: dict[str, str]
    samples: list[Sample]
    # Why a peer is missing, as (peer, reason).
    skipped: list[tuple[str, str]]


@dataclass(frozen=True)
class _Spread:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> _Spread | None:
        return cls(statistics.median(values), min(values), max(values)) if values else None

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.low)}..{_short(self.high)})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _per_gib(seconds: Sequence[float], gib: float) -> str:
    return f"{sum(seconds) / gib:.2f}" if gib >= 0.001 and any(seconds) else ""


def _good(samples: Sequence[Sample], workload: str, peer: str) -> dict[int, Sample]:
    return {s.round: s for s in samples if s.workload == workload and s.peer == peer and not s.problem}


def _ratios(samples: Sequence[Sample], workload: str, peer: str, against: str) -> _Spread | None:
    mine, theirs = _good(samples, workload, peer), _good(samples, workload, against)
    return _Spread.of(
        [mine[r].rate / theirs[r].rate for r in sorted(mine.keys() & theirs.keys()) if theirs[r].rate > 0]
    )


def _tierfs_names(samples: Sequence[Sample]) -> list[str]:
    return list(dict.fromkeys(s.peer for s in samples if s.peer.startswith("tierfs")))


def speed_rows(samples: Sequence[Sample], workload: workloads.Workload) -> list[list[str]]:
    """One row for each peer: its rate, how much faster each state of tierfs is, CPU and memory of its daemon."""
    rows = []
    ours = [peer.name for peer in workload.peers if peer.name.startswith("tierfs")]
    for peer in (kind.name for kind in workload.peers):
        good = _good(samples, workload.name, peer)
        spread = _Spread.of([s.rate for s in good.values()])
        if spread is None:
            continue
        faster = [
            f"{_ratios(samples, workload.name, name, peer)}"
            if name != peer and _good(samples, workload.name, name)
            else ""
            for name in ours
        ]
        runs = list(good.values())
        gib = sum(s.bytes for s in runs) / workloads.GIB
        cpu = _per_gib([s.cpu_s for s in runs], gib)
        reader_cpu = _per_gib([s.extra.get("reader_cpu_s", 0.0) for s in runs], gib)
        memory = max(s.peak_memory_bytes for s in runs)
        seconds = statistics.median(s.seconds for s in runs)
        rows.append(
            [
                peer,
                str(spread),
                f"{seconds:.2f}",
                *faster,
                cpu,
                reader_cpu,
                f"{memory // MIB}" if memory else "",
                str(len(runs)),
            ]
        )
    return rows


def speed_header(workload: workloads.Workload) -> list[str]:
    """The header of `speed_rows`."""
    ours = [f"{peer.name} / this" for peer in workload.peers if peer.name.startswith("tierfs")]
    return ["peer", workload.unit, "s", *ours, "CPU s/GiB", "reader's", "MiB held", "runs"]


def verdicts(report: Report, chosen: Sequence[workloads.Workload]) -> list[Verdict]:
    """Every bar of the chosen workloads, and memory for each state of tierfs."""
    found = []
    for workload in chosen:
        for bar in workload.bars:
            mine = list(_good(report.samples, workload.name, bar.peer).values())
            if bar.against is not None:
                spread = _ratios(report.samples, workload.name, bar.peer, bar.against)
                figure, value = str(spread), spread.median if spread else None
            elif mine and "fetched_blocks_per_block" in mine[0].extra:
                # A block fetched twice in any one round is a fault: no median here.
                copies = [s.extra["fetched_blocks_per_block"] for s in mine]
                figure, value = f"{min(copies):.4f}..{max(copies):.4f} fetched / blocks", min(s.rate for s in mine)
            else:
                spread = _Spread.of([s.seconds for s in mine])
                figure, value = f"{spread} s", 1 / spread.median if spread else None
            reached = None if value is None else value >= bar.at_least
            found.append(
                Verdict(
                    f"{bar.peer}: {workload.title}", bar.wording, "not measured" if value is None else figure, reached
                )
            )
    for peer in _tierfs_names(report.samples):
        runs = [s for s in report.samples if s.peer == peer and not s.problem and s.peak_memory_bytes]
        if not runs:
            continue
        worst = max(runs, key=lambda s: s.peak_memory_bytes)
        figure = (
            f"{worst.peak_memory_bytes // MIB} MiB held (peak RSS {max(s.peak_rss_bytes for s in runs) // MIB} MiB)"
        )
        limit = worst.memory_limit_bytes
        reached = None if limit is None else worst.peak_memory_bytes <= limit + MEMORY_ALLOWANCE_BYTES
        bar_text = f"{limit // MIB} MiB + 150 MB" if limit is not None else "its limit + 150 MB; status gives no limit"
        found.append(Verdict(f"{peer}: daemon memory, most of all in {worst.workload}", bar_text, figure, reached))
    return found


def problems(report: Report) -> list[str]:
    """Every run without a figure, and every missing peer."""
    lines = [f"skipped {peer}: {reason}" for peer, reason in report.skipped]
    lines += [f"round {s.round + 1}, {s.workload}, {s.peer}: {s.problem}" for s in report.samples if s.problem]
    return lines


def _verdict_rows(found: Sequence[Verdict]) -> list[list[str]]:
    words = {True: "met", False: "MISSED", None: "unknown"}
    return [[v.what, v.bar, v.figure, words[v.reached]] for v in found]


def _text_table(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    ]


def _markdown_table(header: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]]


def render(report: Report, chosen: Sequence[workloads.Workload], *, markdown: bool) -> str:
    """The whole report as text."""
    table = _markdown_table if markdown else _text_table
    heading = "### " if markdown else "== "
    lines = [f"`{report.command}`" if markdown else report.command, ""]
    lines += [f"{'- ' if markdown else ''}{name}: {value}" for name, value in report.environment.items()]
    for workload in chosen:
        rows = speed_rows(report.samples, workload)
        if rows:
            lines += ["", f"{heading}{workload.name}: {workload.title}", "", *table(speed_header(workload), rows)]
    found = verdicts(report, chosen)
    lines += ["", f"{heading}bars", "", *table(["what", "bar", "median (min..max)", ""], _verdict_rows(found))]
    trouble = problems(report)
    if trouble:
        lines += ["", f"{heading}left out", "", *(f"- {line}" for line in trouble)]
    return "\n".join(lines) + "\n"


def write(report: Report, chosen: Sequence[workloads.Workload], directory: Path) -> None:
    """Write bench.md and bench.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "bench.md").write_text(render(report, chosen, markdown=True))
    document = {**asdict(report), "verdicts": [asdict(verdict) for verdict in verdicts(report, chosen)]}
    (directory / "bench.json").write_text(json.dumps(document, indent=1) + "\n")
