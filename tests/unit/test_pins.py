"""What is pinned: kept against anything hotter, brought when missing, followed through versions, durable."""

from pathlib import Path

import pytest
import trio
import trio.testing

from tests.local_tiers import run, until
from tests.models_world import BLOCK, SIZE, World, data
from tierfs.blocks.errors import ControlError, NotFound
from tierfs.blocks.ids import ObjectKey
from tierfs.cache import mover
from tierfs.catalog.pin_store import Pin, PinStore
from tierfs.fs.inodes import Inodes
from tierfs.fs.pins import kind_of
from tierfs.fs.tree import Tree
from tierfs.testing.sources import MemorySource
from tierfs.tiers.interface import Offer


def test_what_is_pinned_stays_however_hot_the_others_are(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path)
        async with world.running():
            await world.load("a")
            await world.pins.add([b"a"], "warm", warm=True)
            for name in ("b", "c", "d"):
                await world.load(name, times=3)
            assert await world.resident("a") == SIZE
            assert await world.warm.evict(ObjectKey((await world.file("a")).version)) == 0
            await world.pins.remove([b"a"], None)
            world.now_s += 7200
            for name in ("b", "c", "d"):
                await world.load(name, times=3)
            assert await world.resident("a") == 0

    run(test)


def test_what_is_pinned_is_brought_and_what_is_hotter_gives_way(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path)
        async with world.running():
            await world.load("a", times=3)
            await world.load("b", times=3)
            (pin,) = await world.pins.add([b"./c"], "warm", warm=True)
            progress = mover.WarmProgress()
            await world.pins.bring([pin], progress)
            assert (progress.done_bytes, progress.bypassed_bytes, progress.failed_bytes) == (SIZE, 0, 0)
            (state,) = world.pins.states()
            assert (state.pin.path, state.kind, state.files, state.state) == (b"c", "model", 1, "resident")

    run(test)


def test_what_finds_no_room_is_not_fetched_to_its_end(tmp_path: Path) -> None:
    """A file may be larger than any disk, or be said to be."""

    async def test() -> None:
        world = World(tmp_path)
        world.source = MemorySource({b"x/model.bin": bytes(400 * BLOCK)}, block_bytes=BLOCK)
        async with world.running():
            progress = mover.WarmProgress()
            await mover.warm(world.cache, [await world.file("x")], world.warm, progress)
            assert (progress.done_bytes + progress.bypassed_bytes, progress.failed_bytes) == (400 * BLOCK, 0)
            assert len(world.source.requests) <= 64, "what the tier holds, and some that were under way"

    run(test)


def test_what_is_there_of_a_file_that_finds_no_more_room_counts_as_done(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path)
        async with world.running():
            file = await world.file("a")
            for block in (1, 6, 7):
                await mover.bring(world.cache, file, block, world.warm)
            await world.warm.flush()
            world.warm.offer = lambda *_: Offer.BYPASSED  # type: ignore[method-assign]
            progress = mover.WarmProgress()
            await mover.warm(world.cache, [file], world.warm, progress)
            assert (progress.done_bytes, progress.bypassed_bytes) == (3 * BLOCK, 5 * BLOCK)

    run(test)


def test_without_warming_a_pin_only_keeps_what_readers_bring(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path)
        async with world.running():
            await world.pins.add([b"a"], "warm", warm=False)
            await trio.testing.wait_all_tasks_blocked()
            assert world.pins.states()[0].state == "as read" and not world.source.requests
            await world.load("a")
            await world.is_resident("a")

    run(test)


def test_pins_outlive_the_daemon_and_hold_before_anything_is_evicted(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path)
        async with world.running():
            await world.pins.add([b"a"], "warm", warm=True)
            await world.is_resident("a")
        async with world.running():
            await world.is_resident("a")
            world.warm.resize(capacity_bytes=BLOCK)
            world.warm._make_room(0, None)
            assert await world.resident("a") == SIZE

    run(test)


def test_another_version_at_the_path_is_pinned_and_brought_and_the_old_one_let_go(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path)
        async with world.running():
            await world.pins.add([b"a"], "warm", warm=True)
            await world.pins.add([b"b"], "warm", warm=True)  # the tier is full of pins
            await world.is_resident("b")
            old = await world.file("a")
            world.source.publish({**data("a", seed=2), **data("b", "c", "d")})
            world.pins.follow(await world.tree())
            assert not world.pins.is_pinned(old.version)
            await world.is_resident("a")
            assert await world.resident("b") == SIZE
            assert world.warm.resident_bytes(ObjectKey(old.version)) == 0  # there was no other room

    run(test)


def test_a_path_that_goes_and_comes_back_is_pinned_again(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path)
        async with world.running():
            await world.pins.add([b"a"], "warm", warm=True)
            await world.is_resident("a")
            world.source.publish(data("b"))
            world.pins.follow(await world.tree())
            assert world.pins.states()[0].state == "absent"
            world.source.publish(data("a", "b"))
            world.pins.follow(await world.tree())
            await world.is_resident("a")

    run(test)


def test_what_does_not_fit_is_refused_with_the_figures_and_changes_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path)
        async with world.running():
            await world.pins.add([b"a", b"b"], "warm", warm=False)
            with pytest.raises(ControlError, match=r"c: 512KiB do not fit: .* 1MiB are pinned there already"):
                await world.pins.add([b"c"], "warm", warm=True)
            with pytest.raises(NotFound, match="no such path: x"):
                await world.pins.add([b"x"], "warm", warm=True)
            await world.pins.add([b"a/model.bin"], "warm", warm=False)  # what is pinned already costs nothing
            assert [pin.path for pin in world.store.load()] == [b"a", b"b", b"a/model.bin"]

    run(test)


def test_unpinning_names_what_holds_a_path(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path)
        async with world.running():
            await world.pins.add([b"a"], "warm", warm=False)
            with pytest.raises(ControlError, match="a/model.bin is not pinned by itself, but with a"):
                await world.pins.remove([b"a/model.bin"], None)
            with pytest.raises(ControlError, match=r"b is not pinned; `tierfs pin`"):
                await world.pins.remove([b"a", b"b"], None)
            assert len(world.pins.states()) == 1
            await world.pins.add([b"a"], "warm", warm=True)  # the same pin, another will
            assert [state.pin for state in world.pins.states()] == [Pin(b"a", "warm", True)]
            await world.pins.remove([b"a"], "warm")
            assert world.store.load() == []

    run(test)


def test_while_the_source_is_away_a_pin_says_what_is_missing(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path)
        async with world.running():
            world.source.unavailable = True
            (pin,) = await world.pins.add([b"a"], "warm", warm=True)
            await until(lambda: world.pins.states()[0].state == "missing")
            assert "did not arrive" in world.pins.states()[0].reason
            world.source.unavailable = False
            while world.pins.states()[0].state != "resident":  # readers of an outage that is just over fail at once
                await world.pins.bring([pin], mover.WarmProgress())
                await trio.sleep(0.1)

    run(test)


def test_a_command_that_goes_away_leaves_the_rest_to_the_daemon(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path)
        async with world.running():
            world.source.gate = trio.Event()
            (pin,) = await world.pins.add([b"a"], "warm", warm=True)
            with trio.move_on_after(0.05):
                await world.pins.bring([pin], mover.WarmProgress())
            assert world.pins.states()[0].state == "coming"
            world.source.gate.set()
            await world.is_resident("a")

    run(test)


def test_with_admission_by_pins_only_what_is_pinned_becomes_hot(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path, hot=True, admission="pinned")
        async with world.running():
            await world.load("a")
            assert await world.resident("a", 0) == 0
            await world.pins.add([b"b"], "warm", warm=False)
            await world.load("b")
            await world.cache.tiers[0].flush()
            assert await world.resident("b", 0) == SIZE

    run(test)


def test_a_pin_in_hot_is_brought_there(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path, hot=True, admission="pinned")
        async with world.running():
            await world.pins.add([b"a"], "hot", warm=True)
            await until(lambda: world.pins.states()[0].state == "resident")
            assert await world.resident("a", 0) == SIZE
        world.hot = False
        async with world.running():
            assert world.pins.states()[0].state == "no tier"

    run(test)


def test_a_file_of_pins_that_cannot_be_read_is_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = PinStore(tmp_path / "pins.json")
    (tmp_path / "pins.json").write_text("[{]")
    assert store.load() == []
    assert "pins_unreadable" in caplog.text and (tmp_path / "pins.unreadable").read_text() == "[{]"
    store.replace([Pin(b"\xff/x", "warm", False)])
    assert store.load() == [Pin(b"\xff/x", "warm", False)]
    with pytest.raises(ControlError, match="cannot be kept"):
        PinStore(tmp_path / "nowhere" / "pins.json").replace([])


def test_a_path_is_called_what_it_names() -> None:
    async def test() -> None:
        files = {b"org/a/x.bin": b"1", b"org/a/y.bin": b"2", b"org/b/x.bin": b"3", b"models--o--n/blobs/1": b"4"}
        tree = Tree((await MemorySource(files, block_bytes=BLOCK).publication()).catalog, Inodes(None))
        named = {b"": "directory", b"org": "directory", b"org/a": "model", b"org/a/x.bin": "file", b"nope": ""}
        named |= {b"models--o--n": "model", b"models--o--n/blobs": "directory"}
        assert {path: kind_of(tree, path) for path in named} == named

    run(test)
