"""What happened between two answers of `status`: the rates that `tierfs top` shows. Pure.

Bytes that a passthrough reader takes from a tier file are not in any counter of ours: its opens are all that is seen.
"""

from collections.abc import Mapping
from typing import Any

from tierfs.control.socket import Reply

_MODELS_MAX = 20


def sample(before: Mapping[str, Any], after: Mapping[str, Any], *, interval_s: float, time_s: float) -> Reply:
    """One line of `tierfs top --json`. Of two daemons that followed each other nothing is known: rates of 0."""
    same = before["daemon"]["pid"] == after["daemon"]["pid"]

    def rate(*keys: str) -> float:
        first, last = _at(before, keys), _at(after, keys)
        return max(0.0, (last - first) / interval_s) if same and interval_s > 0 else 0.0

    channel = after["channel"] is not None and before["channel"] is not None
    tiers = after["tiers"]
    return {
        "time_s": time_s,
        "interval_s": interval_s,
        "read_bytes_per_s": {
            **{name: rate("tiers", name, "read_bytes") for name in tiers},
            "source": rate("source", "fetched_bytes"),
        },
        "replied_bytes_per_s": rate("requests", "read_bytes"),
        "passthrough_opens_per_s": rate("channel", "passthrough_opens") if channel else 0.0,
        "daemon_opens_per_s": rate("channel", "cached_opens") if channel else None,
        "open_files": after["open_files"],
        "passthrough_files": after["channel"]["passthrough_inodes"] if channel else 0,
        "requests": after["requests"]["running"],
        "loading_blocks": after["loading_blocks"],
        "queued_prefetch_blocks": after["queued_prefetch_blocks"],
        "queued_write_bytes": sum(tier["queued_bytes"] for tier in tiers.values()),
        "oldest_request_s": after["oldest_request_s"],
        "source_state": after["source"]["state"],
        "loads": after.get("loads", []),
        "models": _models(before, after, interval_s),
    }


def _models(before: Mapping[str, Any], after: Mapping[str, Any], interval_s: float) -> list[Reply]:
    """The models of which something came or went, the busiest first."""
    earlier = {model["path"]: model["resident_bytes"] for model in before["models"]}
    moving = [
        {
            **{key: model[key] for key in ("path", "bytes", "resident_bytes", "eta_s")},
            "resident_bytes_per_s": (model["resident_bytes"] - earlier[model["path"]]) / interval_s,
        }
        for model in after["models"]
        if interval_s > 0 and earlier.get(model["path"], model["resident_bytes"]) != model["resident_bytes"]
    ]
    moving.sort(key=lambda model: -abs(model["resident_bytes_per_s"]))
    return moving[:_MODELS_MAX]


def _at(status: Mapping[str, Any], keys: tuple[str, ...]) -> float:
    value: Any = status
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value or 0)
