"""The few verbs that the code uses, as an interface. pyverbs_device.py has it over pyverbs; the tests have a fake.

What must hold for both: nothing here waits; a call that the device or the kernel refuses raises OSError with its errno;
after ``QueuePair.close`` has returned, its READs write to no memory any more, and may or may not still show up in
``Completions.poll``. Everything is closed in the reverse order of its making, and may be closed twice.
"""

from dataclasses import dataclass
from typing import Protocol

SUCCESS = 0
FLUSHED = 5  # IBV_WC_WR_FLUSH_ERR: ended because an earlier one failed

_STATUS = {  # enum ibv_wc_status, as a person may read it
    1: "local length error",
    2: "local queue pair error",
    4: "local protection error",
    FLUSHED: "given up after an earlier failure",
    8: "bad response",
    9: "local access error",
    10: "the peer refused the access (wrong key, or a lease that is gone)",
    11: "the peer could not do it",
    12: "the peer did not answer (retries exceeded)",
    13: "the peer was not ready (retries exceeded)",
    21: "general error",
}


def status_text(status: int) -> str:
    """What the status of a completion means."""
    return _STATUS.get(status, f"status {status}")


@dataclass(frozen=True, slots=True)
class Gid:
    """One address of a port: its place in the port's table, its 16 bytes, and which protocol it stands for."""

    index: int
    raw: bytes
    kind: str  # as the kernel says: "RoCE v2", "IB/RoCE v1"
    interface: str = ""  # the network interface it is an address of


@dataclass(frozen=True, slots=True)
class Port:
    """One port of one device. ``link`` is "Ethernet" or "InfiniBand"."""

    device: str
    number: int
    link: str
    active: bool
    gids: tuple[Gid, ...] = ()
    interfaces: tuple[str, ...] = ()  # the network interfaces on it (IPoIB)

    def __str__(self) -> str:
        return f"{self.device} port {self.number}"


@dataclass(frozen=True, slots=True)
class PortState:
    """What a connection has to know of a port."""

    lid: int
    mtu_bytes: int
    message_limit_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Most of each thing that the device takes."""

    reads_out: int  # READs under way that one queue pair asked for
    reads_in: int  # and that one queue pair answers
    region_bytes: int
    requests: int  # in one queue
    completions: int  # in one completion queue


@dataclass(frozen=True, slots=True)
class Route:
    """How a queue pair reaches its peer: from which port and GID of ours, to which address of its."""

    port: int
    gid_index: int
    link: str
    peer_gid: bytes
    peer_lid: int
    peer_queue_pair: int
    mtu_bytes: int


@dataclass(frozen=True, slots=True)
class Timing:
    """When a queue pair gives up. ``ack_timeout`` t stands for 4.096 us x 2^t; see timing.py."""

    ack_timeout: int
    retries: int


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one READ."""

    transfer: int
    status: int


class Region(Protocol):
    """Registered memory."""

    @property
    def local_key(self) -> int:
        """For our own requests."""

    @property
    def remote_key(self) -> int:
        """For the peer's."""

    def close(self) -> None:
        """Give it back to the system."""


class Completions(Protocol):
    """A completion queue with a channel of its own."""

    @property
    def fd(self) -> int:
        """Becomes readable with the first completion after ``arm``."""

    def arm(self) -> None:
        """Have the next completion make ``fd`` readable; what is there already must be polled afterwards."""

    def take_event(self) -> bool:
        """Make ``fd`` unreadable again; False if it was."""

    def poll(self, most: int) -> list[Completion]:
        """What has ended since, in the order in which it did."""

    def close(self) -> None:
        """After its queue pairs."""


class QueuePair(Protocol):
    """One reliable connection."""

    @property
    def number(self) -> int:
        """What the peer addresses."""

    def answer(self, route: Route, *, first_packet: int, reads: int) -> None:
        """Connect to a peer that reads from us; we ask for nothing on this queue pair."""

    def ask(self, route: Route, *, first_packet: int, own_first_packet: int, reads: int, timing: Timing) -> None:
        """Connect to a peer that we read from; it can do nothing to our memory."""

    def post_read(
        self, *, transfer: int, address: int, local_key: int, remote_address: int, remote_key: int, length_bytes: int,
        signaled: bool,
    ) -> None:  # fmt: skip
        """Start one READ. A failure completes whether ``signaled`` or not."""

    def close(self) -> None:
        """Gone, with all that was under way."""


class Domain(Protocol):
    """A protection domain: its queue pairs reach its regions and no others."""

    def register(self, address: int, length_bytes: int, *, remote_read: bool) -> Region:
        """Pin memory; our own READs may write to it, or, with ``remote_read``, the peer may read it and no more."""

    def queue_pair(self, completions: Completions, *, requests: int) -> QueuePair:
        """A new one, with room for so many requests."""

    def close(self) -> None:
        """After its regions and queue pairs."""


class OpenDevice(Protocol):
    """A device in use by this process."""

    @property
    def limits(self) -> DeviceLimits:
        """What it can do."""

    def port_state(self, number: int) -> PortState:
        """As it is now."""

    def domain(self) -> Domain:
        """A new protection domain."""

    def completions(self, size: int) -> Completions:
        """A new completion queue."""

    def close(self) -> None:
        """After all that was made of it."""


class Verbs(Protocol):
    """What a machine has."""

    def ports(self) -> list[Port]:
        """Every port of every device."""

    def prepare(self) -> None:
        """Load what ``open`` needs; the one call that takes long, and may be made in a thread. Raises SourceUnavailable
        with what to install."""

    def lockable_bytes(self) -> int | None:
        """The most memory that this process may have registered together; None: no limit. Raises its own limit to that
        first."""

    def open(self, device: str) -> OpenDevice:
        """Use a device, after ``prepare``. Raises OSError."""
