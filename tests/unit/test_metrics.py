"""What is rendered for Prometheus, and that the documentation and the dashboard speak of the same metrics."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tierfs.cache.latency import BOUNDS_S, Latencies, begin, came_from
from tierfs.control.metrics import ALL, FIGURES, LATENCY, render

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/METRICS.md").read_text()
DASHBOARD = json.loads((ROOT / "examples/grafana/tierfs.json").read_text())
STATUS: dict[str, Any] = {
    "mountpoint": '/mnt/"a"\n\udcff', "version": "0.1.0", "mode": "direct",
    "daemon": {"uptime_s": 12.5},
    "channel": None,
    "source": {"state": "down", "fetched_bytes": 10**15},
    "requests": {"reads": 3},
    "oldest_request_s": 0.25,
    "tiers": {
        "hot": {"state": "ok", "used_bytes": 7, "kept_back": {}, "devices": []},
        "warm": {
            "state": "degraded", "used_bytes": 8, "kept_back": {"being written": 2, "not verified": 1},
            "devices": [{"path": "/a", "state": "ok", "free_bytes": 5}, {"path": "/b", "state": "lost"}],
        },
    },
}  # fmt: skip
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(status: dict[str, Any], latencies: Latencies | None = None) -> Samples:
    text = render(status, latencies or Latencies()).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_figures_are_those_of_status_and_what_is_not_there_has_no_sample() -> None:
    found = samples(STATUS)
    assert found["tierfs_uptime_seconds", ()] == 12.5
    assert found["tierfs_reads_total", ()] == 3
    assert found["tierfs_oldest_request_seconds", ()] == 0.25
    assert found["tierfs_source_fetched_bytes_total", ()] == 10**15
    assert found["tierfs_tier_used_bytes", (("tier", "hot"),)] == 7
    assert found["tierfs_tier_used_bytes", (("tier", "warm"),)] == 8
    assert found["tierfs_tier_kept_back_opens_total", (("reason", "being written"), ("tier", "warm"))] == 2
    assert found["tierfs_device_free_bytes", (("path", "/a"), ("tier", "warm"))] == 5
    assert not [name for name, _ in found if name.startswith("tierfs_channel")]


def test_one_state_of_all_is_1() -> None:
    found = samples(STATUS)
    states = {dict(labels)["state"]: value for (name, labels), value in found.items() if name == "tierfs_source_state"}
    assert states == {"connecting": 0, "connected": 0, "down": 1, "closed": 0}
    assert found["tierfs_tier_state", (("state", "degraded"), ("tier", "warm"))] == 1
    assert found["tierfs_tier_state", (("state", "ok"), ("tier", "warm"))] == 0
    assert found["tierfs_device_state", (("path", "/b"), ("state", "lost"), ("tier", "warm"))] == 1


def test_a_mountpoint_of_any_bytes_is_a_label() -> None:
    ((_, labels),) = [key for key in samples(STATUS) if key[0] == "tierfs_info"]
    assert dict(labels) == {"mountpoint": '/mnt/"a"\n\\udcff', "version": "0.1.0", "mode": "direct"}


def test_latencies_are_a_cumulative_histogram_for_each_place() -> None:
    latencies = Latencies()
    for seconds in (0.00001, 0.00005, 0.003, 1e6):
        latencies.add("warm", seconds)
    found = samples(STATUS, latencies)

    def bucket(bound: str, place: str = "warm") -> float:
        return found["tierfs_read_seconds_bucket", (("le", bound), ("place", place))]

    assert [bucket(bound) for bound in ("5e-05", "0.0001", "0.0025", "0.005", "60.0", "+Inf")] == [2, 2, 2, 3, 3, 4]
    assert bucket("+Inf", "source") == 0
    assert found["tierfs_read_seconds_count", (("place", "warm"),)] == 4
    assert found["tierfs_read_seconds_sum", (("place", "warm"),)] == pytest.approx(1e6, rel=1e-3)
    assert list(BOUNDS_S) == sorted(set(BOUNDS_S))


def test_a_request_counts_for_its_farthest_place() -> None:
    request = begin()
    assert request.place == "memory"
    for place, farthest in (("warm", "warm"), ("hot", "warm"), ("source", "source"), ("memory", "source")):
        came_from(place)
        assert request.place == farthest
    assert begin().place == "memory" and request.place == "source"


def test_names_are_as_prometheus_wants_them() -> None:
    names = [figure.name for figure in ALL]
    assert len(names) == len(set(names))
    for figure in ALL:
        assert re.fullmatch(r"tierfs_[a-z_]+", figure.name)
        assert (figure.kind == "counter") == figure.name.endswith("_total"), figure.name
        stars = figure.at.count("*") + bool(figure.states)
        assert figure not in FIGURES or len(figure.labels) == stars, figure.name


def test_the_page_has_each_metric_as_it_is_rendered() -> None:
    rows = re.findall(r"^\| `(tierfs_\w+)` \| (\w+) \| (.*) \| (.+) \|$", PAGE, re.MULTILINE)
    assert rows == [
        (figure.name, figure.kind, ", ".join(f"`{label}`" for label in figure.labels), figure.help) for figure in ALL
    ]
    text = render(STATUS, Latencies()).decode()
    assert set(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)) == {(name, kind) for name, kind, *_ in rows}
    assert set(re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE)) == {(row[0], row[3]) for row in rows}


def asked(expression: str) -> set[str]:
    return set(re.findall(r"tierfs_\w+", expression))


KNOWN = {figure.name for figure in ALL} | {f"{LATENCY.name}{suffix}" for suffix in ("_bucket", "_count", "_sum")}


def test_every_expression_of_the_page_names_metrics_that_are_there() -> None:
    questions = PAGE.partition("## What to ask")[2].partition("## Every metric")[0]
    assert asked(questions) and asked(questions) <= KNOWN


def test_every_expression_of_the_dashboard_names_metrics_and_labels_that_are_there() -> None:
    labels = {"instance", "le"} | {label for figure in ALL for label in figure.labels}
    targets = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]
    assert len(targets) > 20
    for target in targets:
        assert asked(target["expr"]) and asked(target["expr"]) <= KNOWN, target["expr"]
        for matchers in re.findall(r"\{([^}]*)\}", target["expr"]):
            assert set(re.findall(r'(\w+)(?==~?"|!=")', matchers)) <= labels, target["expr"]
        for words in re.findall(r"by \(([^)]*)\)", target["expr"]):
            assert {word.strip() for word in words.split(",")} <= labels, target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        assert asked(str(variable["query"])) <= KNOWN
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))
