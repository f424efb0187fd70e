"""Frames: every rule of the header has its refusal, and no input makes the parser crash or hold too much."""

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tierfs.blocks.errors import ProtocolError
from tierfs.wire.framing import (
    BODY_LIMIT_BYTES,
    DATA_LIMIT_BYTES,
    HEADER_BYTES,
    FrameReader,
    Header,
    encode_header,
    parse_header,
)

GOOD = encode_header(type=17, request_id=5, body_bytes=10, data_bytes=20)


def header(
    magic: bytes = b"TFS1", version: int = 1, type_: int = 17, flags: int = 0, body: int = 0, data: int = 0
) -> bytes:
    checked = struct.pack("<4sBBHQII", magic, version, type_, flags, 5, body, data)
    return checked + struct.pack("<Q", xxhash.xxh3_64_intdigest(checked))


def test_the_layout_is_the_documented_one() -> None:
    assert GOOD[:4] == b"TFS1"
    assert GOOD[4:24] == bytes([1, 17, 0, 0]) + struct.pack("<QII", 5, 10, 20)
    assert GOOD[24:] == struct.pack("<Q", xxhash.xxh3_64_intdigest(GOOD[:24]))
    assert len(GOOD) == HEADER_BYTES == 32


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "32 bytes, not 0"),
        (GOOD[:-1], "32 bytes, not 31"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\nabcd", "not a tierfs frame"),
        (b"\x15\x03\x01\x00\x02\x02\x46" + bytes(25), "TLS"),
        (header(version=2), "version 2, this side speaks 1"),
        (GOOD[:31] + bytes([GOOD[31] ^ 1]), "checksum"),
        (GOOD[:16] + bytes([GOOD[16] ^ 1]) + GOOD[17:], "checksum"),
        (header(flags=4), "flags 0x0004"),
        (header(body=BODY_LIMIT_BYTES + 1), "body of 1048577 bytes is over the limit"),
        (header(data=DATA_LIMIT_BYTES + 1), "data of 67108865 bytes is over the limit"),
    ],
)
def test_every_violation_says_what_is_wrong(data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        parse_header(data)


def test_the_largest_lengths_pass_and_tighter_limits_hold() -> None:
    largest = encode_header(type=1, request_id=(1 << 64) - 1, body_bytes=BODY_LIMIT_BYTES, data_bytes=DATA_LIMIT_BYTES)
    assert parse_header(largest) == Header(1, (1 << 64) - 1, BODY_LIMIT_BYTES, DATA_LIMIT_BYTES)
    with pytest.raises(ProtocolError, match="over the limit of 4096"):
        parse_header(header(body=4097), body_limit_bytes=4096)


@given(
    type_=st.integers(0, 255),
    request_id=st.integers(0, (1 << 64) - 1),
    body=st.integers(0, BODY_LIMIT_BYTES),
    data=st.integers(0, DATA_LIMIT_BYTES),
)
def test_what_is_encoded_is_parsed(type_: int, request_id: int, body: int, data: int) -> None:
    encoded = encode_header(type=type_, request_id=request_id, body_bytes=body, data_bytes=data)
    assert parse_header(encoded) == Header(type_, request_id, body, data)


@given(st.binary(min_size=0, max_size=80))
def test_no_input_crashes_the_parser(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_header(data)


@given(position=st.integers(0, 31), bit=st.integers(0, 7))
def test_any_flipped_bit_is_refused(position: int, bit: int) -> None:
    damaged = bytearray(GOOD)
    damaged[position] ^= 1 << bit
    with pytest.raises(ProtocolError):
        parse_header(damaged)


@given(bodies=st.lists(st.binary(max_size=50), max_size=6), data=st.data())
def test_frames_come_out_whole_however_the_stream_is_cut(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(
        encode_header(type=1, request_id=i, body_bytes=len(body), data_bytes=0) + body for i, body in enumerate(bodies)
    )
    reader = FrameReader()
    found: list[tuple[int, bytes]] = []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        reader.feed(stream[:cut])
        stream = stream[cut:]
        while (frame := reader.next_frame()) is not None:
            found.append((frame.header.request_id, frame.body))
    assert found == list(enumerate(bodies))
    assert not reader.in_frame


@given(st.lists(st.binary(max_size=100), max_size=20))
def test_garbage_makes_the_reader_refuse_or_wait_and_hold_little(pieces: list[bytes]) -> None:
    reader = FrameReader(body_limit_bytes=64)
    fed = 0
    try:
        for piece in pieces:
            reader.feed(piece)
            fed += len(piece)
            assert reader.next_frame() is None
    except ProtocolError:
        return
    assert fed < HEADER_BYTES
    assert reader.in_frame == (fed > 0)


def test_a_stream_that_cannot_be_ours_is_refused_at_its_first_bytes() -> None:
    reader = FrameReader()
    reader.feed(b"GE")
    with pytest.raises(ProtocolError, match="starts with b'GE'"):
        reader.next_frame()


def test_a_request_with_data_is_refused_by_its_header() -> None:
    reader = FrameReader()
    reader.feed(header(data=1))
    with pytest.raises(ProtocolError, match="data of 1 bytes is over the limit of 0"):
        reader.next_frame()
