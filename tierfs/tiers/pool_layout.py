"""How residency lies in a pool's root object: offsets, sizes and packing. Pure: no library, no I/O. Called by
pool_residency.py; described for people in docs/HOT-TIER.md, which must say the same.

    0     header      magic, version, sizes of what follows (one checksum); then the mark: boot id, clean stop
    …     bitmaps     objects, models, records, verified: one bit for each slot of that table, lowest bit first
    …     objects     slots of 1024 bytes: identity and texts, written once; state (64 bytes), rewritten whole
    …     models      slots of 1024 bytes: heat and name
    …     records     32 bytes each: one resident block of an object, or one more key (alias) of it

All numbers are little endian; every table begins on a page. A slot whose bit is not set holds nothing, whatever its
bytes say: so a slot is filled first and only its bit needs a transaction. Each slot has a checksum that ties it to what
it belongs to (a record to its object's name), since a flipped bit must cost a refetch, never give another file's bytes.
"""

import struct
import zlib
from dataclasses import dataclass

from tierfs.blocks.ids import ID_BYTES, BlockDigest, ObjectKey
from tierfs.policy.eviction import Heat

LAYOUT_NAME = "tierfs residency"  # libpmemobj compares it; the version is in the header, so that it can be told
VERSION = 1
MAGIC = b"tierfsRP"

SLOT_BYTES = 1024
STATE_BYTES = 64
RECORD_BYTES = 32
MARK_OFFSET = 64
MARK_BYTES = 64
ALIAS = 0xFFFFFFFF  # in place of a block's number; an object of so many blocks cannot be stored

_PAGE_BYTES = 4096
_HEADER = struct.Struct("<8sIIQIII")  # magic, version, page, root bytes, object slots, model slots, records
_MARK = struct.Struct("<36sI")  # boot id, clean
_IDENTITY = struct.Struct("<16sQQIHHH")  # name, size, size of the model, block size; text, its model, start of its path
_STATE = struct.Struct("<16sdqqI")  # key, last use, mtime, ctime, flags
_RECORD = struct.Struct("<II16s")  # object's slot, block, digest
_MODEL = struct.Struct("<dddH")  # loads, counted, last use, length of the name
_CHECKSUM = struct.Struct("<I")

_STATE_OFFSET = 64
_OBJECT_TEXT_OFFSET = _STATE_OFFSET + STATE_BYTES
OBJECT_TEXT_BYTES = SLOT_BYTES - _OBJECT_TEXT_OFFSET
_MODEL_TEXT_OFFSET = 32
MODEL_TEXT_BYTES = SLOT_BYTES - _MODEL_TEXT_OFFSET

_HANDED_OUT = 1
# One slot for each 4 MiB of capacity: models are a few large files and a dozen small ones. What has no slot bypasses.
_OBJECT_PER_BYTES = 4 << 20
_MIN_OBJECTS, _MAX_OBJECTS = 1024, 65536
_MODELS = 1024
# Beside the root object: libpmemobj's lanes and heap (4 MiB), and undo logs: the bitmaps and some hundred states.
_POOL_OVERHEAD_BYTES = 16 << 20
_POOL_STEP_BYTES = 2 << 20


class Damaged(ValueError):
    """The header is not one of ours, or makes no sense."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many slots the tables have."""

    objects: int
    models: int
    records: int

    @classmethod
    def wanted(cls, *, capacity_bytes: int, block_bytes: int) -> "Sizes":
        """Enough for a tier of that capacity: each object has at most one block shorter than the others, and one alias
        each is provided for."""
        objects = min(_MAX_OBJECTS, max(_MIN_OBJECTS, capacity_bytes // _OBJECT_PER_BYTES))
        return cls(objects, _MODELS, -(-capacity_bytes // block_bytes) + 2 * objects)

    def united(self, other: "Sizes") -> "Sizes":
        """Room for what fits in either."""
        return Sizes(max(self.objects, other.objects), max(self.models, other.models), max(self.records, other.records))


@dataclass(frozen=True, slots=True)
class Table:
    """A table of slots and the bitmap that says which of them are in use. Offsets are from the root's start."""

    count: int
    slot_bytes: int
    bits_offset: int
    offset: int

    @property
    def bits_bytes(self) -> int:
        """The length of the bitmap."""
        return _bits_bytes(self.count)

    def slot(self, number: int) -> int:
        """The offset of that slot."""
        assert 0 <= number < self.count
        return self.offset + number * self.slot_bytes


class Layout:
    """Where everything lies for given sizes."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        counts = (sizes.objects, sizes.models, sizes.records, sizes.records)
        bits: list[int] = []
        end = _PAGE_BYTES
        for count in counts:
            bits.append(end)
            end += _bits_bytes(count)
        offsets: list[int] = []
        for count, slot_bytes in zip(counts, (SLOT_BYTES, SLOT_BYTES, RECORD_BYTES), strict=False):
            end = _round_up(end, _PAGE_BYTES)
            offsets.append(end)
            end += count * slot_bytes
        self.objects = Table(sizes.objects, SLOT_BYTES, bits[0], offsets[0])
        self.models = Table(sizes.models, SLOT_BYTES, bits[1], offsets[1])
        self.records = Table(sizes.records, RECORD_BYTES, bits[2], offsets[2])
        self.verified = Table(sizes.records, RECORD_BYTES, bits[3], offsets[2])  # more bits of the records
        self.root_bytes = _round_up(end, _PAGE_BYTES)
        self.pool_bytes = _round_up(self.root_bytes + _POOL_OVERHEAD_BYTES, _POOL_STEP_BYTES)

    def state_offset(self, slot: int) -> int:
        """The offset of an object's state."""
        return self.objects.slot(slot) + _STATE_OFFSET

    def pack_header(self) -> bytes:
        """The header of a new pool."""
        sizes = self.sizes
        return _sealed(
            _HEADER.pack(MAGIC, VERSION, _PAGE_BYTES, self.root_bytes, sizes.objects, sizes.models, sizes.records)
        )

    @classmethod
    def from_header(cls, data: bytes, *, root_bytes: int) -> "Layout":
        """The layout a header tells of. Raises Damaged; see ``version_of`` for one that is newer."""
        if not _seal_holds(data[: _HEADER.size + _CHECKSUM.size]):
            raise Damaged("the checksum of the pool's header is wrong")
        magic, version, page_bytes, told_bytes, objects, models, records = _HEADER.unpack_from(data)
        layout = cls(Sizes(objects, models, records))
        if (magic, version, page_bytes) != (MAGIC, VERSION, _PAGE_BYTES):
            raise Damaged("the pool's header has another magic number or version")
        if layout.root_bytes != told_bytes or told_bytes > root_bytes:
            raise Damaged("the pool's header tells of other sizes than the pool has")
        return layout


@dataclass
class ObjectSlot:
    """What a slot says of an object. ``path`` may have been shortened; see ``pack_object``."""

    name: ObjectKey
    size_bytes: int
    block_bytes: int
    path: bytes
    model: bytes
    model_bytes: int


@dataclass
class State:
    """What changes of an object."""

    key: ObjectKey
    last_use_s: float
    stamp: tuple[int, int]
    handed_out: bool


HEADER_BYTES = _HEADER.size + _CHECKSUM.size


def version_of(data: bytes) -> int:
    """The version a header claims, whether or not this code knows it; 0 where it is no header of ours."""
    magic, version = struct.unpack_from("<8sI", data)
    return int(version) if magic == MAGIC else 0


def pack_mark(boot: str, *, clean: bool) -> bytes:
    """The mark: which boot of the machine used the pool last, and whether it stopped in order."""
    return _sealed(_MARK.pack(boot.encode("ascii"), clean))


def unpack_mark(data: bytes) -> tuple[str, bool]:
    """Boot id and clean stop; an unreadable mark is that of another boot that did not stop in order."""
    if not _seal_holds(data[: _MARK.size + _CHECKSUM.size]):
        return "", False
    boot, clean = _MARK.unpack_from(data)
    return boot.rstrip(b"\0").decode("ascii", "replace"), bool(clean)


def pack_object(one: ObjectSlot, state: State) -> bytes:
    """A slot, as far as it is used. The text is the path, whose beginning usually is the model; else both of them.

    What is too long is cut: the end of a path, which is for people only; a model of more than OBJECT_TEXT_BYTES is one
    of another name in the next run, which costs a poorer choice of what to evict.
    """
    model = one.model[:OBJECT_TEXT_BYTES]
    path_start = 0 if one.path.startswith(model) else len(model)
    text = (one.path if not path_start else model + one.path)[:OBJECT_TEXT_BYTES]
    identity = _IDENTITY.pack(
        one.name, one.size_bytes, one.model_bytes, one.block_bytes, len(text), len(model), path_start
    )
    identity += _CHECKSUM.pack(zlib.crc32(text, zlib.crc32(identity)))
    return identity.ljust(_STATE_OFFSET, b"\0") + pack_state(one.name, state) + text


def unpack_object(data: bytes) -> tuple[ObjectSlot, State] | None:
    """What a whole slot says; None where it makes no sense."""
    name, size_bytes, model_bytes, block_bytes, length, model_length, path_start = _IDENTITY.unpack_from(data)
    text = data[_OBJECT_TEXT_OFFSET : _OBJECT_TEXT_OFFSET + length]
    checksum = _CHECKSUM.pack(zlib.crc32(text, zlib.crc32(data[: _IDENTITY.size])))
    state = _unpack_state(name, data[_STATE_OFFSET : _STATE_OFFSET + STATE_BYTES])
    if data[_IDENTITY.size : _IDENTITY.size + _CHECKSUM.size] != checksum or state is None:
        return None
    path, model = text[path_start:], text[:model_length]
    return ObjectSlot(ObjectKey(name), size_bytes, block_bytes, path, model, model_bytes), state


def pack_state(name: ObjectKey, state: State) -> bytes:
    """The state of the object of that name; 64 bytes."""
    flags = _HANDED_OUT if state.handed_out else 0
    data = _STATE.pack(state.key, state.last_use_s, *state.stamp, flags)
    return (data + _CHECKSUM.pack(zlib.crc32(data, zlib.crc32(name)))).ljust(STATE_BYTES, b"\0")


def _unpack_state(name: bytes, data: bytes) -> State | None:
    key, last_use_s, mtime_ns, ctime_ns, flags = _STATE.unpack_from(data)
    checksum = _CHECKSUM.pack(zlib.crc32(data[: _STATE.size], zlib.crc32(name)))
    if data[_STATE.size : _STATE.size + _CHECKSUM.size] != checksum:
        return None
    return State(ObjectKey(key), last_use_s, (mtime_ns, ctime_ns), bool(flags & _HANDED_OUT))


def pack_record(name: ObjectKey, slot: int, block: int, digest: bytes) -> bytes:
    """A resident block of the object of that name in that slot, or with ALIAS as its number another key of it."""
    assert len(digest) == ID_BYTES
    data = _RECORD.pack(slot, block, digest)
    return (data + _CHECKSUM.pack(zlib.crc32(data, zlib.crc32(name)))).ljust(RECORD_BYTES, b"\0")


def record_slot(data: bytes) -> int:
    """Which object slot a record says it belongs to; to be proved by ``unpack_record``."""
    return int(_RECORD.unpack_from(data)[0])


def unpack_record(name: ObjectKey, data: bytes) -> tuple[int, BlockDigest] | None:
    """Block (or ALIAS) and digest (or key); None where it is no record of that object."""
    _, block, digest = _RECORD.unpack_from(data)
    if data[_RECORD.size : _RECORD.size + 4] != _CHECKSUM.pack(zlib.crc32(data[: _RECORD.size], zlib.crc32(name))):
        return None
    return block, BlockDigest(digest)


def pack_model(model: bytes, heat: Heat) -> bytes:
    """A model and its heat. Its name must not be longer than MODEL_TEXT_BYTES."""
    assert len(model) <= MODEL_TEXT_BYTES
    data = _MODEL.pack(heat.loads, heat.counted_s, heat.last_use_s, len(model))
    return (data + _CHECKSUM.pack(zlib.crc32(model, zlib.crc32(data)))).ljust(_MODEL_TEXT_OFFSET, b"\0") + model


def unpack_model(data: bytes) -> tuple[bytes, Heat] | None:
    """What a slot says of a model; None where it makes no sense."""
    loads, counted_s, last_use_s, length = _MODEL.unpack_from(data)
    model = data[_MODEL_TEXT_OFFSET : _MODEL_TEXT_OFFSET + length]
    if data[_MODEL.size : _MODEL.size + 4] != _CHECKSUM.pack(zlib.crc32(model, zlib.crc32(data[: _MODEL.size]))):
        return None
    return model, Heat(loads, counted_s, last_use_s)


def runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Sorted numbers as runs: first and count."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and sum(found[-1]) == number:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return found


def _bits_bytes(count: int) -> int:
    return _round_up(-(-count // 8), 64)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _sealed(data: bytes) -> bytes:
    return data + _CHECKSUM.pack(zlib.crc32(data))


def _seal_holds(data: bytes) -> bool:
    return len(data) > _CHECKSUM.size and data[-4:] == _CHECKSUM.pack(zlib.crc32(data[:-4]))
