"""The numbers that keep peers from taking more of the server than their share, and what it counts."""

from collections import Counter
from dataclasses import dataclass, field

from tierfs.blocks.histogram import Histogram

KINDS = ("read", "lease", "catalog", "rdma-connect")  # of requests that are answered as soon as they can be
WATCH = "watch"  # answered when there is news: counted, not measured


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Each number with its reason; the defaults suit a storage node that serves some hundred clients."""

    handshake_s: float = 10.0
    frame_s: float = 10.0  # from the first byte of a request to its last; requests are some ten bytes
    idle_s: float = 60.0  # without any frame; clients ping every 15 s
    send_progress_s: float = 30.0  # a peer that takes no byte for so long is cut off
    newcomer_s: float = 0.5  # without a handshake; then who comes after it may have its place, if there is no other
    linger_s: float = 1.0  # for a refused peer to read why, before the connection is reset
    connections: int = 1024
    connections_per_address: int = 256  # a client has a handful; several daemons may share a node or a NAT
    refusals: int = 32  # peers being told that there is no room
    requests_per_connection: int = 32  # reading stops beyond
    open_blocks_per_connection: int = 4  # one is being sent, the others are being opened meanwhile
    in_flight_bytes: int = 512 << 20  # of blocks being sent, over all connections
    in_memory_bytes: int = 32 << 20  # of these, in the export's buffers and not in a file; it has few (64 MiB)
    patience_s: float = 5.0  # how long others wait for these before the oldest holder is cut off
    send_threads: int = 8
    body_limit_bytes: int = 4096  # of a request; the largest is Hello


@dataclass
class ExportStatistics:
    """What an export shows now: nothing has been published while ``publications`` is 0."""

    publications: int = 0  # of catalogs, since the start
    generation: int = 0
    entries: int = 0
    size_bytes: int = 0  # of all files in it
    catalog_bytes: int = 0  # of the encoded catalog, which each client fetches


@dataclass
class ServerStatistics:
    """Counters and what is so now. ``requests`` by kind and then by outcome: ``ok``, the code of the error that was
    sent, ``failed`` (by a bug, or by an error nobody expected), or ``lost`` (its connection ended first).
    ``latencies`` by kind, of those that were done: from the request's last byte to the answer's last byte given to the
    kernel. ``refused`` by code, of connections.
    """

    connections: int = 0
    connections_limit: int = 0
    accepted: int = 0
    sent_blocks: int = 0
    sent_bytes: int = 0
    failed_requests: int = 0
    running_requests: int = 0
    requests: dict[str, Counter[str]] = field(default_factory=lambda: {kind: Counter() for kind in (*KINDS, WATCH)})
    latencies: dict[str, Histogram] = field(default_factory=lambda: {kind: Histogram() for kind in KINDS})
    lent_blocks: int = 0  # to be read over RDMA
    lent_bytes: int = 0
    pinned_bytes: int = 0  # to be lent
    pinned_limit_bytes: int = 0
    padded_blocks: int = 0  # a file shrank or could not be read while it was sent
    timed_out: int = 0
    pushed_out: int = 0  # gave their places up before a handshake
    in_flight_bytes: int = 0
    in_flight_limit_bytes: int = 0
    most_in_flight_bytes: int = 0
    cut_offs: int = 0
    malformed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    exports: dict[str, ExportStatistics] = field(default_factory=dict)
