"""Messages between the daemon and `tierfs-channel`, and the READ replies it carries out. Pure; fuse/channel calls it.

The other end is mount-helpers/channel/protocol.h. One message is one packet of the control socket, little endian:

    0   type     u32  see the classes here; below 100 the daemon sends it, from 100 on the channel
    4   serial   u32  an acknowledgement carries the serial of its request
    8   numbers  as the class lists them, then text (UTF-8) or pairs where the class has any

A READ reply names where the bytes lie: a header and at most PARTS_MAX parts. What must hold: nothing is believed before
its length is checked, and decode raises nothing but ProtocolError.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from tierfs.blocks.errors import ProtocolError

VERSION = 2
SLOTS = 4096
PARTS_MAX = 512
READ_MAGIC = 0x44524654
POOL_SLOT = NO_LEASE = 0xFFFFFFFF
COUNTERS_BYTES = 256 * 8
PACKET_BYTES_MAX = 65536

_HEAD = struct.Struct("<II")
_PAIR = struct.Struct("<QQ")
_READ_HEAD = struct.Struct("<IHHIIQ")
_READ_PART = struct.Struct("<IIQII")
_READ_ONE = struct.Struct("<IHHIIQ" + "IIQII")


class Message:
    """Base of the messages: the fields of a class are packed by its ``numbers``, in order."""

    type: ClassVar[int]
    numbers: ClassVar[struct.Struct] = struct.Struct("<")
    tail: ClassVar[str] = ""  # what the last field is: "text", "pairs"; else a number
    descriptors: ClassVar[int] = 0  # how many come with it


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """The first one."""

    version: int
    type: ClassVar[int] = 1
    numbers: ClassVar[struct.Struct] = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Pool(Message):
    """The buffer pool's memory file and that of the leases, once a daemon."""

    pool_bytes: int
    leases: int
    type: ClassVar[int] = 2
    numbers: ClassVar[struct.Struct] = struct.Struct("<QI")
    descriptors: ClassVar[int] = 2


@dataclass(frozen=True, slots=True)
class Mount(Message):
    """Mount now, or, after a restart: send the requests."""

    type: ClassVar[int] = 3


@dataclass(frozen=True, slots=True)
class FileAdd(Message):
    """A tier file for a slot that is free."""

    slot: int
    generation: int
    size_bytes: int
    type: ClassVar[int] = 4
    numbers: ClassVar[struct.Struct] = struct.Struct("<IIQ")
    descriptors: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class FileDrop(Message):
    """The slot is no longer used."""

    slot: int
    generation: int
    type: ClassVar[int] = 5
    numbers: ClassVar[struct.Struct] = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class Offer(Message):
    """The next OPEN reply of that inode may be passthrough."""

    inode: int
    slot: int
    generation: int
    type: ClassVar[int] = 6
    numbers: ClassVar[struct.Struct] = struct.Struct("<QII")


@dataclass(frozen=True, slots=True)
class ListHandles(Message):
    """Which files are open?"""

    type: ClassVar[int] = 7


@dataclass(frozen=True, slots=True)
class Stopping(Message):
    """The daemon ends on purpose; unmount 1: so shall the mount."""

    unmount: int
    type: ClassVar[int] = 8
    numbers: ClassVar[struct.Struct] = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class ReadSettled(Message):
    """The tier knows of the failed read; send the request again."""

    unique: int
    type: ClassVar[int] = 9
    numbers: ClassVar[struct.Struct] = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Ack(Message):
    """The answer to each message of the daemon; status is 0 or an errno."""

    status: int
    text: str
    type: ClassVar[int] = 100
    numbers: ClassVar[struct.Struct] = struct.Struct("<I")
    tail: ClassVar[str] = "text"


@dataclass(frozen=True, slots=True)
class ReadFailed(Message):
    """A part of a READ reply could not be read."""

    unique: int
    slot: int
    generation: int
    offset_bytes: int
    length_bytes: int
    error_number: int
    type: ClassVar[int] = 101
    numbers: ClassVar[struct.Struct] = struct.Struct("<QIIQII")


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Before the acknowledgement of Hello, with the counters' memory file."""

    version: int
    epoch: int
    passthrough: int
    reason: str
    type: ClassVar[int] = 102
    numbers: ClassVar[struct.Struct] = struct.Struct("<III")
    tail: ClassVar[str] = "text"
    descriptors: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class Handles(Message):
    """Some of the open files: inode number and how many times it is open."""

    pairs: tuple[tuple[int, int], ...]
    type: ClassVar[int] = 103
    tail: ClassVar[str] = "pairs"


@dataclass(frozen=True, slots=True)
class Stop(Message):
    """End cleanly; another daemon comes."""

    type: ClassVar[int] = 104


_CLASSES: tuple[type[Message], ...] = (
    Hello, Pool, Mount, FileAdd, FileDrop, Offer, ListHandles, Stopping, ReadSettled,
    Ack, ReadFailed, Welcome, Handles, Stop,
)  # fmt: skip
CLASSES: dict[int, type[Message]] = {kind.type: kind for kind in _CLASSES}


def encode(serial: int, message: Message) -> bytes:
    """One packet. Numbers out of range are a bug of the caller."""
    values = [getattr(message, name) for name in message.__slots__]  # type: ignore[attr-defined]
    tail = b""
    if message.tail == "text":
        tail = values.pop().encode()
    elif message.tail == "pairs":
        pairs = values.pop()
        tail = struct.pack("<I", len(pairs)) + b"".join(_PAIR.pack(*pair) for pair in pairs)
    return _HEAD.pack(message.type, serial) + message.numbers.pack(*values) + tail


def decode(packet: bytes) -> tuple[int, Message]:
    """The serial and the message of one packet. Raises ProtocolError."""
    if len(packet) < _HEAD.size:
        raise ProtocolError(f"channel: a packet of {len(packet)} bytes has no header")
    number, serial = _HEAD.unpack_from(packet)
    kind = CLASSES.get(number)
    if kind is None:
        raise ProtocolError(f"channel: unknown message {number}")
    end = _HEAD.size + kind.numbers.size
    if len(packet) < end or (not kind.tail and len(packet) != end):
        raise ProtocolError(f"channel: {kind.__name__} has {len(packet)} bytes, not {end}")
    values: list[object] = list(kind.numbers.unpack_from(packet, _HEAD.size))
    if kind.tail == "text":
        values.append(packet[end:].decode("utf-8", "replace"))
    elif kind.tail == "pairs":
        values.append(_pairs(packet, end))
    return serial, kind(*values)


def _pairs(packet: bytes, start: int) -> tuple[tuple[int, int], ...]:
    if len(packet) < start + 4:
        raise ProtocolError("channel: a list without its length")
    count = int.from_bytes(packet[start : start + 4], "little")
    if len(packet) != start + 4 + count * _PAIR.size:
        raise ProtocolError(f"channel: a list of {count} in {len(packet)} bytes")
    return tuple(_PAIR.iter_unpack(packet[start + 4 :]))


# -- READ replies ----------------------------------------------------------------------------------------------------


class Place(Protocol):
    """A slot and its generation (tiers.interface.LentFile)."""

    @property
    def slot(self) -> int: ...

    @property
    def generation(self) -> int: ...


class Piece(Protocol):
    """What a READ reply needs of a part (tiers.interface.Part)."""

    @property
    def lent(self) -> Place | None: ...

    @property
    def offset_bytes(self) -> int: ...

    @property
    def length_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ReadReply:
    """A READ reply as the channel sees it; a part is (slot, generation, offset, length)."""

    lease: int
    length_bytes: int
    file_bytes: int
    parts: tuple[tuple[int, int, int, int], ...]


def encode_read_reply(lease: int, pieces: Sequence[Piece], *, file_bytes: int) -> bytes:
    """The reply that names these pieces, in order; neighbours become one part. ``file_bytes``: the file's length, by
    which the channel sees whether the pieces are all that was asked for.

    Raises ProtocolError when more parts are left than a reply can name.
    """
    if len(pieces) == 1:  # nearly every read
        piece = pieces[0]
        lent, length = piece.lent, piece.length_bytes
        slot, generation = (POOL_SLOT, 0) if lent is None else (lent.slot, lent.generation)
        return _READ_ONE.pack(
            READ_MAGIC, VERSION, 1, lease, length, file_bytes, slot, generation, piece.offset_bytes, length, 0
        )  # fmt: skip
    if not pieces:
        return _READ_HEAD.pack(READ_MAGIC, VERSION, 0, NO_LEASE, 0, file_bytes)
    parts: list[tuple[int, int, int, int]] = []
    total = 0
    for piece in pieces:
        lent, offset, length = piece.lent, piece.offset_bytes, piece.length_bytes
        slot, generation = (POOL_SLOT, 0) if lent is None else (lent.slot, lent.generation)
        total += length
        if parts and parts[-1][:2] == (slot, generation) and parts[-1][2] + parts[-1][3] == offset:
            offset, length = parts[-1][2], parts[-1][3] + length
            parts.pop()
        parts.append((slot, generation, offset, length))
    if len(parts) > PARTS_MAX:
        raise ProtocolError(
            f"a read of {total} bytes lies in {len(parts)} places, and the channel takes {PARTS_MAX}:"
            ' the export\'s blocks are too small for it, set mount.mode = "direct"'
        )
    return _READ_HEAD.pack(READ_MAGIC, VERSION, len(parts), lease, total, file_bytes) + b"".join(
        _READ_PART.pack(*part, 0) for part in parts
    )


def decode_read_reply(reply: bytes) -> ReadReply:
    """The reply again, as the channel checks it. Raises ProtocolError."""
    if len(reply) < _READ_HEAD.size:
        raise ProtocolError("READ reply: no header")
    magic, version, count, lease, length, file_bytes = _READ_HEAD.unpack_from(reply)
    if magic != READ_MAGIC or version != VERSION or count > PARTS_MAX:
        raise ProtocolError("READ reply: not a list of parts")
    if len(reply) != _READ_HEAD.size + count * _READ_PART.size:
        raise ProtocolError(f"READ reply: {count} parts in {len(reply)} bytes")
    parts = tuple(_READ_PART.iter_unpack(reply[_READ_HEAD.size :]))
    if any(reserved for *_, reserved in parts) or sum(part[3] for part in parts) != length:
        raise ProtocolError("READ reply: the lengths do not agree")
    if count and lease == NO_LEASE:
        raise ProtocolError("READ reply: parts without a lease")
    return ReadReply(lease, length, file_bytes, tuple(part[:4] for part in parts))


# -- counters ---------------------------------------------------------------------------------------------------------

_OPCODES = {
    1: "lookup", 3: "getattr", 5: "readlink", 14: "open", 15: "read", 17: "statfs", 18: "release", 20: "fsync",
    22: "getxattr", 23: "listxattr", 25: "flush", 26: "init", 27: "opendir", 28: "readdir", 29: "releasedir",
    30: "fsyncdir", 34: "access", 36: "interrupt", 38: "destroy", 42: "batch_forget", 44: "readdirplus", 50: "syncfs",
    2: "forget",
}  # fmt: skip
_NAMES = (
    "passthrough_opens", "cached_opens", "held_back_opens", "refused_opens", "last_refusal_errno", "replays",
    "daemon_starts", "grace_waits", "fatal_interrupts", "ignored_interrupts", "copied_bytes", "failed_copies",
    "late_replies", "pending", "pending_max", "refused_requests", "refused_notifications", "bad_messages",
    "passthrough_inodes", "max_pages", "max_background", "congestion_threshold", "passthrough_negotiated",
    "read_ahead_bytes", "queued_sends", "given_up_requests",
)  # fmt: skip
_SIZES_AT, _NAMES_AT = 64, 96


@dataclass(frozen=True)
class Counters:
    """What the channel has counted."""

    requests: dict[str, int]  # by the name of the operation; only those that came
    read_sizes: dict[str, int]  # requests of at most so many bytes, and more than the entry before
    named: dict[str, int]


def decode_counters(memory: bytes) -> Counters:
    """The counters' memory file. Raises ProtocolError."""
    if len(memory) != COUNTERS_BYTES:
        raise ProtocolError(f"channel: counters of {len(memory)} bytes, not {COUNTERS_BYTES}")
    values = struct.unpack("<256Q", memory)
    requests = {
        _OPCODES.get(opcode, f"opcode_{opcode}" if opcode else "other"): values[opcode]
        for opcode in range(_SIZES_AT)
        if values[opcode]
    }
    sizes = {str(4096 << bucket): values[_SIZES_AT + bucket] for bucket in range(16) if values[_SIZES_AT + bucket]}
    named = {name: values[_NAMES_AT + position] for position, name in enumerate(_NAMES)}
    return Counters(requests, sizes, named)
