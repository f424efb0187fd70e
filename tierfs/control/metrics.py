"""The figures of a mount as Prometheus reads them: one table, from what `status` knows to the text exposition format.

app/scraped.py calls it for each scrape. Pure: a status and the latencies in, text out. What must hold: a name keeps
its meaning; each is in docs/METRICS.md with these words; no label has more values than a machine has devices or the
kernel operations (models come and go: they are in `tierfs status --json`).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from prometheus_client.core import Metric

from tierfs.cache.latency import Latencies
from tierfs.control import exposition
from tierfs.control.exposition import Figure, family_of, histograms, info


def _tier(kind: Literal["counter", "gauge"], name: str, key: str, text: str) -> Figure:
    return Figure(f"tierfs_tier_{name}", kind, f"tiers.*.{key}", text, ("tier",))


def _channel(kind: Literal["counter", "gauge"], name: str, key: str, text: str) -> Figure:
    return Figure(f"tierfs_channel_{name}", kind, f"channel.{key}", text)


LATENCY = Figure(
    "tierfs_read_seconds", "histogram", "",
    "Time to answer a read of the kernel, by the farthest place its bytes came from: memory, hot, warm, source",
    ("place",),
)  # fmt: skip
INFO = Figure(
    "tierfs_info", "gauge", "", "Always 1; the labels say which mount and which tierfs this is",
    ("mountpoint", "version", "mode"),
)  # fmt: skip
FIGURES: tuple[Figure, ...] = (
    Figure("tierfs_uptime_seconds", "gauge", "daemon.uptime_s", "Age of the daemon; counters start with it"),
    # -- requests
    Figure("tierfs_reads_total", "counter", "requests.reads", "Reads answered by the daemon"),
    Figure("tierfs_read_bytes_total", "counter", "requests.read_bytes", "Bytes of the reads answered"),
    Figure("tierfs_failed_reads_total", "counter", "requests.failed", "Reads answered with an error"),
    Figure("tierfs_running_reads", "gauge", "requests.running", "Reads not answered yet"),
    Figure("tierfs_oldest_request_seconds", "gauge", "oldest_request_s", "Age of the oldest running read; 0 if none"),
    Figure("tierfs_open_files", "gauge", "open_files", "Versions of files that are open"),
    # -- queues and memory
    Figure("tierfs_loading_blocks", "gauge", "loading_blocks", "Blocks on their way into memory"),
    Figure("tierfs_prefetch_queued_blocks", "gauge", "queued_prefetch_blocks", "Blocks planned, and not begun"),
    Figure(
        "tierfs_prefetch_dropped_blocks_total", "counter", "dropped_prefetch_blocks",
        "Planned blocks that a full queue refused",
    ),
    Figure("tierfs_memory_limit_bytes", "gauge", "memory.limit_bytes", "The most that buffers may take"),
    Figure("tierfs_memory_used_bytes", "gauge", "memory.used_bytes", "What buffers have taken; it does not shrink"),
    Figure("tierfs_memory_hit_blocks_total", "counter", "memory.hit_blocks", "Parts of reads answered from memory"),
    Figure(
        "tierfs_memory_dropped_unread_blocks_total", "counter", "memory.dropped_unread_blocks",
        "Blocks that were prefetched and dropped unread",
    ),
    # -- local tiers
    _tier("gauge", "capacity_bytes", "capacity_bytes", "The tier's limit in force"),
    _tier("gauge", "used_bytes", "used_bytes", "Allocated in the tier, or accepted for writing"),
    _tier("gauge", "dying_bytes", "dying_bytes", "Of the used bytes, evicted but still open or mapped by a reader"),
    _tier("gauge", "queued_bytes", "queued_bytes", "Waiting to be written"),
    _tier("gauge", "objects", "objects", "Contents with a block here"),
    _tier("counter", "hit_blocks_total", "hit_blocks", "Blocks, and reads that begin one, that were read from here"),
    _tier("counter", "read_bytes_total", "read_bytes", "Read from here by the daemon or the channel"),
    _tier("counter", "written_blocks_total", "written_blocks", "Blocks that became resident"),
    _tier("counter", "written_bytes_total", "written_bytes", "Bytes of the blocks that became resident"),
    _tier("counter", "evicted_blocks_total", "evicted_blocks", "Blocks removed to make room"),
    _tier("counter", "bypassed_blocks_total", "bypassed_blocks", "Blocks not kept, for nothing colder may give way"),
    _tier("counter", "skipped_blocks_total", "skipped_blocks", "Blocks not kept, for the write queue was full"),
    _tier("counter", "corrupt_blocks_total", "corrupt_blocks", "Blocks dropped, since they did not match their digest"),
    _tier("counter", "failed_reads_total", "failed_reads", "Fallbacks: reads that the medium failed"),
    _tier("counter", "failed_writes_total", "failed_writes", "Writes that the medium failed"),
    _tier("counter", "media_errors_total", "media_errors", "Of the failed reads, those a passthrough reader met first"),
    _tier("counter", "handed_out_opens_total", "handed_out", "Opens that were given a whole file (passthrough)"),
    Figure(
        "tierfs_tier_kept_back_opens_total", "counter", "tiers.*.kept_back.*",
        "Fallbacks: opens of a file that is all here that went through the daemon, and why", ("tier", "reason"),
    ),
    Figure(
        "tierfs_tier_state", "gauge", "tiers.*.state", "1 for the state the tier is in, 0 for the others",
        ("tier", "state"), ("ok", "degraded", "failed"),
    ),
    Figure(
        "tierfs_device_state", "gauge", "tiers.*.devices.*.state",
        "1 for the state a tier's directory is in, 0 for the others",
        ("tier", "path", "state"), ("ok", "degraded", "lost"),
    ),
    Figure(
        "tierfs_device_free_bytes", "gauge", "tiers.*.devices.*.free_bytes", "Free where a tier's directory lies",
        ("tier", "path"),
    ),
    Figure(
        "tierfs_device_used_bytes", "gauge", "tiers.*.devices.*.used_bytes", "Used in a tier's directory",
        ("tier", "path"),
    ),
    # -- source
    Figure(
        "tierfs_source_state", "gauge", "source.state", "1 for the state the source is in, 0 for the others",
        ("state",), ("connecting", "connected", "down", "closed"),
    ),
    Figure("tierfs_source_state_age_seconds", "gauge", "source.state_age_s", "For how long it is in that state"),
    Figure("tierfs_source_connections", "gauge", "source.connections", "Connections that are up; 0 for a directory"),
    Figure("tierfs_source_fetched_blocks_total", "counter", "source.fetched_blocks", "Blocks received, right or wrong"),
    Figure("tierfs_source_fetched_bytes_total", "counter", "source.fetched_bytes", "Bytes received, right or wrong"),
    Figure(
        "tierfs_source_transport", "gauge", "source.transport", "1 for how blocks come now, 0 for the others",
        ("transport",), ("rdma", "tcp", "file"),
    ),
    Figure("tierfs_source_rdma_bytes_total", "counter", "source.rdma_bytes", "Of the bytes received, those by RDMA"),
    Figure(
        "tierfs_source_rdma_failures_total", "counter", "source.rdma_failures",
        "Fallbacks: blocks that RDMA did not bring, and TCP had to",
    ),
    Figure("tierfs_source_failed_requests_total", "counter", "source.failed_requests", "Requests to it that failed"),
    Figure("tierfs_source_retries_total", "counter", "source.retries", "Loads that were tried again"),
    Figure(
        "tierfs_source_corrupt_blocks_total", "counter", "source.corrupt_blocks",
        "Blocks that did not match their digest on arrival",
    ),
    # -- catalog and promotion
    Figure("tierfs_catalog_generation", "gauge", "catalog.generation", "Grows with each change of the tree"),
    Figure("tierfs_catalog_entries", "gauge", "catalog.entries", "Names in the tree"),
    Figure("tierfs_catalog_bytes", "gauge", "catalog.bytes", "Of all files in the tree"),
    Figure("tierfs_promoted_models_total", "counter", "promotion.promoted_models", "Models brought from warm to hot"),
    Figure("tierfs_promoted_bytes_total", "counter", "promotion.promoted_bytes", "Bytes brought from warm to hot"),
    Figure("tierfs_promotion_waiting_models", "gauge", "promotion.waiting_models", "Models that wait for that"),
    Figure(
        "tierfs_promotion_bypassed_models_total", "counter", "promotion.bypassed_models",
        "Models with no room in hot beside what is hotter",
    ),
    # -- channel (not in direct mode)
    Figure(
        "tierfs_channel_requests_total", "counter", "channel.requests.*", "Requests of the kernel", ("operation",),
    ),
    _channel("gauge", "pending_requests", "pending", "Requests not answered yet"),
    _channel("gauge", "queued_sends", "queued_sends", "Of the requests not answered, those not sent to a daemon yet"),
    _channel("gauge", "outstanding_leases", "outstanding_leases", "Replies whose copy is not known to be over"),
    _channel("gauge", "passthrough_files", "passthrough_inodes", "Files that are read without tierfs now"),
    _channel("counter", "passthrough_opens_total", "passthrough_opens", "Opens that read without tierfs"),
    _channel("counter", "cached_opens_total", "cached_opens", "Opens that read through the daemon"),
    _channel(
        "counter", "held_back_opens_total", "held_back_opens",
        "Fallbacks: opens of a whole file that somebody has open through the daemon",
    ),
    _channel("counter", "refused_opens_total", "refused_opens", "Fallbacks: the kernel did not take the tier's file"),
    _channel("counter", "late_handouts_total", "late_handouts", "Fallbacks: no tier had the file ready in time"),
    _channel("counter", "failed_copies_total", "failed_copies", "Copies of a reply that the medium failed"),
    _channel("counter", "copied_bytes_total", "copied_bytes", "Copied into replies"),
    _channel("counter", "daemon_starts_total", "daemon_starts", "Daemons of this mount, the first one counted"),
    _channel("counter", "replays_total", "replays", "Requests sent again to another daemon"),
    _channel("counter", "given_up_requests_total", "given_up_requests", "Requests of which daemon after daemon died"),
    _channel("counter", "refused_requests_total", "refused_requests", "Requests that met a full table"),
)  # fmt: skip
ALL: tuple[Figure, ...] = (INFO, LATENCY, *FIGURES)


def render(status: Mapping[str, Any], latencies: Latencies) -> bytes:
    """The text exposition format 0.0.4. What ``status`` does not have (a tier, a channel) has no sample."""
    return exposition.render(_families(status, latencies))


def _families(status: Mapping[str, Any], latencies: Latencies) -> Iterator[Metric]:
    yield info(INFO, status)
    yield histograms(LATENCY, latencies.by_place)
    for figure in FIGURES:
        yield family_of(figure, status)
