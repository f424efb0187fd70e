"""The figures of a server as Prometheus reads them: one table, and what it is filled from.

app/scraped.py calls it for each scrape. Pure: counters in, text out. What must hold: a name keeps its meaning; each is
in docs/METRICS.md with these words; no label has more values than the configuration has exports or the protocol kinds
and codes (peers come and go: they are in the log).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from prometheus_client.core import Metric

from tierfs import __version__
from tierfs.control import exposition
from tierfs.control.exposition import Figure, family_of, histograms, info
from tierfs.server.limits import ServerStatistics
from tierfs.tiers.interface import SourceStatistics


def _server(kind: Literal["counter", "gauge"], name: str, at: str, text: str, labels: tuple[str, ...] = ()) -> Figure:
    return Figure(f"tierfs_server_{name}", kind, at, text, labels)


def _export(kind: Literal["counter", "gauge"], name: str, key: str, text: str) -> Figure:
    return Figure(f"tierfs_server_export_{name}", kind, f"exports.*.{key}", text, ("export",))


LATENCY = Figure(
    "tierfs_server_request_seconds", "histogram", "",
    "Time to answer a request that was done, until the last byte is in the kernel's hands",
    ("kind",),
)  # fmt: skip
INFO = Figure(
    "tierfs_server_info", "gauge", "", "Always 1; the label says which tierfs this is", ("version",),
)  # fmt: skip
FIGURES: tuple[Figure, ...] = (
    _server("gauge", "uptime_seconds", "uptime_s", "Age of the server; counters start with it"),
    # -- requests
    _server(
        "counter", "requests_total", "requests.*.*",
        "Requests that are over: ok, the code of the error sent, failed (a bug), or lost with its connection",
        ("kind", "outcome"),
    ),
    _server("gauge", "running_requests", "running_requests", "Requests not answered yet; waiting for news is none"),
    _server("counter", "sent_blocks_total", "sent_blocks", "Blocks, and parts of one, sent over TCP"),
    _server("counter", "sent_bytes_total", "sent_bytes", "Bytes of these"),
    _server("counter", "padded_blocks_total", "padded_blocks", "Blocks whose file ended or failed meanwhile"),
    _server("gauge", "in_flight_bytes", "in_flight_bytes", "Bytes of blocks on their way to clients over TCP"),
    _server("gauge", "in_flight_limit_bytes", "in_flight_limit_bytes", "The most that may be (server.memory_limit)"),
    # -- RDMA
    _server("counter", "lent_blocks_total", "lent_blocks", "Blocks, and parts of one, lent to be read over RDMA"),
    _server("counter", "lent_bytes_total", "lent_bytes", "Bytes of these"),
    _server("gauge", "pinned_bytes", "pinned_bytes", "Memory registered for clients with RDMA"),
    _server("gauge", "pinned_limit_bytes", "pinned_limit_bytes", "The most that may be (server.rdma_memory)"),
    # -- connections
    _server("gauge", "connections", "connections", "Connections that are up; a mount has source.connections of them"),
    _server("gauge", "connections_limit", "connections_limit", "The most that may be (server.max_connections)"),
    _server("counter", "accepted_connections_total", "accepted", "Connections that came, also those refused"),
    _server(
        "counter", "refused_connections_total", "refused.*",
        "Connections refused, and why: busy (too many), authentication, not-found (no such export), protocol",
        ("reason",),
    ),
    _server("counter", "malformed_peers_total", "malformed", "Connections ended over what is no message"),
    _server("counter", "timed_out_peers_total", "timed_out", "Connections ended over a silence"),
    _server("counter", "pushed_out_peers_total", "pushed_out", "Connections pushed out before their handshake"),
    _server("counter", "cut_off_peers_total", "cut_offs", "Connections ended since others waited for them"),
    # -- exports
    Figure(
        "tierfs_server_export_state", "gauge", "exports.*.state",
        "1 for the state the export's directory is in, 0 for the others",
        ("export", "state"), ("connecting", "connected", "down", "closed"),
    ),
    _export("counter", "publications_total", "publications", "Catalogs published"),
    _export("gauge", "generation", "generation", "Grows with each change of the tree"),
    _export("gauge", "entries", "entries", "Names in the tree"),
    _export("gauge", "bytes", "size_bytes", "Of all files in the tree"),
    _export("gauge", "catalog_bytes", "catalog_bytes", "Of the catalog, which each client fetches when it changes"),
    _export("gauge", "digested_bytes", "digested_bytes", "Of the files, digested in the background"),
    _export("gauge", "digest_goal_bytes", "digest_total_bytes", "Of the files, to be digested in all"),
)  # fmt: skip
ALL: tuple[Figure, ...] = (INFO, LATENCY, *FIGURES)


def render(statistics: ServerStatistics, sources: Mapping[str, SourceStatistics], *, uptime_s: float) -> bytes:
    """The text exposition format 0.0.4. ``sources``: what each export reads from, by the export's name."""
    return exposition.render(_families(statistics, sources, uptime_s))


def _families(
    statistics: ServerStatistics, sources: Mapping[str, SourceStatistics], uptime_s: float
) -> Iterator[Metric]:
    values: dict[str, Any] = {
        **vars(statistics),
        "version": __version__,
        "uptime_s": uptime_s,
        # A label without a value is none to Prometheus.
        "exports": {name or "/": {**vars(sources[name]), **vars(now)} for name, now in statistics.exports.items()},
    }
    yield info(INFO, values)
    yield histograms(LATENCY, statistics.latencies)
    for figure in FIGURES:
        yield family_of(figure, values)
