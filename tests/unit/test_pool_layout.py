"""The layout of a residency pool: where things lie, what packing keeps, and that no flipped bit goes unseen."""

import struct

import pytest

from tierfs.blocks.ids import BlockDigest, ObjectKey
from tierfs.policy.eviction import Heat
from tierfs.tiers import pool_layout as layout
from tierfs.tiers.pool_layout import Damaged, Layout, ObjectSlot, Sizes, State

NAME, KEY = ObjectKey(b"n" * 16), ObjectKey(b"k" * 16)
MIB, GIB = 1 << 20, 1 << 30
STATE = State(KEY, 12.5, (1_700_000_000_123_456_789, -5), True)


@pytest.mark.parametrize(
    ("capacity_bytes", "block_bytes", "objects", "records"),
    [
        (1, 4 * MIB, 1024, 1 + 2048),
        (64 * MIB, 64 << 10, 1024, 1024 + 2048),
        (128 * GIB, 4 * MIB, 32768, 32768 + 65536),
        (128 * GIB + 1, 4 * MIB, 32768, 32769 + 65536),
        (8192 * GIB, 4 * MIB, 65536, 2097152 + 131072),
    ],
)
def test_tables_are_sized_from_capacity_and_block_size(
    capacity_bytes: int, block_bytes: int, objects: int, records: int
) -> None:
    sizes = Sizes.wanted(capacity_bytes=capacity_bytes, block_bytes=block_bytes)
    assert (sizes.objects, sizes.records) == (objects, records)
    assert Layout(sizes).pool_bytes < max(32 * MIB, capacity_bytes // 256)  # it costs little of what it is about


@pytest.mark.parametrize("sizes", [Sizes(1, 1, 1), Sizes(1024, 1024, 3072), Sizes(513, 7, 100_001)])
def test_tables_do_not_overlap_and_lie_inside_the_root(sizes: Sizes) -> None:
    where = Layout(sizes)
    pieces = [(0, layout.HEADER_BYTES), (layout.MARK_OFFSET, layout.MARK_BYTES)]
    tables = (where.objects, where.models, where.records, where.verified)
    pieces += [(table.bits_offset, table.bits_bytes) for table in tables]
    pieces += [(table.offset, table.count * table.slot_bytes) for table in tables[:3]]
    pieces.sort()
    for (start, length), (following, _) in zip(pieces, [*pieces[1:], (where.root_bytes, 0)], strict=True):
        assert start + length <= following
    for table in tables:
        assert table.bits_bytes * 8 >= table.count
        assert table.offset % 4096 == table.bits_offset % 64 == 0
    assert where.records.offset == where.verified.offset
    assert where.pool_bytes >= where.root_bytes + 16 * MIB
    with pytest.raises(AssertionError):
        where.objects.slot(sizes.objects)


def test_header_tells_the_sizes_again_and_nothing_else_passes() -> None:
    where = Layout(Sizes(1024, 16, 3000))
    header = where.pack_header()
    assert len(header) == layout.HEADER_BYTES <= layout.MARK_OFFSET
    assert layout.version_of(header) == layout.VERSION
    assert Layout.from_header(header, root_bytes=where.root_bytes).sizes == where.sizes
    with pytest.raises(Damaged):
        Layout.from_header(header, root_bytes=where.root_bytes - 1)
    for place in range(len(header)):
        flipped = bytearray(header)
        flipped[place] ^= 4
        with pytest.raises(Damaged):
            Layout.from_header(bytes(flipped), root_bytes=where.root_bytes)
    assert layout.version_of(bytes(len(header))) == 0


def test_mark() -> None:
    boot = "0f0e0d0c-0000-1111-2222-333344445555"
    mark = layout.pack_mark(boot, clean=True)
    assert layout.unpack_mark(mark.ljust(64, b"\0")) == (boot, True)
    assert layout.unpack_mark(layout.pack_mark(boot, clean=False)) == (boot, False)
    for data in (bytes(64), mark[:-1] + b"!", bytes([mark[0] ^ 1]) + mark[1:]):
        assert layout.unpack_mark(data) == ("", False)


LONG = b"d/" + b"x" * 2000
OBJECTS = [
    (b"org/model/a.safetensors", b"org/model", b"org/model/a.safetensors", b"org/model"),
    (b"single", b"single", b"single", b"single"),
    (b"a/1", b"another model", b"a/1", b"another model"),
    (b"", b"", b"", b""),
    (b"\xff\n\0", b"\xff", b"\xff\n\0", b"\xff"),
    (LONG, b"d", LONG[: layout.OBJECT_TEXT_BYTES], b"d"),
    (LONG, LONG, LONG[: layout.OBJECT_TEXT_BYTES], LONG[: layout.OBJECT_TEXT_BYTES]),
    (b"path", LONG, b"", LONG[: layout.OBJECT_TEXT_BYTES]),
    (LONG, b"other", LONG[: layout.OBJECT_TEXT_BYTES - 5], b"other"),
]


@pytest.mark.parametrize(("path", "model", "path_back", "model_back"), OBJECTS)
def test_object_comes_back_with_its_texts_as_far_as_they_fit(
    path: bytes, model: bytes, path_back: bytes, model_back: bytes
) -> None:
    one = ObjectSlot(NAME, 1 << 61, 4 << 20, path, model, 1 << 62)
    data = layout.pack_object(one, STATE)
    assert len(data) <= layout.SLOT_BYTES
    stale = data + b"\xee" * (layout.SLOT_BYTES - len(data))  # what an earlier object left behind it
    assert layout.unpack_object(stale) == (
        ObjectSlot(NAME, 1 << 61, 4 << 20, path_back, model_back, 1 << 62),
        STATE,
    )


def test_no_flipped_bit_of_an_object_goes_unseen() -> None:
    one = ObjectSlot(NAME, 10_000, 4096, b"m/file", b"m", 99)
    data = layout.pack_object(one, STATE)
    padding = [*range(46, 64), *range(64 + 48, 128)]
    for place in range(len(data)):
        flipped = bytearray(data.ljust(layout.SLOT_BYTES, b"\0"))
        flipped[place] ^= 0x10
        assert (layout.unpack_object(bytes(flipped)) is None) == (place not in padding), place


def test_state_of_another_object_does_not_pass() -> None:
    one = ObjectSlot(NAME, 10_000, 4096, b"m/file", b"m", 99)
    data = bytearray(layout.pack_object(one, STATE).ljust(layout.SLOT_BYTES, b"\0"))
    where = Layout(Sizes(4, 1, 1))
    start = where.state_offset(2) - where.objects.slot(2)
    data[start : start + layout.STATE_BYTES] = layout.pack_state(KEY, STATE)
    assert layout.unpack_object(bytes(data)) is None


def test_record_belongs_to_its_object_alone() -> None:
    data = layout.pack_record(NAME, 7, 123456, b"d" * 16)
    assert len(data) == layout.RECORD_BYTES
    assert layout.record_slot(data) == 7
    assert layout.unpack_record(NAME, data) == (123456, BlockDigest(b"d" * 16))
    assert layout.unpack_record(KEY, data) is None
    assert layout.unpack_record(NAME, layout.pack_record(NAME, 7, layout.ALIAS, KEY)) == (layout.ALIAS, KEY)
    for place in range(28):
        flipped = bytearray(data)
        flipped[place] ^= 1
        assert layout.unpack_record(NAME, bytes(flipped)) is None
    with pytest.raises(AssertionError):
        layout.pack_record(NAME, 7, 1, b"short")
    with pytest.raises(struct.error):
        layout.pack_record(NAME, 7, 1 << 32, b"d" * 16)


@pytest.mark.parametrize("model", [b"", b"org/model", b"x" * layout.MODEL_TEXT_BYTES])
def test_model_and_heat(model: bytes) -> None:
    heat = Heat(2.5, 3.0, 4.0)
    data = layout.pack_model(model, heat).ljust(layout.SLOT_BYTES, b"\xee")
    assert layout.unpack_model(data) == (model, heat)
    for place in (0, 25, 29, 31 + len(model) if model else 0):
        flipped = bytearray(data)
        flipped[place] ^= 1
        assert layout.unpack_model(bytes(flipped)) is None


@pytest.mark.parametrize(
    ("numbers", "expected"), [([], []), ([3], [(3, 1)]), ([0, 1, 2, 5, 7, 8], [(0, 3), (5, 1), (7, 2)])]
)
def test_runs(numbers: list[int], expected: list[tuple[int, int]]) -> None:
    assert layout.runs(numbers) == expected
