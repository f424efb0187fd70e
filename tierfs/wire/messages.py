"""The messages of the protocol, one strict structure per type. Pure; the server and the remote source call it.

Every request is answered by exactly one reply with its request id: the reply type named here, or Error. ``Cancel`` is
no request: it carries the id of the one it is about and changes only what that one's reply may be. Block bytes, parts
of a catalog and content ids travel as the frame's data, never in the body; block bytes that are read over RDMA
travel in no frame at all (docs/RDMA.md).
"""

from enum import Enum, IntEnum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from tierfs.blocks.errors import (
    AuthenticationFailed,
    NotFound,
    ProtocolError,
    SourceRefused,
    SourceUnavailable,
    StaleVersion,
    TierfsError,
)
from tierfs.blocks.text import printable as text_printable
from tierfs.config.addresses import EXPORT_LIMIT_BYTES
from tierfs.wire.framing import encode_header

NONCE_BYTES = 32
PROOF_BYTES = 32
REASON_LIMIT_CHARACTERS = 1024
CONTENT_PAIR_BYTES = 32  # a version id, then its content id
CONTENTS_LIMIT_BYTES = 4 << 20  # of one Changed; the next Watch gets the rest
CATALOG_PART_LIMIT_BYTES = 4 << 20
RDMA_FEATURE = "rdma-read-1"  # in the features of both sides: the messages from RdmaConnect on are known
RETURNED_LEASES_LIMIT = 128  # of one ReturnLeases

_Id = Annotated[bytes, Meta(min_length=16, max_length=16)]
_IdOrNone = Annotated[bytes, Meta(max_length=16)]
_Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Proof = Annotated[bytes, Meta(max_length=PROOF_BYTES)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Name = Annotated[str, Meta(max_length=EXPORT_LIMIT_BYTES)]
_Reason = Annotated[str, Meta(max_length=REASON_LIMIT_CHARACTERS)]
_Gid = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Number24 = Annotated[int, Meta(ge=0, lt=1 << 24)]
_Lid = Annotated[int, Meta(ge=0, lt=1 << 16)]
_Mtu = Annotated[int, Meta(ge=256, le=4096)]
_Reads = Annotated[int, Meta(ge=1, le=255)]
_Word64 = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Features = Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=64)]


class Code(Enum):
    """Why something was not done."""

    STALE = "stale"
    NOT_FOUND = "not-found"
    UNAVAILABLE = "unavailable"
    REFUSED = "refused"
    PROTOCOL = "protocol"
    BUSY = "busy"
    AUTHENTICATION = "authentication"
    CANCELLED = "cancelled"


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of all: fields by position, none may be missing or extra."""


class Hello(_Message, frozen=True):
    """Client, first: which export, a nonce the server has to prove itself with, and optional abilities."""

    export: _Name
    nonce: _Nonce
    software: _Name
    features: _Features


class Challenge(_Message, frozen=True):
    """Server: this export has a token; prove that you know it."""

    nonce: _Nonce


class Proof(_Message, frozen=True):
    """Client: the proof (tierfs.wire.handshake)."""

    proof: Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]


class Welcome(_Message, frozen=True):
    """Server: requests may follow. ``boot`` names this life of the server; ``proof`` is empty without a token."""

    proof: _Proof
    boot: _Id
    max_requests: Annotated[int, Meta(ge=1, le=65536)]  # block and catalog requests in flight on this connection
    idle_timeout_s: Annotated[int, Meta(ge=1, le=86400)]
    software: _Name
    features: _Features


class Refused(_Message, frozen=True):
    """Server: this connection is not served, and closes."""

    code: Code
    reason: _Reason


class ReadBlock(_Message, frozen=True):
    """Client: these bytes of that block; the whole block unless the caller wants less. ``block_bytes`` is the size the
    client counts blocks in: a server that counts in another one must not answer with other bytes.
    """

    version: _Id
    block: _Count
    start_bytes: _Count
    length_bytes: _Count
    block_bytes: _Count


class BlockData(_Message, frozen=True):
    """Server: the digest of the whole block; the bytes asked for are the frame's data, exactly that long."""

    digest: _Id


class GetCatalog(_Message, frozen=True):
    """Client: a part of the encoded catalog of that digest."""

    digest: _Id
    offset_bytes: _Count
    length_bytes: Annotated[int, Meta(ge=1, le=CATALOG_PART_LIMIT_BYTES)]


class CatalogPart(_Message, frozen=True):
    """Server: the part is the frame's data, exactly as long as asked."""


class Watch(_Message, frozen=True):
    """Client: answer when there is more than this: a catalog, and so many content ids of one server life."""

    boot: _IdOrNone  # empty: nothing known yet
    catalog_digest: _IdOrNone
    known_contents: _Count


class Changed(_Message, frozen=True):
    """Server: what it publishes now. Data: content pairs number ``first_content`` and on of this life and catalog."""

    boot: _Id
    catalog_digest: _Id
    catalog_bytes: _Count
    generation: _Count
    first_content: _Count


class Ping(_Message, frozen=True):
    """Client: are you there."""


class Pong(_Message, frozen=True):
    """Server: yes."""


class Error(_Message, frozen=True):
    """Server: the reply to a request that was not done."""

    code: Code
    message: _Reason


class Cancel(_Message, frozen=True):
    """Client: the reply to the request of this frame's id is not wanted any more. Still answered once.

    A lease that the request was answered with already is returned by it.
    """


class RdmaConnect(_Message, frozen=True):
    """Client: make a queue pair that mine may read from; one that this connection had before is gone.

    ``reads`` is how many READs the client's device may have under way at once.
    """

    queue_pair: _Number24
    first_packet: _Number24
    gid: _Gid
    lid: _Lid  # 0 on Ethernet
    mtu_bytes: _Mtu
    reads: _Reads


class RdmaConnected(_Message, frozen=True):
    """Server: it is ready to be read from. At most ``buffers`` leases at once, each valid for ``lease_s`` seconds."""

    queue_pair: _Number24
    first_packet: _Number24
    gid: _Gid
    lid: _Lid
    mtu_bytes: _Mtu
    reads: _Reads
    buffers: Annotated[int, Meta(ge=1, le=4096)]
    buffer_bytes: _Count
    lease_s: Annotated[int, Meta(ge=1, le=3600)]


class LeaseBlock(_Message, frozen=True):
    """Client: as ReadBlock, but put the bytes where I can read them over RDMA."""

    version: _Id
    block: _Count
    start_bytes: _Count
    length_bytes: _Count
    block_bytes: _Count


class Leased(_Message, frozen=True):
    """Server: the digest of the whole block, and where the bytes asked for lie until the lease is returned or over."""

    digest: _Id
    lease: _Word64
    address: _Word64
    remote_key: Annotated[int, Meta(ge=0, lt=1 << 32)]


class ReturnLeases(_Message, frozen=True):
    """Client: these are read, or will not be. No request: there is no reply."""

    leases: Annotated[tuple[_Word64, ...], Meta(min_length=1, max_length=RETURNED_LEASES_LIMIT)]


class RdmaDisconnect(_Message, frozen=True):
    """Client: my queue pair is gone; every lease is returned. No request: there is no reply."""


Message: TypeAlias = (
    Hello
    | Challenge
    | Proof
    | Welcome
    | Refused
    | ReadBlock
    | BlockData
    | GetCatalog
    | CatalogPart
    | Watch
    | Changed
    | Ping
    | Pong
    | Error
    | Cancel
    | RdmaConnect
    | RdmaConnected
    | LeaseBlock
    | Leased
    | ReturnLeases
    | RdmaDisconnect
)


class Type(IntEnum):
    """The type byte of each message. Numbers are never reused."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5
    READ_BLOCK = 16
    BLOCK_DATA = 17
    GET_CATALOG = 18
    CATALOG_PART = 19
    WATCH = 20
    CHANGED = 21
    PING = 22
    PONG = 23
    ERROR = 24
    CANCEL = 25
    RDMA_CONNECT = 26
    RDMA_CONNECTED = 27
    LEASE_BLOCK = 28
    LEASED = 29
    RETURN_LEASES = 30
    RDMA_DISCONNECT = 31


_CLASSES: dict[Type, type[Message]] = {
    Type.HELLO: Hello,
    Type.CHALLENGE: Challenge,
    Type.PROOF: Proof,
    Type.WELCOME: Welcome,
    Type.REFUSED: Refused,
    Type.READ_BLOCK: ReadBlock,
    Type.BLOCK_DATA: BlockData,
    Type.GET_CATALOG: GetCatalog,
    Type.CATALOG_PART: CatalogPart,
    Type.WATCH: Watch,
    Type.CHANGED: Changed,
    Type.PING: Ping,
    Type.PONG: Pong,
    Type.ERROR: Error,
    Type.CANCEL: Cancel,
    Type.RDMA_CONNECT: RdmaConnect,
    Type.RDMA_CONNECTED: RdmaConnected,
    Type.LEASE_BLOCK: LeaseBlock,
    Type.LEASED: Leased,
    Type.RETURN_LEASES: ReturnLeases,
    Type.RDMA_DISCONNECT: RdmaDisconnect,
}
_TYPES: dict[type[Message], Type] = {class_: type_ for type_, class_ in _CLASSES.items()}
_DECODERS: dict[int, "msgspec.msgpack.Decoder[Message]"] = {
    int(type_): msgspec.msgpack.Decoder(class_) for type_, class_ in _CLASSES.items()
}
_ENCODER = msgspec.msgpack.Encoder()

# What a code means to the one who asked, and which code tells a failure to the other side.
_ERRORS: dict[Code, type[TierfsError]] = {
    Code.STALE: StaleVersion,
    Code.NOT_FOUND: NotFound,
    Code.UNAVAILABLE: SourceUnavailable,
    Code.REFUSED: SourceRefused,
    Code.PROTOCOL: ProtocolError,
    Code.BUSY: SourceUnavailable,
    Code.AUTHENTICATION: AuthenticationFailed,
    Code.CANCELLED: SourceUnavailable,
}
_CODES: dict[type[TierfsError], Code] = {
    StaleVersion: Code.STALE,
    NotFound: Code.NOT_FOUND,
    SourceUnavailable: Code.UNAVAILABLE,
    SourceRefused: Code.REFUSED,
    ProtocolError: Code.PROTOCOL,
    AuthenticationFailed: Code.AUTHENTICATION,
}


def type_of(class_: type[Message]) -> Type:
    """The type byte of a message class."""
    return _TYPES[class_]


def type_name(type_: int) -> str:
    """The name of a message type, for people."""
    return _CLASSES[Type(type_)].__name__ if type_ in _DECODERS else f"type {type_}"


def encode(message: Message, *, request_id: int, data_bytes: int = 0) -> bytes:
    """Header and body of a frame; its ``data_bytes`` of data follow by themselves."""
    body = _ENCODER.encode(message)
    header = encode_header(
        type=_TYPES[type(message)], request_id=request_id, body_bytes=len(body), data_bytes=data_bytes
    )
    return header + body


def decode(type_: int, body: bytes | memoryview) -> Message:
    """The message in a frame's body. Raises ProtocolError for unknown types, and bodies that are not exactly one."""
    decoder = _DECODERS.get(type_)
    if decoder is None:
        raise ProtocolError(f"message type {type_} is not known here: one side is newer than the other")
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a {type_name(type_)} message does not have its form: {error}") from error


def error_for(code: Code, text: str) -> TierfsError:
    """The exception that a code from the other side stands for."""
    return _ERRORS[code](printable(text))


def code_for(error: TierfsError) -> Code:
    """The code that tells this failure to the other side; trouble with our own media is "unavailable" to it."""
    return _CODES.get(type(error), Code.UNAVAILABLE)


def printable(text: str) -> str:
    """A peer's text made safe for a log line or a terminal, and short enough for a message."""
    return text_printable(text[:REASON_LIMIT_CHARACTERS])
