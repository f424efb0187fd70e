"""What is rendered for Prometheus, and that the documentation and the dashboard speak of the same metrics."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tierfs.blocks.histogram import BOUNDS_S
from tierfs.cache.latency import Latencies, begin, came_from
from tierfs.control import metrics, server_metrics
from tierfs.control.exposition import Figure
from tierfs.control.metrics import render
from tierfs.server.limits import ExportStatistics, ServerStatistics
from tierfs.tiers.interface import SourceStatistics

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
ALL = (*metrics.ALL, *server_metrics.ALL)
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(status: dict[str, Any], latencies: Latencies | None = None) -> Samples:
    return parsed(render(status, latencies or Latencies()))


def parsed(page: bytes) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
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


def served() -> ServerStatistics:
    """What a server counted that did one read, refused another, and has an export of which nothing is known yet."""
    statistics = ServerStatistics(lent_bytes=9, pinned_bytes=5)
    statistics.requests["read"].update(ok=1, stale=2)
    statistics.latencies["read"].add(0.003)
    statistics.refused["busy"] = 4
    statistics.exports = {"": ExportStatistics(publications=3, generation=8, size_bytes=7), "b": ExportStatistics()}
    return statistics


def served_page() -> bytes:
    sources = {"": SourceStatistics("", state="connected", digested_bytes=6), "b": SourceStatistics("", state="down")}
    return server_metrics.render(served(), sources, uptime_s=1.5)


def test_what_a_server_counts_is_on_its_page() -> None:
    found = parsed(served_page())
    assert found["tierfs_server_requests_total", (("kind", "read"), ("outcome", "ok"))] == 1
    assert found["tierfs_server_requests_total", (("kind", "read"), ("outcome", "stale"))] == 2
    assert found["tierfs_server_request_seconds_count", (("kind", "read"),)] == 1
    assert found["tierfs_server_request_seconds_bucket", (("kind", "read"), ("le", "0.005"))] == 1
    assert found["tierfs_server_request_seconds_count", (("kind", "lease"),)] == 0
    assert found["tierfs_server_refused_connections_total", (("reason", "busy"),)] == 4
    assert found["tierfs_server_lent_bytes_total", ()] == 9
    assert found["tierfs_server_export_generation", (("export", "/"),)] == 8
    assert found["tierfs_server_export_digested_bytes", (("export", "/"),)] == 6
    assert found["tierfs_server_export_publications_total", (("export", "b"),)] == 0
    assert found["tierfs_server_export_state", (("export", "b"), ("state", "down"))] == 1
    assert found["tierfs_server_export_state", (("export", "/"), ("state", "down"))] == 0
    assert found["tierfs_server_uptime_seconds", ()] == 1.5


def test_names_are_as_prometheus_wants_them() -> None:
    names = [figure.name for figure in ALL]
    assert len(names) == len(set(names))
    for figure in ALL:
        assert re.fullmatch(r"tierfs_[a-z_]+", figure.name)
        assert (figure.kind == "counter") == figure.name.endswith("_total"), figure.name
        stars = figure.at.count("*") + bool(figure.states)
        assert not figure.at or len(figure.labels) == stars, figure.name


@pytest.mark.parametrize(
    ("heading", "all_of_it", "page"),
    [
        ("## Every metric\n", metrics.ALL, render(STATUS, Latencies())),
        ("## Every metric of a server\n", server_metrics.ALL, served_page()),
    ],
    ids=["mount", "server"],
)
def test_the_documentation_has_each_metric_as_it_is_rendered(
    heading: str, all_of_it: tuple[Figure, ...], page: bytes
) -> None:
    section = PAGE.partition(heading)[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(tierfs_\w+)` \| (\w+) \| (.*) \| (.+) \|$", section, re.MULTILINE)
    assert rows == [
        (figure.name, figure.kind, ", ".join(f"`{label}`" for label in figure.labels), figure.help)
        for figure in all_of_it
    ]
    text = page.decode()
    assert set(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)) == {(name, kind) for name, kind, *_ in rows}
    assert set(re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE)) == {(row[0], row[3]) for row in rows}


def asked(expression: str) -> set[str]:
    return set(re.findall(r"tierfs_\w+", expression))


KNOWN = {figure.name for figure in ALL} | {
    f"{figure.name}{suffix}" for figure in ALL if figure.kind == "histogram" for suffix in ("_bucket", "_count", "_sum")
}


def test_every_expression_of_the_page_names_metrics_that_are_there() -> None:
    questions = PAGE.partition("## What to ask")[2].partition("## Every metric")[0]
    assert asked(questions) and asked(questions) <= KNOWN


def test_every_expression_of_the_dashboard_names_metrics_and_labels_that_are_there() -> None:
    labels = {"instance", "le"} | {label for figure in ALL for label in figure.labels}
    targets = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]
    assert len(targets) > 20
    assert {name for target in targets for name in asked(target["expr"]) if "_server_" in name}
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
