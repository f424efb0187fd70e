"""The rates `tierfs top` shows, from two answers of `status`."""

from typing import Any

from tierfs.control.rates import sample


def status(**changes: Any) -> dict[str, Any]:
    """A status with the keys that are looked at."""
    return {
        "daemon": {"pid": 1},
        "channel": None,
        "tiers": {"warm": {"read_bytes": 0, "queued_bytes": 5}},
        "source": {"fetched_bytes": 0, "state": "connected"},
        "requests": {"read_bytes": 0, "running": 3},
        "open_files": 2,
        "loading_blocks": 4,
        "queued_prefetch_blocks": 6,
        "oldest_request_s": 0.5,
        "models": [],
        **changes,
    }


def model(path: str, resident: int) -> dict[str, Any]:
    return {"path": path, "bytes": 100, "resident_bytes": resident, "eta_s": None}


def test_counters_become_rates() -> None:
    after = status(
        tiers={"warm": {"read_bytes": 300, "queued_bytes": 7}},
        source={"fetched_bytes": 50, "state": "down"},
        requests={"read_bytes": 80, "running": 1},
    )
    one = sample(status(), after, interval_s=2.0, time_s=9.0)
    assert one["read_bytes_per_s"] == {"warm": 150.0, "source": 25.0}
    assert (one["replied_bytes_per_s"], one["requests"], one["queued_write_bytes"]) == (40.0, 1, 7)
    assert one["loads"] == []
    loading = [{"path": "m", "kind": "reading"}]
    assert sample(status(), status(loads=loading), interval_s=2.0, time_s=9.0)["loads"] == loading
    assert (one["source_state"], one["daemon_opens_per_s"], one["time_s"]) == ("down", None, 9.0)


def test_models_that_move_are_told_the_busiest_first() -> None:
    before = status(models=[model("a", 10), model("b", 10), model("c", 10)])
    after = status(models=[model("a", 20), model("b", 10), model("c", 90), model("new", 50)])
    moving = sample(before, after, interval_s=1.0, time_s=0.0)["models"]
    assert [(one["path"], one["resident_bytes_per_s"]) for one in moving] == [("c", 80.0), ("a", 10.0)]


def test_opens_are_counted_under_a_channel() -> None:
    def channel(passthrough: int, cached: int) -> dict[str, Any]:
        return status(channel={"passthrough_opens": passthrough, "cached_opens": cached, "passthrough_inodes": 1})

    one = sample(channel(1, 5), channel(4, 5), interval_s=1.0, time_s=0.0)
    assert (one["passthrough_opens_per_s"], one["daemon_opens_per_s"], one["passthrough_files"]) == (3.0, 0.0, 1)


def test_another_daemon_begins_anew() -> None:
    after = status(daemon={"pid": 2}, source={"fetched_bytes": 70, "state": "connected"})
    one = sample(status(), after, interval_s=1.0, time_s=0.0)
    assert one["read_bytes_per_s"] == {"warm": 0.0, "source": 0.0}
