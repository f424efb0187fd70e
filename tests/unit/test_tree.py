"""The tree of a catalog: lookups, listings, paths, models, stable inode numbers."""

import json
import time
from pathlib import Path

import pytest

from tierfs.blocks.errors import ProtocolError
from tierfs.catalog.schema import Catalog, Entry, Kind, check
from tierfs.formats.models import model_path
from tierfs.fs.inodes import Inodes
from tierfs.fs.tree import PATH_MAX_BYTES, Tree
from tierfs.testing.sources import catalog_of

V1, V2 = b"1" * 16, b"2" * 16


def hub() -> Catalog:
    entries = [
        Entry(0, b"", Kind.DIRECTORY, 0o755, 1),
        Entry(0, b"models--org--m", Kind.DIRECTORY, 0o755, 1),
        Entry(1, b"blobs", Kind.DIRECTORY, 0o755, 1),
        Entry(2, b"aaa", Kind.FILE, 0o644, 1, size_bytes=10, version=V1),
        Entry(1, b"snapshots", Kind.DIRECTORY, 0o755, 1),
        Entry(4, b"rev", Kind.DIRECTORY, 0o755, 1),
        Entry(5, b"model.bin", Kind.SYMLINK, 0o777, 1, target=b"../../blobs/aaa"),
        Entry(0, b"dangling", Kind.SYMLINK, 0o777, 1, target=b"nowhere/at-all"),
        Entry(0, b"outside", Kind.SYMLINK, 0o777, 1, target=b"/etc/passwd"),
        Entry(0, b"loop", Kind.SYMLINK, 0o777, 1, target=b"loop"),
        Entry(0, b"hard-a", Kind.FILE, 0o644, 1, size_bytes=7, version=V2, links=2),
        Entry(0, b"hard-b", Kind.FILE, 0o644, 1, size_bytes=7, version=V2, links=2),
    ]
    return Catalog("x", 1, 4096, entries)


def test_lookup_by_name_path_and_number_agree() -> None:
    tree = Tree(hub(), Inodes(None))
    blob = tree.resolve(b"models--org--m/blobs/aaa")
    assert blob is not None
    assert tree.node(blob.inode) == blob
    assert tree.path(blob) == b"models--org--m/blobs/aaa"
    assert tree.resolve(b"models--org--m/snapshots/rev/model.bin") == blob
    assert tree.resolve(b"./models--org--m//blobs/../blobs/aaa") == blob


@pytest.mark.parametrize(
    "path",
    [
        b"dangling",
        b"outside",
        b"loop",
        b"nope",
        b"hard-a/x",
        b"hard-a/",
        b"hard-a/.",
        b"hard-a/..",
        b"..",
        b"../hard-a",
    ],
)
def test_paths_that_lead_nowhere_are_none(path: bytes) -> None:
    assert Tree(hub(), Inodes(None)).resolve(path) is None


def test_a_path_is_as_long_as_the_kernel_takes_one_and_no_longer() -> None:
    tree = Tree(hub(), Inodes(None))
    blob = tree.resolve(b"models--org--m/blobs/aaa")
    longest = b"models--org--m/./blobs/aaa".rjust(PATH_MAX_BYTES - 1, b"/")
    assert tree.resolve(longest) == blob
    assert tree.resolve(b"/" + longest) is None


@pytest.mark.parametrize(("links", "found"), [(40, True), (41, False)])
def test_so_many_symlinks_are_followed_and_no_more(links: int, found: bool) -> None:
    """Each target is as long as one can be, which is all that bounds what is walked."""
    long = b"d" + b"/." * 2040 + b"/"
    entries = [
        Entry(0, b"", Kind.DIRECTORY, 0o755, 1),
        Entry(0, b"d", Kind.DIRECTORY, 0o755, 1),
        Entry(1, b"0", Kind.FILE, 0o644, 1, size_bytes=1, version=V1),
        *(Entry(1, b"%d" % n, Kind.SYMLINK, 0o777, 1, target=b"../" + long + b"%d" % (n - 1)) for n in range(1, 50)),
    ]
    catalog = Catalog("x", 1, 4096, entries)
    check(catalog)
    tree = Tree(catalog, Inodes(None))
    assert (tree.resolve(b"d/%d" % links) == tree.resolve(b"d/0")) == found
    assert (tree.resolve(b"d/%d" % links) is None) != found


def test_hard_links_share_a_number_and_are_counted_once() -> None:
    tree = Tree(hub(), Inodes(None))
    a, b = tree.resolve(b"hard-a"), tree.resolve(b"hard-b")
    assert a is not None and b is not None
    assert a.inode == b.inode
    assert tree.links(a) == 2
    assert tree.total_bytes == 17


def test_a_link_is_followed_however_long_its_own_path_is() -> None:
    """A path of the catalog may be longer than one that can be asked for: it is reached by steps."""
    entries = [Entry(0, b"", Kind.DIRECTORY, 0o755, 1)]
    entries += [Entry(number, b"n" * 255, Kind.DIRECTORY, 0o755, 1) for number in range(20)]
    entries += [Entry(20, b"f", Kind.FILE, 0o644, 1, size_bytes=1, version=V1)]
    entries += [Entry(20, b"l", Kind.SYMLINK, 0o777, 1, target=b"./f")]
    tree = Tree(Catalog("x", 1, 4096, entries), Inodes(None))
    assert tree.follow(tree.at(22)) == tree.at(21)
    assert [node.position for node in tree.files_below(tree.at(22))] == [21]
    assert tree.resolve(tree.path(tree.at(22))) is None


def test_files_below_follow_snapshot_links_and_come_once() -> None:
    tree = Tree(hub(), Inodes(None))
    root = tree.resolve(b"")
    assert root is not None
    assert sorted(tree.path(node) for node in tree.files_below(root)) == [b"hard-a", b"models--org--m/blobs/aaa"]
    snapshot = tree.resolve(b"models--org--m/snapshots")
    assert snapshot is not None
    assert [node.entry.version for node in tree.files_below(snapshot)] == [V1]


def test_a_directory_counts_its_subdirectories_as_links() -> None:
    tree = Tree(hub(), Inodes(None))
    root, blobs = tree.resolve(b""), tree.resolve(b"models--org--m/blobs")
    assert root is not None and blobs is not None
    assert (tree.links(root), tree.links(blobs)) == (3, 2)


def test_listing_goes_on_from_any_position() -> None:
    tree = Tree(hub(), Inodes(None))
    names = [node.entry.name for node in tree.children(1, 0)]
    assert names == [b"models--org--m", b"dangling", b"outside", b"loop", b"hard-a", b"hard-b"]
    for start in range(len(names) + 1):
        assert [node.entry.name for node in tree.children(1, start)] == names[start:]


def test_numbers_are_the_same_after_a_restart_and_unaffected_by_other_files() -> None:
    files = {b"a/%d" % i: b"%d" % i for i in range(2000)}
    one = Tree(catalog_of(files, block_bytes=4096), Inodes(None))
    two = Tree(catalog_of({**files, b"a/new": b"n", b"b/new": b"n"}, block_bytes=4096), Inodes(None))
    numbers = set()
    for path in [b"a", *files]:
        first, second = one.resolve(path), two.resolve(path)
        assert first is not None and second is not None
        assert first.inode == second.inode
        numbers.add(first.inode)
    assert len(numbers) == 2001
    assert all(1 < number < 1 << 63 for number in numbers)


def test_a_collision_gets_a_number_of_its_own_that_survives_a_restart(tmp_path: Path) -> None:
    store = tmp_path / "inodes.json"
    inodes = Inodes(store)
    taken: dict[int, bytes] = {}
    first = inodes.number(b"fA", taken)
    other = {first: b"fB"}  # somebody else has A's number in this tree
    moved = inodes.number(b"fA", other)
    assert moved != first and other[moved] == b"fA"
    inodes.keep()
    again = Inodes(store)
    assert again.number(b"fA", {}) == moved
    # and the number is not given to anybody else, even where nothing else takes it
    assert again.number(b"fA", {}) == moved
    assert all(again.number(b"x%d" % i, {}) != moved for i in range(100))


def test_an_unreadable_store_of_collisions_is_no_reason_to_fail(tmp_path: Path) -> None:
    store = tmp_path / "inodes.json"
    store.write_text("{ broken")
    assert Inodes(store).number(b"fA", {}) > 1


def meeting(count: int) -> Catalog:
    """Directories whose names were made to meet on one number: bytes 16 to 23 of what is hashed make xxh3 multiply the
    eight that follow them by zero."""
    zero = bytes.fromhex("cb79e64eccc0e578")
    names = [b"-" * 15 + zero + b"%08x" % number + b"-" * 32 for number in range(count)]
    root = Entry(0, b"", Kind.DIRECTORY, 0o755, 0)
    return Catalog("", 1, 4096, [root, *(Entry(0, name, Kind.DIRECTORY, 0o755, 0) for name in names)])


def test_names_that_were_made_to_meet_are_refused_and_cost_no_disk(tmp_path: Path) -> None:
    store = tmp_path / "inodes.json"
    inodes = Inodes(store)
    few = Tree(meeting(100), inodes)
    assert len({node.inode for node in few.children(1, 0)}) == 100
    began_s = time.monotonic()
    with pytest.raises(ProtocolError, match="made to meet"):
        Tree(meeting(100_000), inodes)
    assert time.monotonic() - began_s < 5, "saved once, not for each name"
    more = Tree(meeting(101), inodes)
    assert len(json.loads(store.read_text())) == 100, "of a tree that is refused nothing is kept"
    again = Tree(meeting(101), Inodes(store))
    assert list(again.children(1, 0)) == list(more.children(1, 0))
    assert list(more.children(1, 0))[:100] == list(few.children(1, 0))


@pytest.mark.parametrize(
    ("path", "model"),
    [
        (b"model.gguf", b"model.gguf"),
        (b"llama/model-1.safetensors", b"llama"),
        (b"org/llama/model-1.safetensors", b"org/llama"),
        (b"hub/models--org--m/blobs/aaa", b"hub/models--org--m"),
        (b"hub/models--org--m/snapshots/rev/sub/x.bin", b"hub/models--org--m"),
    ],
)
def test_the_model_of_a_file(path: bytes, model: bytes) -> None:
    assert model_path(path) == model
