"""The daemon's end of the channel against a scripted other end, over real sockets and real shared memory."""

import array
import errno
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from tierfs.blocks.errors import ControlError, MountFailed, NoBuffer
from tierfs.fuse import channel as channel_module
from tierfs.fuse.channel import Channel, Lent
from tierfs.tiers.interface import LentFile, Part
from tierfs.wire import channel as wire


class Held:
    """A hold that counts."""

    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


class MemoryFile:
    """What set_pool needs of a pool."""

    def __init__(self) -> None:
        self.size_bytes = 8192
        self.fd = os.memfd_create("pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.size_bytes)


class Peer:
    """The other end: answers what the test does not answer itself."""

    def __init__(self, control: socket.socket, fuse: socket.socket) -> None:
        self.control = trio.socket.from_stdlib_socket(control)
        self.fuse = fuse
        self.counters = os.memfd_create("counters", os.MFD_CLOEXEC)
        os.ftruncate(self.counters, wire.COUNTERS_BYTES)
        self.got: list[wire.Message] = []
        self.descriptors: list[int] = []
        self.leases: memoryview | None = None
        self.answers: dict[type[wire.Message], wire.Ack] = {}
        self.silent: set[type[wire.Message]] = set()
        self.passthrough = 1

    async def run(self) -> None:
        while True:
            packet, ancillary, _, _ = await self.control.recvmsg(65536, 1024)
            if not packet:
                return
            descriptors = array.array("i")
            for _, _, data in ancillary:
                descriptors.frombytes(data)
            serial, message = wire.decode(packet)
            assert len(descriptors) == message.descriptors
            if isinstance(message, wire.Pool):
                assert all(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK for fd in descriptors)
                self.leases = memoryview(mmap.mmap(descriptors[1], message.leases * 4)).cast("I")
            self.descriptors += descriptors
            self.got.append(message)
            if isinstance(message, wire.Hello):
                welcome = wire.Welcome(wire.VERSION, 1, self.passthrough, "" if self.passthrough else "no rights")
                await self.send(serial, welcome, [self.counters])
            if isinstance(message, wire.ListHandles):
                handles = os.memfd_create("handles")
                os.write(handles, struct.pack("<6Q", 5, 1, 6, 2, 7, 3))
                await self.send(serial, wire.Handles(3), [handles])
                os.close(handles)
            if type(message) not in self.silent:
                await self.send(serial, self.answers.get(type(message), wire.Ack(0, "")))

    async def send(self, serial: int, message: wire.Message, descriptors: list[int] | None = None) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors or []))]
        await self.control.sendmsg([wire.encode(serial, message)], rights if descriptors else [])

    def kinds(self) -> list[str]:
        return [type(message).__name__ for message in self.got]


Script = Callable[[Channel, Peer], Awaitable[None]]


def play(script: Script, *, greet: bool = True, prepare: Callable[[Peer], None] = lambda peer: None) -> None:
    """Run a script over a connected pair, and end both ends."""

    async def main() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fuse_ours, fuse_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer = Peer(theirs, fuse_theirs)
        prepare(peer)
        channel = Channel(fuse_fd=fuse_ours.fileno(), control_fd=ours.detach(), epoch=1)
        with trio.fail_after(10), fuse_ours, fuse_theirs:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(peer.run)
                await nursery.start(run, channel)
                if greet:
                    await channel.hello()
                    await channel.set_pool(MemoryFile())
                await script(channel, peer)
                nursery.cancel_scope.cancel()
        peer.control.close()

    trio.run(main)


async def run(channel: Channel, *, task_status: "trio.TaskStatus[None]") -> None:
    await channel.run(task_status=task_status)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something the other task does; the test's deadline bounds it."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.001)


def part(lent: LentFile | None, offset: int, length: int) -> tuple[Part, Held]:
    held = Held()
    return Part(lent, offset, length, held), held


def test_greeting_pool_mount_and_handles() -> None:
    async def script(channel: Channel, peer: Peer) -> None:
        assert channel.passthrough
        await channel.mount()
        assert await channel.handles() == {5: 1, 6: 2, 7: 3}
        await channel.stopping(unmount=True)
        assert peer.kinds() == ["Hello", "Pool", "Mount", "ListHandles", "Stopping"]
        os.pwrite(peer.counters, (9).to_bytes(8, "little"), 96 * 8)
        assert channel.counters().named["passthrough_opens"] == 9

    play(script)


def test_why_there_is_no_passthrough_is_known() -> None:
    async def script(channel: Channel, peer: Peer) -> None:
        assert (channel.passthrough, channel.passthrough_reason) == (False, "no rights")

    play(script, prepare=lambda peer: setattr(peer, "passthrough", 0))


def test_a_mount_that_fails_says_the_channels_words() -> None:
    async def script(channel: Channel, peer: Peer) -> None:
        peer.answers[wire.Mount] = wire.Ack(errno.EPERM, "cannot mount there")
        with pytest.raises(MountFailed, match="cannot mount there"):
            await channel.mount()

    play(script)


def test_no_acknowledgement_in_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(channel: Channel, peer: Peer) -> None:
        monkeypatch.setattr(channel_module, "_ACK_S", 0.05)
        peer.silent = {wire.Mount, wire.Stopping}
        with pytest.raises(MountFailed, match="no answer"):
            await channel.mount()
        with pytest.raises(ControlError, match="no answer"):
            await channel.stopping(unmount=False)

    play(script)


def test_a_file_is_lent_offered_and_its_slot_used_again_only_after_the_drop(tmp_path: Path) -> None:
    (tmp_path / "object").write_bytes(b"weights")

    async def script(channel: Channel, peer: Peer) -> None:
        with (tmp_path / "object").open("rb") as file:
            lent = await channel.lend(file.fileno(), 7)
            assert lent is not None
            assert os.pread(peer.descriptors[-1], 7, 0) == b"weights"
            assert await channel.offer(77, lent)
            assert peer.got[-1] == wire.Offer(77, lent.slot, lent.generation)
            peer.answers[wire.Offer] = wire.Ack(errno.EBUSY, "")
            assert not await channel.offer(77, lent), "it is open through the daemon"
            peer.silent = {wire.FileDrop}
            channel.take_back(lent)
            await until(lambda: "FileDrop" in peer.kinds())
            second = await channel.lend(file.fileno(), 7)
            assert second is not None
            assert second.slot != lent.slot, "the drop is not acknowledged yet"
            assert second.generation != lent.generation

    play(script)


def test_a_slot_is_free_after_the_drop_is_acknowledged(tmp_path: Path) -> None:
    (tmp_path / "object").write_bytes(b"weights")

    async def script(channel: Channel, peer: Peer) -> None:
        with (tmp_path / "object").open("rb") as file:
            lent = await channel.lend(file.fileno(), 7)
            assert lent is not None
            channel.take_back(lent)
            with pytest.raises(AssertionError, match="twice"):
                channel.take_back(lent)
            await until(lambda: len(channel._free_slots) == wire.SLOTS)
            again = await channel.lend(file.fileno(), 7)
            assert again is not None
            assert (again.slot, again.generation != lent.generation) == (lent.slot, True)

    play(script)


def test_a_refused_or_abandoned_file_leaves_its_slot_free(tmp_path: Path) -> None:
    (tmp_path / "object").write_bytes(b"weights")

    async def script(channel: Channel, peer: Peer) -> None:
        with (tmp_path / "object").open("rb") as file:
            peer.answers[wire.FileAdd] = wire.Ack(errno.EACCES, "not of a tier")
            peer.answers[wire.FileDrop] = wire.Ack(errno.ENOENT, "no such file")
            assert await channel.lend(file.fileno(), 7) is None
            await until(lambda: len(channel._free_slots) == wire.SLOTS)
            peer.silent = {wire.FileAdd}
            with trio.move_on_after(0.05):
                await channel.lend(file.fileno(), 7)
            await until(lambda: len(channel._free_slots) == wire.SLOTS)
        assert peer.kinds()[-4:] == ["FileAdd", "FileDrop", "FileAdd", "FileDrop"]

    play(script)


def test_holds_are_released_when_the_channel_reports_the_copy_and_not_before() -> None:
    async def script(channel: Channel, peer: Peer) -> None:
        first, first_held = part(Lent(3, 4), 4096, 10)
        second, second_held = part(None, 0, 5)
        assert peer.leases is not None
        reply = wire.decode_read_reply(await channel.reply([first, second], file_bytes=9))
        assert (reply.length_bytes, reply.parts) == (15, ((3, 4, 4096, 10), (wire.POOL_SLOT, 0, 0, 5)))
        assert peer.leases[reply.lease] == 0
        assert not channel.sweep()
        assert (first_held.released, second_held.released) == (0, 0)
        other, other_held = part(Lent(3, 4), 0, 1)
        other_lease = wire.decode_read_reply(await channel.reply([other], file_bytes=9)).lease
        assert other_lease != reply.lease
        peer.leases[reply.lease] = 1
        await until(lambda: first_held.released == 1)  # by the periodic sweep
        assert (second_held.released, other_held.released, channel.outstanding) == (1, 0, 1)
        peer.leases[other_lease] = 1
        assert channel.sweep()
        assert not channel.sweep()
        assert (first_held.released, second_held.released, other_held.released) == (1, 1, 1)

    play(script)


def test_replies_sweep_by_themselves_and_the_end_of_a_file_takes_no_lease() -> None:
    async def script(channel: Channel, peer: Peer) -> None:
        assert peer.leases is not None
        assert wire.decode_read_reply(await channel.reply([], file_bytes=9)).lease == wire.NO_LEASE
        holds = []
        for number in range(3000):  # no checkpoint, so no periodic sweep
            one, held = part(None, number, 1)
            holds.append(held)
            peer.leases[wire.decode_read_reply(await channel.reply([one], file_bytes=9)).lease] = 1
        assert channel.outstanding <= 16
        channel.sweep()
        assert [held.released for held in holds] == [1] * 3000

    play(script)


def test_without_a_free_lease_a_reply_waits_and_then_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(channel: Channel, peer: Peer) -> None:
        monkeypatch.setattr(channel_module, "_LEASE_WAIT_S", 0.05)
        assert peer.leases is not None
        for number in range(channel_module.LEASES):
            await channel.reply([part(None, number, 1)[0]], file_bytes=9)
        late, held = part(None, 0, 1)
        with pytest.raises(NoBuffer):
            await channel.reply([late], file_bytes=9)
        assert held.released == 1
        monkeypatch.setattr(channel_module, "_LEASE_WAIT_S", 5)
        replies: list[bytes] = []

        async def reply() -> None:
            replies.append(await channel.reply([part(None, 0, 1)[0]], file_bytes=9))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reply)
            await trio.testing.wait_all_tasks_blocked(0.001)
            peer.leases[17] = 1
        assert wire.decode_read_reply(replies[0]).lease == 17

    play(script)


def test_a_failed_read_is_told_to_the_tier_and_then_settled(tmp_path: Path) -> None:
    (tmp_path / "object").write_bytes(b"weights")
    told: list[tuple[LentFile | None, int, int]] = []
    settled_before: list[int] = []

    async def script(channel: Channel, peer: Peer) -> None:
        async def failed(lent: LentFile | None, offset_bytes: int, error_number: int) -> None:
            told.append((lent, offset_bytes, error_number))
            settled_before.append(peer.kinds().count("ReadSettled"))
            if lent is None:
                raise RuntimeError("a fault of the tier")

        channel.on_read_failed = failed
        with (tmp_path / "object").open("rb") as file:
            lent = await channel.lend(file.fileno(), 7)
        assert lent is not None
        for unique, slot, generation in (
            (1, lent.slot, lent.generation),
            (2, lent.slot, lent.generation + 1),  # gone meanwhile: nobody is to be told
            (3, wire.POOL_SLOT, 0),
        ):
            await peer.send(0, wire.ReadFailed(unique, slot, generation, 4096, 10, errno.EIO))
            await until(lambda unique=unique: peer.got[-1] == wire.ReadSettled(unique))  # type: ignore[misc]
        assert told == [(lent, 4096, errno.EIO), (None, 4096, errno.EIO)]
        assert settled_before == [0, 2]

    play(script)


def test_a_tier_that_does_not_answer_keeps_no_failed_read_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "_TELL_S", 0.01)

    async def script(channel: Channel, peer: Peer) -> None:
        async def failed(lent: LentFile | None, offset_bytes: int, error_number: int) -> None:
            await trio.sleep_forever()

        channel.on_read_failed = failed
        await peer.send(0, wire.ReadFailed(1, wire.POOL_SLOT, 0, 0, 10, errno.EIO))
        await until(lambda: peer.got[-1] == wire.ReadSettled(1))

    play(script)


def test_stop_and_the_end_of_the_channel_are_told() -> None:
    async def script(channel: Channel, peer: Peer) -> None:
        stopped, gone = trio.Event(), trio.Event()
        channel.on_stop, channel.on_gone = stopped.set, gone.set
        await peer.send(0, wire.Stop())
        await stopped.wait()
        peer.silent = {wire.Mount}
        async with trio.open_nursery() as nursery:

            async def mount() -> None:
                with pytest.raises(MountFailed, match="has ended"):
                    await channel.mount()

            nursery.start_soon(mount)
            await until(lambda: "Mount" in peer.kinds())
            peer.control.shutdown(socket.SHUT_RDWR)
            await gone.wait()
        with pytest.raises(ControlError, match="has ended"):
            await channel.stopping(unmount=True)
        assert await channel.lend(0, 1) is None

    play(script)


def test_a_wrong_message_ends_the_daemons_end() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fuse_ours, fuse_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel = Channel(fuse_fd=fuse_ours.fileno(), control_fd=ours.detach(), epoch=1)
        with theirs, fuse_ours, fuse_theirs, trio.fail_after(5):
            theirs.send(wire.encode(0, wire.Hello(1)))
            with pytest.raises(BaseExceptionGroup) as caught:
                await channel.run()
            assert "is for the channel" in str(caught.value.exceptions[0])

    trio.run(main)


def test_the_environment_names_the_sockets_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fuse_ours, fuse_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, fuse_ours, fuse_theirs:
        os.set_inheritable(fuse_ours.fileno(), True)
        monkeypatch.setenv(channel_module.ENVIRONMENT, f"{fuse_ours.fileno()},{ours.detach()},3")
        channel = Channel.from_environment()
        assert channel is not None
        assert (channel.epoch, channel.fuse_fd) == (3, fuse_ours.fileno())
        assert not os.get_inheritable(fuse_ours.fileno())
        assert Channel.from_environment() is None
        channel._socket._sock.close()  # type: ignore[attr-defined]
        monkeypatch.setenv(channel_module.ENVIRONMENT, "a,b")
        with pytest.raises(MountFailed):
            Channel.from_environment()
