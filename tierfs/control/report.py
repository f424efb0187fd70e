"""What `tierfs report` says of the last loads: the figures that follow from what was kept of each. Pure.

The keys are an interface (docs/COMMANDS.md).
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from tierfs.catalog.load_store import KEPT_MAX, LoadRecord


def newest(kept: Sequence[LoadRecord], running: Sequence[LoadRecord] = ()) -> list[dict[str, Any]]:
    """As objects of JSON, the newest first. Of what goes on, the record of now stands for the one that was kept."""
    records = {record.number: (record, record.end or "killed") for record in kept}
    records.update({record.number: (record, record.end or "running") for record in running})
    chosen = sorted(records.values(), key=lambda one: (-one[0].started_s, -one[0].number))[:KEPT_MAX]
    return [_figures(record, end) for record, end in chosen]


def each(kept: Sequence[LoadRecord]) -> list[dict[str, Any]]:
    """As newest(), of what daemons have left that run no more; of several mounts perhaps."""
    return [_figures(record, record.end or "killed") for record in kept]


def _figures(record: LoadRecord, end: str) -> dict[str, Any]:
    answer: dict[str, Any] = msgspec.to_builtins(record)
    seconds = record.duration_s
    waited = [one for one in record.files if one.wait_s > 0]
    slowest = max(waited, key=lambda one: one.wait_s, default=None)
    answer.update(
        end=end,
        fetched_bytes=record.source_bytes,
        bytes_per_s=record.read_bytes / seconds if seconds > 0 else 0.0,
        amplification=record.source_bytes / record.read_bytes if record.read_bytes else None,
        slowest_file=None if slowest is None else msgspec.to_builtins(slowest),
    )
    del answer["source_bytes"]
    return answer
