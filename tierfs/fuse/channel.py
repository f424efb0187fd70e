"""The daemon's end of `tierfs-channel`, the process that owns the mount: what it is asked, and what it is lent.

The channel starts the daemon with two sockets: one carries FUSE messages and is pyfuse3's (session.py), the other one
carries the messages of wire/channel.py and is this client's. app/mount runs it; tiers lend their files through it
(tiers.interface.Lender); operations.py has it encode READ replies.

A READ reply is a lease: the parts it names stay as they are until the channel stores 1 at the lease's index in the
memory both have. What must hold: a hold is released exactly once, after that; an index is used again only after that;
a slot of the file table is used again only after the channel acknowledged that its file is dropped.
"""

import errno
import fcntl
import logging
import mmap
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import trio

from tierfs.blocks.errors import ControlError, MountFailed, NoBuffer, ProtocolError, TierfsError
from tierfs.tiers.interface import LentFile, Part
from tierfs.wire import channel as wire

log = logging.getLogger(__name__)

ENVIRONMENT = "TIERFS_CHANNEL"
LEASES = 4096
_ACK_S = 10.0
_LEASE_WAIT_S = 5.0
_TELL_S = 5.0  # a tier drops what failed at once; its record of that may be on the very disk that does not answer
_SWEEP_S = 0.05
_SWEEP_FROM = 8  # outstanding leases below this number are left to the periodic sweep
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Pool(Protocol):
    """The memory that fetched blocks are in (cache.buffers.BufferPool)."""

    @property
    def fd(self) -> int:
        """Its memory file, which can be sealed."""

    @property
    def size_bytes(self) -> int:
        """The length of that file."""


class Lent:
    """A tier file that the channel has; implements ``tiers.interface.LentFile``."""

    __slots__ = ("generation", "slot")

    def __init__(self, slot: int, generation: int) -> None:
        self.slot = slot
        self.generation = generation


class _Waiting:
    """A message that is not acknowledged yet."""

    __slots__ = ("ack", "answered", "handles")

    def __init__(self) -> None:
        self.answered = trio.Event()
        self.ack: wire.Ack | None = None
        self.handles: dict[int, int] = {}


class Channel:
    """See the head of this file. ``epoch`` counts the daemons of this mount from 1; above 1 it takes over."""

    def __init__(self, *, fuse_fd: int, control_fd: int, epoch: int) -> None:
        os.set_inheritable(fuse_fd, False)
        os.set_inheritable(control_fd, False)
        self.fuse_fd = fuse_fd
        self.epoch = epoch
        self.pid = os.getppid()
        self.passthrough = False
        self.passthrough_reason = "not known yet"
        self.on_read_failed: Callable[[LentFile | None, int, int], Awaitable[None]] | None = None
        self.on_stop: Callable[[], None] = lambda: None  # the channel wants another daemon
        self.on_gone: Callable[[], None] = lambda: None  # the channel is dead, and with it the mount
        self._socket = trio.socket.from_stdlib_socket(socket.socket(fileno=control_fd))
        self._gone = False
        self._serial = 0
        self._waiting: dict[int, _Waiting] = {}
        self._counters: mmap.mmap | None = None
        self._files: list[Lent | None] = [None] * wire.SLOTS
        self._free_slots = list(range(wire.SLOTS - 1, -1, -1))
        self._generation = 0
        # Each slot is taken back at most once before it is free again.
        self._drops_in, self._drops_out = trio.open_memory_channel[Lent](wire.SLOTS)
        self._leases: memoryview | None = None
        self._free_leases = list(range(LEASES - 1, -1, -1))
        self._outstanding: dict[int, Sequence[Part]] = {}
        self._sweep_at = _SWEEP_FROM
        self._some_outstanding = trio.Event()

    @classmethod
    def from_environment(cls) -> "Channel | None":
        """The channel that started this process; None where none did. Raises MountFailed."""
        text = os.environ.pop(ENVIRONMENT, "")  # not for the processes this one starts
        if not text:
            return None
        try:
            fuse_fd, control_fd, epoch = (int(part) for part in text.split(","))
            return cls(fuse_fd=fuse_fd, control_fd=control_fd, epoch=epoch)
        except (ValueError, OSError) as error:
            raise MountFailed(f"{ENVIRONMENT}={text} does not name the sockets of a channel: {error}") from error

    # -- tasks ------------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Receive, drop what was taken back, sweep. Returns when the channel is dead; cancel to close this end.

        Raises ProtocolError when the channel speaks something else.
        """
        with self._socket:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._drop)
                nursery.start_soon(self._sweep_sometimes)
                task_status.started()
                await self._receive(nursery)
                nursery.cancel_scope.cancel()

    async def _receive(self, nursery: trio.Nursery) -> None:
        while True:
            try:
                packet, ancillary, flags, _ = await self._socket.recvmsg(
                    wire.PACKET_BYTES_MAX, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC
                )
            except OSError as error:
                log.info("channel_closed error=%s", error)
                packet = b""
            if not packet:
                break
            descriptors = _descriptors(ancillary)
            try:
                if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                    raise ProtocolError(f"channel: a packet of more than {wire.PACKET_BYTES_MAX} bytes")
                serial, message = wire.decode(packet)
                if len(descriptors) != message.descriptors:
                    raise ProtocolError(f"channel: {type(message).__name__} with {len(descriptors)} descriptors")
                self._take(nursery, serial, message, descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        self._gone = True
        for waiting in self._waiting.values():
            waiting.answered.set()
        log.warning("channel_ended pid=%d", self.pid)
        self.on_gone()

    def _take(self, nursery: trio.Nursery, serial: int, message: wire.Message, descriptors: list[int]) -> None:
        match message:
            case wire.Ack():
                waiting = self._waiting.get(serial)
                if waiting is not None:  # else nobody waits any more
                    waiting.ack = message
                    waiting.answered.set()
            case wire.Handles():
                waiting = self._waiting.get(serial)
                if waiting is not None:
                    with os.fdopen(os.dup(descriptors[0]), "rb") as file:
                        file.seek(0)
                        waiting.handles = wire.decode_handles(file.read(), message.count)
            case wire.Welcome():
                if message.version != wire.VERSION:
                    raise ProtocolError(f"the channel speaks version {message.version}: install both from one tierfs")
                self.passthrough = bool(message.passthrough)
                self.passthrough_reason = message.reason
                self._counters = mmap.mmap(descriptors[0], wire.COUNTERS_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
            case wire.ReadFailed():
                # Bounded by the READs the kernel waits for: each has failed once until it is settled.
                nursery.start_soon(self._read_failed, nursery, message)
            case wire.Stop():
                self.on_stop()
            case _:
                raise ProtocolError(f"channel: {type(message).__name__} is for the channel, not from it")

    # -- the life of a mount ----------------------------------------------------------------------------------------

    async def hello(self) -> None:
        """Say which version this is, and learn what the channel can do. Raises MountFailed."""
        await self._must("greet", wire.Hello(wire.VERSION))
        if self._counters is None:
            raise MountFailed("the channel did not say what it can do: install both from one tierfs")

    async def set_pool(self, pool: Pool) -> None:
        """Give the channel the buffers' memory and that of the leases. Raises MountFailed."""
        descriptor = os.memfd_create("tierfs-leases", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, LEASES * 4)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            try:
                # What can shrink could kill the channel while it copies.
                fcntl.fcntl(pool.fd, fcntl.F_ADD_SEALS, _SEALS)
            except OSError as error:
                raise MountFailed(f"the buffer pool's memory cannot be sealed: {error}") from error
            self._leases = memoryview(mmap.mmap(descriptor, LEASES * 4)).cast("I")
            await self._must("take the buffer pool", wire.Pool(pool.size_bytes, LEASES), [pool.fd, descriptor])
        finally:
            os.close(descriptor)

    async def mount(self) -> None:
        """Mount, or (``epoch`` > 1) get the requests from here on. Raises MountFailed with what is wrong."""
        await self._must("mount", wire.Mount())

    async def handles(self) -> dict[int, int]:
        """The inode numbers that are open, and how many times each. Raises MountFailed."""
        waiting = await self._must("list the open files", wire.ListHandles())
        return waiting.handles

    async def stopping(self, *, unmount: bool) -> None:
        """Say that this daemon is about to end on purpose, and whether the mount shall end too. Raises ControlError.

        Nothing is said before hello(): there is no mount that depends on this daemon yet.
        """
        if self._counters is None:
            return
        await self._ask(wire.Stopping(int(unmount)))

    # -- lending (tiers.interface.Lender) -----------------------------------------------------------------------------

    async def lend(self, fd: int, size_bytes: int) -> LentFile | None:
        """See Lender."""
        if not self._free_slots or self._gone:
            log.warning("lend_refused reason=%r", "all slots are taken" if not self._gone else "the channel is gone")
            return None
        self._generation = self._generation % 0xFFFFFFFF + 1
        slot = self._free_slots.pop()
        lent = self._files[slot] = Lent(slot, self._generation)
        kept = False
        try:
            waiting = await self._ask(wire.FileAdd(slot, lent.generation, size_bytes), [fd])
            assert waiting.ack is not None
            if waiting.ack.status == 0:
                kept = True
                return lent
            log.warning("lend_refused error=%s reason=%r", _error_name(waiting.ack), waiting.ack.text)
        except ControlError as error:
            log.warning("lend_failed error=%s", error)
        finally:
            if not kept:
                # Also when it was refused, or never sent: the channel says so, and the slot is free either way.
                self.take_back(lent)
        return None

    def take_back(self, lent: LentFile) -> None:
        """See Lender."""
        held = self._files[lent.slot]
        assert held is lent, "a file was taken back twice"
        self._files[lent.slot] = None
        self._drops_in.send_nowait(held)

    async def offer(self, inode: int, lent: LentFile) -> bool:
        """See Lender. Raises ControlError when the channel does not answer."""
        waiting = await self._ask(wire.Offer(inode, lent.slot, lent.generation))
        assert waiting.ack is not None
        return waiting.ack.status == 0

    async def _drop(self) -> None:
        async for lent in self._drops_out:
            try:
                await self._ask(wire.FileDrop(lent.slot, lent.generation))
            except ControlError as error:
                # Whether the channel still has it is not known, so the slot stays taken.
                log.warning("drop_failed slot=%d error=%s", lent.slot, error)
                continue
            self._free_slots.append(lent.slot)

    # -- READ replies -------------------------------------------------------------------------------------------------

    async def reply(self, parts: Sequence[Part], *, file_bytes: int) -> bytes:
        """The READ reply that names these parts; the holds are the channel's from here on, whatever happens.

        ``file_bytes``: the length of the file. The reply must be sent: what it names is held until the channel reports
        on it. Raises NoBuffer when all leases stay out, ProtocolError when there are more parts than a reply can name;
        the holds are released then, and when cancelled.
        """
        if not parts:
            return wire.encode_read_reply(wire.NO_LEASE, (), file_bytes=file_bytes)
        kept = False
        try:
            if len(self._outstanding) >= self._sweep_at:
                self.sweep()
            if not self._free_leases:
                await self._wait_for_lease()
            lease = self._free_leases[-1]
            reply = wire.encode_read_reply(lease, parts, file_bytes=file_bytes)
            assert self._leases is not None, "a reply before set_pool"
            self._leases[lease] = 0
            self._free_leases.pop()
            self._outstanding[lease] = parts
            if len(self._outstanding) == 1:
                self._some_outstanding.set()
            kept = True
            return reply
        finally:
            if not kept:
                for part in parts:
                    part.hold.release()

    def sweep(self) -> bool:
        """Release the holds of replies the channel is done with; whether there were any. Never waits."""
        leases = self._leases
        if leases is None:
            return False
        done = [lease for lease in self._outstanding if leases[lease] == 1]
        for lease in done:
            self._free_leases.append(lease)
            for part in self._outstanding.pop(lease):
                part.hold.release()
        # Looking costs as much as there is outstanding: the next reply that looks is the one that has doubled it.
        self._sweep_at = max(_SWEEP_FROM, 2 * len(self._outstanding))
        return bool(done)

    @property
    def outstanding(self) -> int:
        """Replies whose copy is not known to be over."""
        return len(self._outstanding)

    async def _wait_for_lease(self) -> None:
        with trio.move_on_after(_LEASE_WAIT_S):
            # The channel stores to memory, it sends nothing.
            while not self._free_leases and not self.sweep():  # noqa: ASYNC110
                await trio.sleep(0.002)
        if not self._free_leases:
            raise NoBuffer(f"all {LEASES} leases stayed out for {_LEASE_WAIT_S:g} s: the channel does not copy")

    async def _sweep_sometimes(self) -> None:
        while True:
            if not self._outstanding:
                self._some_outstanding = trio.Event()
                await self._some_outstanding.wait()
            await trio.sleep(_SWEEP_S)
            self.sweep()

    async def _read_failed(self, nursery: trio.Nursery, failed: wire.ReadFailed) -> None:
        """Tell the tier, then let the channel ask again; a tier that errs or hangs must not keep the reader waiting."""
        lent: LentFile | None = None
        known = failed.slot == wire.POOL_SLOT
        if failed.slot < wire.SLOTS:
            lent = self._files[failed.slot]
            known = lent is not None and lent.generation == failed.generation
        # Of a disk that does not answer the tier says so itself, once and not for each copy.
        log.log(
            logging.INFO if failed.error_number == errno.EINPROGRESS else logging.WARNING,
            "channel_read_failed slot=%d offset=%d length=%d error=%s",
            failed.slot,
            failed.offset_bytes,
            failed.length_bytes,
            errno.errorcode.get(failed.error_number, failed.error_number),
        )
        if known:
            told = trio.Event()
            nursery.start_soon(self._tell, lent, failed, told)
            with trio.move_on_after(_TELL_S):
                await told.wait()
        try:
            await self._ask(wire.ReadSettled(failed.unique))
        except ControlError as error:
            log.warning("read_not_settled error=%s", error)

    async def _tell(self, lent: LentFile | None, failed: wire.ReadFailed, told: trio.Event) -> None:
        try:
            if self.on_read_failed is not None:
                await self.on_read_failed(lent, failed.offset_bytes, failed.error_number)
        except TierfsError as error:
            log.warning("read_failure_not_handled error=%s", error)
        except Exception as error:
            log.error("read_failure_by_bug error=%r", error, exc_info=error)
        finally:
            told.set()

    # -- counters -----------------------------------------------------------------------------------------------------

    def counters(self) -> wire.Counters:
        """What the channel has counted, now. After hello()."""
        assert self._counters is not None, "counters before hello"
        return wire.decode_counters(self._counters[:])

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _must(self, what: str, message: wire.Message, descriptors: Sequence[int] = ()) -> _Waiting:
        try:
            waiting = await self._ask(message, descriptors)
        except ControlError as error:
            raise MountFailed(f"the channel did not {what}: {error}") from error
        ack = waiting.ack
        assert ack is not None
        if ack.status:
            raise MountFailed(ack.text or f"the channel did not {what}: {_error_name(ack)}")
        return waiting

    async def _ask(self, message: wire.Message, descriptors: Sequence[int] = ()) -> _Waiting:
        """Send, and wait for the acknowledgement, whatever it says. Raises ControlError."""
        if self._gone:
            raise ControlError("the channel has ended")
        serial = self._serial = self._serial % 0xFFFFFFFF + 1  # 0 is for messages that answer nothing
        waiting = self._waiting[serial] = _Waiting()
        packet = wire.encode(serial, message)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"".join(fd.to_bytes(4, "little") for fd in descriptors))]
        try:
            with trio.fail_after(_ACK_S):
                if descriptors:
                    await self._socket.sendmsg([packet], rights)
                else:
                    await self._socket.send(packet)
                await waiting.answered.wait()
        except trio.TooSlowError as error:
            raise ControlError(f"no answer to {type(message).__name__} in {_ACK_S:g} s") from error
        except (OSError, trio.ClosedResourceError) as error:
            raise ControlError(f"the channel cannot be told ({error})") from error
        finally:
            del self._waiting[serial]
        if waiting.ack is None:
            raise ControlError("the channel has ended")
        return waiting


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found += [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data) - len(data) % 4, 4)]
    return found


def _error_name(ack: wire.Ack) -> str:
    return errno.errorcode.get(ack.status, str(ack.status))
