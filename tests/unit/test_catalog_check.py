"""A catalog that breaks a rule is refused with why, and no bytes crash the decoder or what is built from them."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierfs.blocks.errors import ProtocolError
from tierfs.catalog import schema
from tierfs.catalog.schema import Catalog, Entry, Kind, check, decode, encode
from tierfs.fs.inodes import Inodes
from tierfs.fs.tree import Tree

V = b"v" * 16
ROOT = Entry(0, b"", Kind.DIRECTORY, 0o755, 1)


def file(name: bytes = b"f", size: int = 1, version: bytes = V, **more: Any) -> Entry:
    return Entry(**{"parent": 0, "kind": Kind.FILE, "mode": 0o644, "mtime_ns": 1, "name": name,
                    "size_bytes": size, "version": version, **more})  # fmt: skip


def link(target: bytes) -> Entry:
    return Entry(0, b"l", Kind.SYMLINK, 0o777, 1, len(target), target=target)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([], "no root"),
        ([file()], "no root"),
        ([msgspec.structs.replace(ROOT, name=b"x")], "no root"),
        ([msgspec.structs.replace(ROOT, parent=64)], "no root"),
        ([msgspec.structs.replace(ROOT, size_bytes=1 << 63)], "unusable size"),
        *[
            ([ROOT, file(name)], "unusable name")
            for name in (b"", b".", b"..", b"/etc/passwd", b"../x", b"a/b", b"a\0", b"x" * 256)
        ],
        ([ROOT, file(), file()], "repeats the name"),
        ([ROOT, file(parent=1)], "no directory above"),
        ([ROOT, file(parent=-1)], "no directory above"),
        ([ROOT, file(), file(b"g", parent=1)], "no directory above"),
        ([ROOT, file(size=-1)], "version or size"),
        ([ROOT, file(size=schema.SIZE_LIMIT_BYTES)], "version or size"),
        ([ROOT, file(version=b"short")], "version or size"),
        ([ROOT, file(), file(b"g", size=2)], "another size"),
        ([ROOT, file(mode=0o10644)], "mode, time"),
        ([ROOT, file(mode=-1)], "mode, time"),
        ([ROOT, file(mtime_ns=1 << 63)], "mode, time"),
        ([ROOT, file(links=1 << 31)], "count of links"),
        ([ROOT, link(b"")], "symlink target"),
        ([ROOT, link(b"x" * 4096)], "symlink target"),
        ([ROOT, link(b"a\0b")], "symlink target"),
        ([ROOT, Entry(0, b"d", Kind.DIRECTORY, 0o755, 1, -1)], "no file"),
        ([ROOT, Entry(0, b"d", Kind.DIRECTORY, 0o755, 1, version=V)], "no file"),
    ],
)
def test_a_rule_that_is_broken_is_named(entries: list[Entry], reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        decode(encode(Catalog("", 1, 4096, entries)))


@pytest.mark.parametrize("block_bytes", [0, 4095, 4097, -4096, (64 << 20) + 4096])
def test_an_unusable_block_size_is_refused(block_bytes: int) -> None:
    with pytest.raises(ProtocolError, match="block size"):
        check(Catalog("", 1, block_bytes, [ROOT]))


def test_a_generation_that_fits_no_handle_is_refused() -> None:
    with pytest.raises(ProtocolError, match="generation"):
        check(Catalog("", -1, 4096, [ROOT]))


def test_a_chain_of_directories_is_refused_before_its_paths_fill_the_memory() -> None:
    """Its catalog has 3 MB; its paths would have 12 GB."""
    chain = [ROOT, *(Entry(at, b"n" * 255, Kind.DIRECTORY, 0o755, 1) for at in range(10_000))]
    with pytest.raises(ProtocolError, match="bytes together"):
        decode(encode(Catalog("", 1, 4096, chain)))


def test_a_list_without_end_is_refused_by_its_length() -> None:
    """An array's head says how long it is: memory is only taken for what is within the limit and was sent."""
    head = b"\x94\xa0\x01\xcd\x10\x00\xdd"  # export "", generation 1, block size 4096, an array of 32 bits' length
    for length in (schema.ENTRIES_LIMIT + 1, (1 << 32) - 1):
        with pytest.raises(ProtocolError):
            decode(head + length.to_bytes(4, "big") + b"\x90" * 100)


_bytes = st.binary(max_size=20)
_int = st.one_of(
    st.integers(-2, 5), st.sampled_from([4096, 0o644, 1 << 31, 1 << 48, 1 << 62, (1 << 63) - 1, -(1 << 63)])
)
_entry = st.builds(
    lambda *fields: list(fields),
    st.one_of(st.integers(0, 4), _int), st.one_of(st.sampled_from([b"", b"a", b"b", b"..", b"a/b", b"/"]), _bytes),
    st.integers(0, 3), _int, _int, _int, st.one_of(st.just(V), st.just(b""), _bytes),
    st.one_of(st.sampled_from([b"", b"..", b"/etc/passwd", b"a", b"a/../b"]), _bytes), _int,
)  # fmt: skip


def walk(catalog: Catalog) -> None:
    """Everything that is asked of a tree."""
    tree = Tree(catalog, Inodes(None))
    root = tree.resolve(b"")
    assert root is not None
    for index in range(len(catalog.entries)):
        node = tree.at(index)
        path = tree.path(node)
        assert not path.startswith(b"/") and b".." not in path.split(b"/")
        tree.links(node), tree.siblings(node), tree.resolve(path)
        if node.entry.kind is Kind.FILE:
            assert tree.facts(node).size_bytes == node.entry.size_bytes
        if node.entry.kind is Kind.DIRECTORY:
            assert all(tree.parent(child).inode == node.inode for child in tree.children(node.inode, 0))
    assert sum(1 for _ in tree.files_below(root)) <= len(catalog.entries)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(_entry, max_size=6), st.sampled_from([4096, 1 << 20, 1]), st.sampled_from([0, 0, 0, 1, -1, 64]))
def test_entries_of_any_values_are_refused_or_make_a_sound_tree(
    entries: list[Any], block_bytes: int, parent: int
) -> None:
    root = [parent, b"", 0, 0o755, 1, 0, b"", b"", 1]
    try:
        catalog = decode(msgspec.msgpack.encode(["", 1, block_bytes, [root, *entries]]))
    except ProtocolError:
        return
    walk(catalog)


_GOOD = encode(
    Catalog("models", 3, 1 << 20,
            [ROOT, Entry(0, b"d", Kind.DIRECTORY, 0o755, 1), file(parent=1), link(b"d/f"), file(b"g")])
)  # fmt: skip


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.data())
def test_damaged_bytes_are_refused_or_make_a_sound_tree(data: st.DataObject) -> None:
    damaged = bytearray(_GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    try:
        catalog = decode(bytes(damaged))
    except ProtocolError:
        return
    walk(catalog)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=200))
def test_no_bytes_crash_the_decoder(data: bytes) -> None:
    try:
        walk(decode(data))
    except ProtocolError:
        return
