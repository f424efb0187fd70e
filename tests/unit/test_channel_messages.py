"""What the daemon and the channel send each other: it comes back as it was; nothing of a wrong length is believed."""

from dataclasses import dataclass

import pytest

from tierfs.blocks.errors import ProtocolError
from tierfs.wire import channel as wire

MESSAGES: list[wire.Message] = [
    wire.Hello(1), wire.Pool(1 << 40, 4096), wire.Mount(), wire.FileAdd(4095, 7, 1 << 41), wire.FileDrop(3, 9),
    wire.Offer(2**63 - 1, 5, 6), wire.ListHandles(), wire.Stopping(1), wire.ReadSettled(2**64 - 1),
    wire.Ack(13, "not a fïle"), wire.Ack(0, ""), wire.ReadFailed(1, 2, 3, 4, 5, 6), wire.Welcome(1, 2, 0, "no rights"),
    wire.Handles(((1, 2), (2**63, 4))), wire.Handles(()), wire.Stop(),
]  # fmt: skip


@dataclass(frozen=True)
class At:
    slot: int
    generation: int


@dataclass(frozen=True)
class Piece:
    lent: At | None
    offset_bytes: int
    length_bytes: int


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_messages_come_back_as_they_were(message: wire.Message) -> None:
    assert wire.decode(wire.encode(77, message)) == (77, message)


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_a_wrong_length_is_refused(message: wire.Message) -> None:
    packet = wire.encode(1, message)
    shorter = [packet[:length] for length in range(len(packet))]
    if message.tail == "text":
        shorter = shorter[: 8 + message.numbers.size]
    for wrong in shorter if message.tail == "text" else [*shorter, packet + b"x"]:
        with pytest.raises(ProtocolError):
            wire.decode(wrong)


def test_layouts_are_those_of_the_other_end() -> None:
    assert wire.encode(2, wire.FileAdd(1, 3, 5)).hex() == "0400000002000000" + "0100000003000000" + "0500000000000000"
    assert wire.encode(2, wire.Pool(9, 4)).hex() == "0200000002000000" + "0900000000000000" + "04000000"
    assert len(wire.encode(0, wire.ReadFailed(1, 2, 3, 4, 5, 6))) == 8 + 32
    one = wire.encode_read_reply(6, [Piece(At(1, 2), 3, 4)], file_bytes=7)
    head = "54465244" + "02000100" + "06000000" + "04000000" + "07" + "00" * 7
    assert one.hex() == head + "0100000002000000" + "03" + "00" * 7 + "04000000" + "00000000"


def test_an_unknown_message_is_refused() -> None:
    with pytest.raises(ProtocolError, match="unknown message 55"):
        wire.decode((55).to_bytes(4, "little") + bytes(4))


def test_a_read_reply_names_its_parts_and_joins_neighbours() -> None:
    one, other = At(7, 1), At(8, 1)
    pieces = [
        Piece(one, 0, 10), Piece(one, 10, 5), Piece(other, 15, 5), Piece(None, 100, 1), Piece(None, 101, 2),
    ]  # fmt: skip
    reply = wire.decode_read_reply(wire.encode_read_reply(3, pieces, file_bytes=99))
    assert reply == wire.ReadReply(3, 23, 99, ((7, 1, 0, 15), (8, 1, 15, 5), (wire.POOL_SLOT, 0, 100, 3)))
    end = wire.decode_read_reply(wire.encode_read_reply(3, [], file_bytes=5))
    assert end == wire.ReadReply(wire.NO_LEASE, 0, 5, ())


def test_too_many_parts_are_an_error_and_not_a_wrong_reply() -> None:
    pieces = [Piece(At(1, 1), position * 8192, 4096) for position in range(wire.PARTS_MAX + 1)]
    assert len(wire.decode_read_reply(wire.encode_read_reply(0, pieces[1:], file_bytes=9)).parts) == wire.PARTS_MAX
    with pytest.raises(ProtocolError, match="too small"):
        wire.encode_read_reply(0, pieces, file_bytes=9)


def test_a_read_reply_of_a_wrong_length_is_refused() -> None:
    reply = wire.encode_read_reply(0, [Piece(At(1, 1), 0, 4), Piece(At(2, 1), 0, 4)], file_bytes=9)
    for length in range(len(reply)):
        with pytest.raises(ProtocolError):
            wire.decode_read_reply(reply[:length])
    with pytest.raises(ProtocolError):
        wire.decode_read_reply(reply[:12] + b"\x09" + reply[13:])


def test_counters_have_names() -> None:
    values = [0] * 256
    values[15], values[0], values[64], values[72], values[96], values[120] = 5, 1, 2, 3, 4, 6
    counters = wire.decode_counters(b"".join(value.to_bytes(8, "little") for value in values))
    assert counters.requests == {"read": 5, "other": 1}
    assert counters.read_sizes == {"4096": 2, "1048576": 3}
    assert (counters.named["passthrough_opens"], counters.named["queued_sends"]) == (4, 6)
    with pytest.raises(ProtocolError):
        wire.decode_counters(bytes(10))
