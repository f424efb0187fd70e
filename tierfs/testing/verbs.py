"""Fake RDMA devices in one process: the contract of transport/rdma/verbs.py, with faults on demand.

A ``Fabric`` is the network; ``machine`` gives one host's verbs on it. READs really copy memory, and only what keys,
domains and rights allow; a queue pair that is closed copies nothing any more. What is open is counted, so that a test
can say that nothing leaked.
"""

import ctypes
import errno
import os
import random
from collections import Counter
from dataclasses import dataclass, field

from tierfs.transport.rdma.verbs import (
    FLUSHED,
    SUCCESS,
    Completion,
    Completions,
    DeviceLimits,
    Gid,
    Port,
    PortState,
    Route,
    Timing,
)

REFUSED, NO_ANSWER, GENERAL = 10, 12, 21
LIMITS = DeviceLimits(reads_out=16, reads_in=16, region_bytes=1 << 40, requests=1024, completions=4096)


def roce_port(host: bytes, *, device: str = "fake0", active: bool = True) -> Port:
    """A port with this IPv4 address."""
    gid = Gid(1, bytes(10) + b"\xff\xff" + host, "RoCE v2")
    return Port(device, 1, "Ethernet", active, (Gid(0, b"\xfe\x80" + bytes(13) + b"\x01", "RoCE v2"), gid))


LOOPBACK = roce_port(b"\x7f\x00\x00\x01")


@dataclass(eq=False)
class _Read:
    pair: "FakeQueuePair"
    transfer: int
    address: int
    local_key: int
    remote_address: int
    remote_key: int
    length_bytes: int
    signaled: bool


@dataclass
class Fabric:
    """Every fake device of a test. The switches take effect with the next READ."""

    seed: int = 1
    hold: bool = False  # READs wait for release()
    deaf: bool = False  # READs are lost, and nothing ever completes
    late: bool = False  # completions of a queue pair that is closed still come
    fail_next: list[int] = field(default_factory=list)  # statuses that the next READs end with
    pin_limit_bytes: int | None = None  # RLIMIT_MEMLOCK
    removed: set[str] = field(default_factory=set)  # devices that are gone
    open: Counter[str] = field(default_factory=Counter)  # what is not closed, by kind
    read_bytes: int = 0
    pinned_bytes: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._numbers = 16
        self._held: list[_Read] = []
        self.pairs: dict[int, FakeQueuePair] = {}
        self.regions: dict[int, FakeRegion] = {}

    def machine(self, *ports: Port) -> "FakeVerbs":
        """The verbs of a host with these ports (one on 127.0.0.1 if none are given)."""
        return FakeVerbs(self, list(ports) or [LOOPBACK])

    @property
    def held(self) -> int:
        """READs that wait for release()."""
        return len(self._held)

    def release(self, *, shuffle: bool = False) -> None:
        """Carry out the READs that are held; shuffled between queue pairs, but in order on each, as on a network."""
        held, self._held = self._held, []
        while held:
            first = self._random.choice(held) if shuffle else held[0]
            read = next(one for one in held if one.pair is first.pair)
            held.remove(read)
            self._carry_out(read)

    def number(self) -> int:
        """One that nothing else has."""
        self._numbers += 1
        return self._numbers

    def start(self, read: _Read) -> None:
        """A READ was posted."""
        if self.hold:
            self._held.append(read)
        elif not self.deaf:
            self._carry_out(read)

    def _carry_out(self, read: _Read) -> None:
        pair = read.pair
        if pair.closed and not self.late:
            return
        status = FLUSHED if pair.broken or pair.closed else self._outcome(read)
        if status != SUCCESS:
            pair.broken = True
        if status != SUCCESS or read.signaled:
            pair.completions.add(Completion(read.transfer, status))

    def _outcome(self, read: _Read) -> int:
        if self.fail_next:
            return self.fail_next.pop(0)
        peer = self.pairs.get(read.pair.peer)
        if peer is None or peer.peer != read.pair.number:
            return NO_ANSWER
        remote, local = self.regions.get(read.remote_key), self.regions.get(read.local_key)
        if remote is None or not remote.remote_read or remote.domain is not peer.domain:
            return REFUSED
        if not remote.holds(read.remote_address, read.length_bytes):
            return REFUSED
        assert local is not None and not local.remote_read and local.domain is read.pair.domain, "a key of our own"
        assert local.holds(read.address, read.length_bytes), "a READ writes inside of its region"
        ctypes.memmove(read.address, read.remote_address, read.length_bytes)
        self.read_bytes += read.length_bytes
        return SUCCESS


class _Counted:
    """Something that is open until it is closed."""

    kind = ""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.closed = False
        fabric.open[self.kind] += 1

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.fabric.open[self.kind] -= 1
            self.fabric.open += Counter()  # forgets zeros


class FakeVerbs:
    """Implements ``verbs.Verbs``."""

    def __init__(self, fabric: Fabric, ports: list[Port]) -> None:
        self.fabric = fabric
        self.prepared = False
        self._ports = ports

    def ports(self) -> list[Port]:
        return [port for port in self._ports if port.device not in self.fabric.removed]

    def prepare(self) -> None:
        self.prepared = True

    def lockable_bytes(self) -> int | None:
        return self.fabric.pin_limit_bytes

    def open(self, device: str) -> "FakeDevice":
        assert self.prepared, "open comes after prepare"
        if device not in [port.device for port in self.ports()]:
            raise OSError(errno.ENODEV, "no such device")
        return FakeDevice(self.fabric, device)


class FakeDevice(_Counted):
    """Implements ``verbs.OpenDevice``."""

    kind = "device"
    limits = LIMITS

    def __init__(self, fabric: Fabric, name: str) -> None:
        super().__init__(fabric)
        self.name = name

    def check(self) -> None:
        if self.name in self.fabric.removed:
            raise OSError(errno.EIO, "the device was removed")

    def port_state(self, number: int) -> PortState:
        self.check()
        return PortState(lid=0, mtu_bytes=1024, message_limit_bytes=1 << 30)

    def domain(self) -> "FakeDomain":
        self.check()
        return FakeDomain(self)

    def completions(self, size: int) -> "FakeCompletions":
        self.check()
        return FakeCompletions(self, size)


class FakeDomain(_Counted):
    """Implements ``verbs.Domain``."""

    kind = "domain"

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(device.fabric)
        self.device = device

    def register(self, address: int, length_bytes: int, *, remote_read: bool) -> "FakeRegion":
        self.device.check()
        limit_bytes = self.fabric.pin_limit_bytes
        if limit_bytes is not None and self.fabric.pinned_bytes + length_bytes > limit_bytes:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return FakeRegion(self, address, length_bytes, remote_read)

    def queue_pair(self, completions: Completions, *, requests: int) -> "FakeQueuePair":
        assert isinstance(completions, FakeCompletions), "one of the same device"
        self.device.check()
        return FakeQueuePair(self, completions, requests)


class FakeRegion(_Counted):
    """Implements ``verbs.Region``."""

    kind = "region"

    def __init__(self, domain: FakeDomain, address: int, length_bytes: int, remote_read: bool) -> None:
        super().__init__(domain.fabric)
        self.domain, self.address, self.length_bytes, self.remote_read = domain, address, length_bytes, remote_read
        self.local_key = self.remote_key = self.fabric.number()
        self.fabric.regions[self.local_key] = self
        self.fabric.pinned_bytes += length_bytes

    def holds(self, address: int, length_bytes: int) -> bool:
        return self.address <= address and address + length_bytes <= self.address + self.length_bytes

    def close(self) -> None:
        if self.fabric.regions.pop(self.local_key, None) is not None:
            self.fabric.pinned_bytes -= self.length_bytes
        super().close()


class FakeCompletions(_Counted):
    """Implements ``verbs.Completions``."""

    kind = "completions"

    def __init__(self, device: FakeDevice, size: int) -> None:
        super().__init__(device.fabric)
        self._device = device
        self._size = size
        self._found: list[Completion] = []
        self._armed = False
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def add(self, completion: Completion) -> None:
        assert len(self._found) < self._size, "a real queue would have overflowed"
        if self.closed:
            return
        self._found.append(completion)
        if self._armed:
            self._armed = False
            os.eventfd_write(self.fd, 1)

    def arm(self) -> None:
        self._device.check()
        self._armed = True

    def take_event(self) -> bool:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return False
        return True

    def poll(self, most: int) -> list[Completion]:
        self._device.check()
        taken, self._found = self._found[:most], self._found[most:]
        return taken

    def close(self) -> None:
        if not self.closed:
            os.close(self.fd)
        super().close()


class FakeQueuePair(_Counted):
    """Implements ``verbs.QueuePair``."""

    kind = "queue_pair"

    def __init__(self, domain: FakeDomain, completions: FakeCompletions, requests: int) -> None:
        super().__init__(domain.fabric)
        self.domain, self.completions = domain, completions
        self.number = self.fabric.number()
        self.peer = 0
        self.broken = False
        self._asks = False
        self._requests = requests
        self.fabric.pairs[self.number] = self

    def answer(self, route: Route, *, first_packet: int, reads: int) -> None:
        self.domain.device.check()
        self.peer = route.peer_queue_pair

    def ask(self, route: Route, *, first_packet: int, own_first_packet: int, reads: int, timing: Timing) -> None:
        self.domain.device.check()
        self.peer = route.peer_queue_pair
        self._asks = True

    def post_read(
        self, *, transfer: int, address: int, local_key: int, remote_address: int, remote_key: int, length_bytes: int,
        signaled: bool,
    ) -> None:  # fmt: skip
        self.domain.device.check()
        assert not self.closed and self._asks, "only a queue pair that is ready can be asked"
        self.fabric.start(_Read(self, transfer, address, local_key, remote_address, remote_key, length_bytes, signaled))

    def close(self) -> None:
        self.fabric.pairs.pop(self.number, None)
        super().close()
