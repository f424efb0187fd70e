"""The numbers that keep peers from taking more of the server than their share, and what it counts."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Each number with its reason; the defaults suit a storage node that serves some hundred clients."""

    handshake_s: float = 10.0
    frame_s: float = 10.0  # from the first byte of a request to its last; requests are some ten bytes
    idle_s: float = 60.0  # without any frame; clients ping every 15 s
    send_progress_s: float = 30.0  # a peer that takes no byte for so long is cut off
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
class ServerStatistics:
    """Counters; ``malformed`` by reason class, ``refused`` by code."""

    connections: int = 0
    accepted: int = 0
    sent_blocks: int = 0
    sent_bytes: int = 0
    failed_requests: int = 0
    lent_blocks: int = 0  # to be read over RDMA
    lent_bytes: int = 0
    padded_blocks: int = 0  # a file shrank or could not be read while it was sent
    timed_out: int = 0
    in_flight_bytes: int = 0
    most_in_flight_bytes: int = 0
    cut_offs: int = 0
    malformed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
