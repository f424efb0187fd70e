"""The interface of verbs.py over pyverbs 44 (rdma-core 44, Debian 12) and later.

pyverbs never releases the GIL, so only calls that do not wait are made: the event descriptor is non-blocking. Version
44 does not show that descriptor; it is the one that appears in /proc/self/fd while the channel is made.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tierfs.transport.rdma import devices, memlock
from tierfs.transport.rdma.loading import load_pyverbs
from tierfs.transport.rdma.verbs import Completion, Completions, DeviceLimits, Port, PortState, Route, Timing

_EVENTS = "anon_inode:[infinibandevent]"
_MTU_BYTES = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}
_MTU_ENUM = {size_bytes: number for number, size_bytes in _MTU_BYTES.items()}
_HOPS = 64  # RoCE v2 is routed
_MESSAGE_LIMIT_BYTES = 1 << 31
# enum values of <infiniband/verbs.h>, which are part of its binary interface; pyverbs moved theirs between versions.
_QPT_RC, _WR_RDMA_READ, _SEND_SIGNALED = 2, 4, 2
_STATE_INIT = 1
_LOCAL_WRITE, _REMOTE_READ = 1, 4
_RNR_TIMER, _RNR_RETRIES = 12, 3  # nothing is ever sent that needs a receiver; 7 would mean for ever


class PyVerbs:
    """Implements ``verbs.Verbs``. Ports are read from sysfs: a machine without a device never imports pyverbs."""

    def ports(self) -> list[Port]:
        """See ``verbs.Verbs``."""
        return devices.read_ports()

    def prepare(self) -> None:
        """See ``verbs.Verbs``."""
        load_pyverbs()

    def lockable_bytes(self) -> int | None:
        """See ``verbs.Verbs``."""
        memlock.raise_limit()
        return memlock.lockable_bytes()

    def open(self, device: str) -> "PyDevice":
        """See ``verbs.Verbs``."""
        return PyDevice(device)


class PyDevice:
    """Implements ``verbs.OpenDevice``."""

    def __init__(self, name: str) -> None:
        from pyverbs.device import Context

        with _os_errors(f"open {name}"):
            self._context = Context(name=name)
            found = self._context.query_device()
        self.limits = DeviceLimits(
            reads_out=max(1, min(found.max_qp_init_rd_atom, 255)),
            reads_in=max(1, min(found.max_qp_rd_atom, 255)),
            region_bytes=found.max_mr_size,
            requests=found.max_qp_wr,
            completions=found.max_cqe,
        )

    def port_state(self, number: int) -> PortState:
        """See ``verbs.OpenDevice``."""
        with _os_errors(f"query port {number}"):
            found = self._context.query_port(number)
        limit_bytes = found.max_msg_sz or _MESSAGE_LIMIT_BYTES
        return PortState(found.lid, _MTU_BYTES[int(found.active_mtu)], min(limit_bytes, _MESSAGE_LIMIT_BYTES))

    def domain(self) -> "PyDomain":
        """See ``verbs.OpenDevice``."""
        return PyDomain(self._context)

    def completions(self, size: int) -> "PyCompletions":
        """See ``verbs.OpenDevice``."""
        return PyCompletions(self._context, size)

    def close(self) -> None:
        """See ``verbs.OpenDevice``."""
        with _os_errors("close the device"):
            self._context.close()


class PyDomain:
    """Implements ``verbs.Domain``."""

    def __init__(self, context: Any) -> None:
        from pyverbs.pd import PD

        with _os_errors("make a protection domain"):
            self._domain = PD(context)

    def register(self, address: int, length_bytes: int, *, remote_read: bool) -> "PyRegion":
        """See ``verbs.Domain``."""
        return PyRegion(self._domain, address, length_bytes, _REMOTE_READ if remote_read else _LOCAL_WRITE)

    def queue_pair(self, completions: Completions, *, requests: int) -> "PyQueuePair":
        """See ``verbs.Domain``."""
        assert isinstance(completions, PyCompletions), "one of the same device"
        return PyQueuePair(self._domain, completions, requests)

    def close(self) -> None:
        """See ``verbs.Domain``."""
        with _os_errors("close the protection domain"):
            self._domain.close()


class PyRegion:
    """Implements ``verbs.Region``."""

    def __init__(self, domain: Any, address: int, length_bytes: int, access: int) -> None:
        from pyverbs.mr import MR

        with _os_errors("register memory"):
            self._region = MR(domain, length_bytes, access, address=address)
        self.local_key: int = self._region.lkey
        self.remote_key: int = self._region.rkey

    def close(self) -> None:
        """See ``verbs.Region``."""
        with _os_errors("deregister memory"):
            self._region.close()


class PyCompletions:
    """Implements ``verbs.Completions``."""

    def __init__(self, context: Any, size: int) -> None:
        from pyverbs.cq import CQ, CompChannel

        with _os_errors("make a completion queue"):
            before = _event_descriptors()
            self._channel = CompChannel(context)
            try:
                self.fd = _descriptor_of(self._channel, before)
                os.set_blocking(self.fd, False)
                self._queue = CQ(context, size, None, self._channel, 0)
            except BaseException:
                self._channel.close()
                raise

    def arm(self) -> None:
        """See ``verbs.Completions``."""
        with _os_errors("arm the completion queue"):
            self._queue.req_notify()

    def take_event(self) -> bool:
        """See ``verbs.Completions``."""
        try:
            with _os_errors("take an event"):
                self._channel.get_cq_event(self._queue)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EINTR):
                return False
            raise
        self._queue.ack_events(1)  # a queue with one that is not acknowledged cannot be destroyed: that would wait
        return True

    def poll(self, most: int) -> list[Completion]:
        """See ``verbs.Completions``."""
        with _os_errors("poll the completion queue"):
            _, found = self._queue.poll(most)
        return [Completion(one.wr_id, one.status) for one in found]

    def close(self) -> None:
        """See ``verbs.Completions``."""
        with _os_errors("close the completion queue"):
            self._queue.close()
            self._channel.close()


class PyQueuePair:
    """Implements ``verbs.QueuePair``."""

    def __init__(self, domain: Any, completions: PyCompletions, requests: int) -> None:
        from pyverbs.qp import QP, QPCap, QPInitAttr
        from pyverbs.wr import SGE, SendWR

        self._sge, self._request = SGE, SendWR
        queue = completions._queue
        room = QPCap(max_send_wr=requests, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        with _os_errors("make a queue pair"):
            self._pair = QP(domain, QPInitAttr(qp_type=_QPT_RC, scq=queue, rcq=queue, cap=room, sq_sig_all=0))
        self.number: int = self._pair.qp_num

    def answer(self, route: Route, *, first_packet: int, reads: int) -> None:
        """See ``verbs.QueuePair``."""
        self._connect(route, _REMOTE_READ, first_packet, reads)

    def ask(self, route: Route, *, first_packet: int, own_first_packet: int, reads: int, timing: Timing) -> None:
        """See ``verbs.QueuePair``."""
        from pyverbs.qp import QPAttr

        self._connect(route, 0, first_packet, 1)
        attributes = QPAttr()
        attributes.timeout, attributes.retry_cnt = timing.ack_timeout, timing.retries
        attributes.rnr_retry = _RNR_RETRIES
        attributes.sq_psn = own_first_packet
        attributes.max_rd_atomic = reads
        with _os_errors("ready the queue pair to send"):
            self._pair.to_rts(attributes)

    def _connect(self, route: Route, access: int, first_packet: int, reads_in: int) -> None:
        from pyverbs.addr import GID, AHAttr, GlobalRoute
        from pyverbs.qp import QPAttr

        attributes = QPAttr()
        attributes.qp_state = _STATE_INIT
        attributes.pkey_index = 0
        attributes.port_num = route.port
        attributes.qp_access_flags = access
        with _os_errors("initialise the queue pair"):
            self._pair.to_init(attributes)
        peer = GID(route.peer_gid.hex(":", 2))
        across = GlobalRoute(dgid=peer, sgid_index=route.gid_index, hop_limit=_HOPS)
        attributes = QPAttr()
        attributes.path_mtu = _MTU_ENUM[route.mtu_bytes]
        attributes.dest_qp_num = route.peer_queue_pair
        attributes.rq_psn = first_packet
        attributes.max_dest_rd_atomic = reads_in
        attributes.min_rnr_timer = _RNR_TIMER
        attributes.ah_attr = AHAttr(gr=across, is_global=1, port_num=route.port, dlid=route.peer_lid)
        attributes.qp_access_flags = access
        with _os_errors("connect the queue pair"):
            self._pair.to_rtr(attributes)

    def post_read(
        self, *, transfer: int, address: int, local_key: int, remote_address: int, remote_key: int, length_bytes: int,
        signaled: bool,
    ) -> None:  # fmt: skip
        """See ``verbs.QueuePair``."""
        piece = self._sge(address, length_bytes, local_key)
        request = self._request(
            wr_id=transfer, opcode=_WR_RDMA_READ, num_sge=1, sg=[piece], send_flags=_SEND_SIGNALED if signaled else 0
        )
        request.set_wr_rdma(remote_key, remote_address)
        with _os_errors("post a READ"):
            self._pair.post_send(request)

    def close(self) -> None:
        """See ``verbs.QueuePair``."""
        with _os_errors("destroy the queue pair"):
            self._pair.close()


@contextmanager
def _os_errors(what: str) -> Iterator[None]:
    """pyverbs has exceptions of its own; their error code is an errno, or -1 where it has none."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        number = getattr(error, "error_code", -1)
        raise OSError(number if number > 0 else errno.EIO, f"cannot {what}: {error}") from error


def _event_descriptors() -> set[int]:
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError, ValueError):  # closed by a thread meanwhile
            if os.readlink(path) == _EVENTS:
                found.add(int(path.name))
    return found


def _descriptor_of(channel: Any, before: set[int]) -> int:
    """The channel's own descriptor. Trio's thread alone makes such descriptors, so the new one is it."""
    shown = getattr(channel, "fd", None)
    if isinstance(shown, int):
        return shown
    new = _event_descriptors() - before
    if len(new) != 1:
        raise OSError(errno.ENOSYS, f"the completion channel's descriptor cannot be told: {sorted(new)} are new")
    return new.pop()
