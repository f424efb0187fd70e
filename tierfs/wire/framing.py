"""Frames: how messages and block bytes are laid out on a connection. Pure; both ends and the tests call it.

A frame is a fixed header, a msgpack body and raw data, in that order:

    0   magic        4s   b"TFS1"
    4   version      u8   PROTOCOL_VERSION
    5   type         u8   see tierfs.wire.messages
    6   flags        u16  0 in version 1
    8   request id   u64  a reply carries the id of its request
    16  body bytes   u32  at most BODY_LIMIT_BYTES
    20  data bytes   u32  at most DATA_LIMIT_BYTES
    24  checksum     u64  xxh3_64 of bytes 0..23

all little endian. The checksum is there so that a stream out of step is noticed at the header and its length fields are
never believed; the data has its own digest. What must hold: no input allocates more than the limits it is parsed with.
"""

import struct
from dataclasses import dataclass

import xxhash

from tierfs.blocks.errors import ProtocolError

MAGIC = b"TFS1"
PROTOCOL_VERSION = 1
HEADER_BYTES = 32
BODY_LIMIT_BYTES = 1 << 20
DATA_LIMIT_BYTES = 64 << 20

_CHECKED = struct.Struct("<4sBBHQII")
_CHECKSUM = struct.Struct("<Q")
_HEADER = struct.Struct("<4sBBHQIIQ")
_REQUEST_ID_END = 1 << 64


@dataclass(frozen=True, slots=True)
class Header:
    """What one frame's header says; the lengths are within the limits."""

    type: int
    request_id: int
    body_bytes: int
    data_bytes: int


@dataclass(frozen=True, slots=True)
class Frame:
    """A header and its body, for ends that receive no data."""

    header: Header
    body: bytes


def encode_header(*, type: int, request_id: int, body_bytes: int, data_bytes: int) -> bytes:
    """The 32 bytes of a header. Numbers out of range are a bug of the caller."""
    assert 0 <= body_bytes <= BODY_LIMIT_BYTES, body_bytes
    assert 0 <= data_bytes <= DATA_LIMIT_BYTES, data_bytes
    assert 0 <= request_id < _REQUEST_ID_END, request_id
    checked = _CHECKED.pack(MAGIC, PROTOCOL_VERSION, type, 0, request_id, body_bytes, data_bytes)
    return checked + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(checked))


def parse_header(
    buffer: bytes | bytearray | memoryview,
    *,
    body_limit_bytes: int = BODY_LIMIT_BYTES,
    data_limit_bytes: int = DATA_LIMIT_BYTES,
) -> Header:
    """The header in exactly HEADER_BYTES bytes. Raises ProtocolError saying which rule the peer broke."""
    if len(buffer) != HEADER_BYTES:
        raise ProtocolError(f"a frame header has {HEADER_BYTES} bytes, not {len(buffer)}")
    magic, version, type_, flags, request_id, body_bytes, data_bytes, checksum = _HEADER.unpack(buffer)
    if magic != MAGIC:
        raise ProtocolError(
            f"not a tierfs frame: it starts with {magic!r} instead of {MAGIC!r}"
            " (is one side using TLS and the other not, or is this another service's port?)"
        )
    if version != PROTOCOL_VERSION:  # before the checksum: another version may lay out its header otherwise
        raise ProtocolError(
            f"the peer speaks protocol version {version}, this side speaks {PROTOCOL_VERSION}: upgrade the older one"
        )
    if checksum != xxhash.xxh3_64_intdigest(bytes(buffer[:24])):
        raise ProtocolError("frame header checksum does not match: the stream is damaged or out of step")
    if flags:
        raise ProtocolError(f"frame flags {flags:#06x} are not known in protocol version {PROTOCOL_VERSION}")
    if body_bytes > body_limit_bytes:
        raise ProtocolError(f"frame body of {body_bytes} bytes is over the limit of {body_limit_bytes}")
    if data_bytes > data_limit_bytes:
        raise ProtocolError(f"frame data of {data_bytes} bytes is over the limit of {data_limit_bytes}")
    return Header(type_, request_id, body_bytes, data_bytes)


class FrameReader:
    """Cuts a byte stream into frames without data: what a server receives. Holds at most one frame and one feed.

    Feed what arrived, then take frames until None. After a ProtocolError the stream is of no use any more.
    """

    def __init__(self, *, body_limit_bytes: int = BODY_LIMIT_BYTES) -> None:
        self._buffer = bytearray()
        self._body_limit_bytes = body_limit_bytes
        self._header: Header | None = None

    @property
    def in_frame(self) -> bool:
        """Whether part of a frame has arrived and the rest has not."""
        return bool(self._buffer) or self._header is not None

    def feed(self, data: bytes | memoryview) -> None:
        """Add bytes as they came."""
        self._buffer += data

    def next_frame(self) -> Frame | None:
        """The next whole frame, or None until more is fed. Raises ProtocolError."""
        if self._header is None:
            if len(self._buffer) < HEADER_BYTES:
                # Refuse what cannot become a header at its first wrong byte, not after the peer's next 32.
                if not MAGIC.startswith(self._buffer[:4]):
                    raise ProtocolError(f"not a tierfs frame: it starts with {bytes(self._buffer[:4])!r}")
                return None
            self._header = parse_header(
                bytes(self._buffer[:HEADER_BYTES]), body_limit_bytes=self._body_limit_bytes, data_limit_bytes=0
            )
            del self._buffer[:HEADER_BYTES]
        header = self._header
        if len(self._buffer) < header.body_bytes:
            return None
        body = bytes(self._buffer[: header.body_bytes])
        del self._buffer[: header.body_bytes]
        self._header = None
        return Frame(header, body)
