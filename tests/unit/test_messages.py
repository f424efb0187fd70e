"""Messages: strict both ways; and what a client makes of arriving headers."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierfs.blocks import errors
from tierfs.blocks.errors import ProtocolError
from tierfs.wire import messages as m
from tierfs.wire.connection import PendingRequests
from tierfs.wire.framing import HEADER_BYTES, Header, parse_header

ID = bytes(range(16))
EXAMPLES: list[m.Message] = [
    m.Hello("models", bytes(32), "tierfs", ("x",)),
    m.Challenge(bytes(32)),
    m.Proof(bytes(32)),
    m.Welcome(b"", ID, 32, 60, "tierfs", ()),
    m.Refused(m.Code.BUSY, "full"),
    m.ReadBlock(ID, 3, 0, 4096, 4096),
    m.BlockData(ID),
    m.GetCatalog(ID, 0, 1),
    m.CatalogPart(),
    m.Watch(b"", b"", 0),
    m.Changed(ID, ID, 100, 1, 0),
    m.Ping(),
    m.Pong(),
    m.Error(m.Code.STALE, "gone"),
    m.Cancel(),
    m.RdmaConnect(17, 4711, ID, 0, 4096, 16),
    m.RdmaConnected(18, 4712, ID, 3, 1024, 16, 8, 4 << 20, 60),
    m.LeaseBlock(ID, 3, 0, 4096, 4096),
    m.Leased(ID, 9, 0x7F0000001000, 0xFFFFFFFF),
    m.ReturnLeases((9, 10)),
    m.RdmaDisconnect(),
]


def test_every_type_has_an_example_here() -> None:
    assert {m.type_of(type(example)) for example in EXAMPLES} == set(m.Type)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: m.Message) -> None:
    frame = m.encode(message, request_id=9, data_bytes=5)
    header = parse_header(frame[:HEADER_BYTES])
    assert (header.request_id, header.data_bytes, header.body_bytes) == (9, 5, len(frame) - HEADER_BYTES)
    assert m.decode(header.type, frame[HEADER_BYTES:]) == message


@pytest.mark.parametrize(
    ("type_", "fields"),
    [
        (m.Type.READ_BLOCK, [ID, 3, 0, 4096]),  # one missing
        (m.Type.READ_BLOCK, [ID, 3, 0, 1, 1, 4096]),  # one too many
        (m.Type.READ_BLOCK, [ID[:15], 3, 0, 1, 4096]),
        (m.Type.READ_BLOCK, [ID, -1, 0, 1, 4096]),
        (m.Type.READ_BLOCK, [ID, 1 << 62, 0, 1, 4096]),
        (m.Type.READ_BLOCK, [ID, "3", 0, 1, 4096]),
        (m.Type.READ_BLOCK, [ID, 3.0, 0, 1, 4096]),
        (m.Type.READ_BLOCK, {"version": ID}),
        (m.Type.HELLO, ["e" * 256, bytes(32), "", []]),
        (m.Type.HELLO, ["e", bytes(31), "", []]),
        (m.Type.HELLO, ["e", bytes(32), "", ["f"] * 65]),
        (m.Type.PROOF, [b""]),
        (m.Type.RDMA_CONNECT, [1 << 24, 0, ID, 0, 4096, 16]),
        (m.Type.RDMA_CONNECT, [17, 0, ID[:15], 0, 4096, 16]),
        (m.Type.LEASED, [ID, 9, 0, 1 << 32]),
        (m.Type.RETURN_LEASES, [[]]),
        (m.Type.RETURN_LEASES, [[1] * (m.RETURNED_LEASES_LIMIT + 1)]),
        (m.Type.WELCOME, [b"", ID, 0, 60, "", []]),
        (m.Type.ERROR, ["unheard-of", ""]),
        (m.Type.GET_CATALOG, [ID, 0, m.CATALOG_PART_LIMIT_BYTES + 1]),
        (m.Type.PING, [1]),
    ],
)
def test_a_body_that_is_not_exactly_the_message_is_refused(type_: m.Type, fields: object) -> None:
    with pytest.raises(ProtocolError, match="does not have its form"):
        m.decode(type_, msgspec.msgpack.encode(fields))


def test_an_unknown_type_is_refused_with_its_number() -> None:
    with pytest.raises(ProtocolError, match="message type 99 is not known"):
        m.decode(99, b"\x90")


@given(type_=st.integers(0, 40), body=st.binary(max_size=200))
def test_no_body_crashes_the_decoder(type_: int, body: bytes) -> None:
    try:
        message = m.decode(type_, body)
    except ProtocolError:
        return
    assert m.type_of(type(message)) == type_


def test_deep_nesting_is_refused_not_a_crash() -> None:
    with pytest.raises(ProtocolError):
        m.decode(m.Type.HELLO, b"\x91" * 100_000)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (m.Code.STALE, errors.StaleVersion),
        (m.Code.NOT_FOUND, errors.NotFound),
        (m.Code.UNAVAILABLE, errors.SourceUnavailable),
        (m.Code.REFUSED, errors.SourceRefused),
        (m.Code.PROTOCOL, errors.ProtocolError),
        (m.Code.BUSY, errors.SourceUnavailable),
        (m.Code.AUTHENTICATION, errors.AuthenticationFailed),
        (m.Code.CANCELLED, errors.SourceUnavailable),
    ],
)
def test_every_code_has_its_error(code: m.Code, error: type[errors.TierfsError]) -> None:
    assert type(m.error_for(code, "why")) is error
    if code not in (m.Code.BUSY, m.Code.CANCELLED):
        assert m.code_for(error("why")) is code


@pytest.mark.parametrize("error", [errors.TierFailed("disk"), errors.NoBuffer("pool"), errors.CorruptBlock("block")])
def test_trouble_of_our_own_is_unavailable_to_the_other_side(error: errors.TierfsError) -> None:
    assert m.code_for(error) is m.Code.UNAVAILABLE


def test_a_peers_text_cannot_write_to_a_terminal() -> None:
    assert m.printable("ok ä\x1b[2J\n") == "ok ä?[2J?"
    assert len(m.printable("x" * 5000)) == m.REASON_LIMIT_CHARACTERS


# what a client is waiting for


def block_reply(request_id: int, data_bytes: int, type_: int = m.Type.BLOCK_DATA) -> Header:
    return Header(type_, request_id, 18, data_bytes)


def test_a_reply_is_matched_to_its_buffer_and_only_once() -> None:
    pending: PendingRequests[str] = PendingRequests(2)
    buffer = memoryview(bytearray(8))
    first = pending.add(m.Type.BLOCK_DATA, "a", buffer=buffer)
    second = pending.add(m.Type.BLOCK_DATA, "b", buffer=memoryview(bytearray(4)))
    assert pending.full
    assert pending.match(block_reply(first.request_id, 8)).buffer is buffer
    assert pending.finish(first) == "a"
    assert first.buffer is None
    with pytest.raises(ProtocolError, match="not open"):
        pending.match(block_reply(first.request_id, 8))
    assert pending.close() == ["b"]
    assert second.buffer is None and len(pending) == 0


def test_an_abandoned_request_forgets_its_buffer_and_still_drains_its_reply() -> None:
    pending: PendingRequests[str] = PendingRequests(1)
    request = pending.add(m.Type.BLOCK_DATA, "a", buffer=memoryview(bytearray(8)))
    assert pending.abandon(request)
    assert request.buffer is None and pending.abandoned == 1 and pending.full
    assert pending.match(block_reply(request.request_id, 8)) is request
    assert pending.finish(request) is None
    assert pending.abandoned == 0 and not pending.full
    assert not pending.abandon(request), "its reply was complete: nothing to cancel"


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (block_reply(1, 7), "7 bytes where 8 were asked for"),
        (block_reply(1, 9), "9 bytes where 8 were asked for"),
        (block_reply(1, 8, m.Type.CHANGED), "a Changed where BlockData is expected"),
        (block_reply(1, 8, 99), "a type 99 where BlockData is expected"),
        (block_reply(1, 1, m.Type.ERROR), "Error with data"),
        (block_reply(2, 8), "request 2, which is not open"),
    ],
)
def test_a_header_that_answers_nothing_is_refused(header: Header, reason: str) -> None:
    pending: PendingRequests[str] = PendingRequests(4)
    pending.add(m.Type.BLOCK_DATA, "a", buffer=memoryview(bytearray(8)))
    with pytest.raises(ProtocolError, match=reason):
        pending.match(header)


def test_a_reply_of_unknown_length_is_held_to_its_limit() -> None:
    pending: PendingRequests[str] = PendingRequests(4)
    pending.add(m.Type.CHANGED, "a", data_limit_bytes=64)
    assert pending.match(block_reply(1, 64, m.Type.CHANGED))
    with pytest.raises(ProtocolError, match="65 bytes with a Changed; the limit is 64"):
        pending.match(block_reply(1, 65, m.Type.CHANGED))
