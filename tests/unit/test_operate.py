"""What an operator asks of a running daemon, over the handlers of its control socket."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.local_tiers import object_files, run
from tests.models_world import BLOCK, SIZE, World
from tierfs.blocks.errors import ControlError, NotFound
from tierfs.blocks.ids import ObjectKey
from tierfs.cache.prefetcher import Prefetcher
from tierfs.cache.promoter import Promoter
from tierfs.control import commands, operate
from tierfs.control.socket import Reply
from tierfs.fs.filesystem import Filesystem
from tierfs.fs.inodes import Inodes
from tierfs.fuse.kernel import KernelLimits
from tierfs.fuse.operations import RequestStatistics
from tierfs.policy.readahead import ReadaheadConfig


class Asked:
    """A daemon that can be asked."""

    def __init__(self, world: World) -> None:
        self.world = world

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        world = self.world
        async with world.running():
            prefetcher = Prefetcher(world.cache)
            self.filesystem = Filesystem(
                await world.tree(), inodes=Inodes(None), cache=world.cache, prefetcher=prefetcher,
                readahead=ReadaheadConfig(window_max_bytes=8 * BLOCK), request_timeout_s=60,
            )  # fmt: skip
            daemon = commands.Daemon(
                mountpoint="/m", started=0.0, mode_reason="", channel=None, memory_limit_bytes=0, memory_notes=[],
                filesystem=self.filesystem, prefetcher=prefetcher,
                promoter=Promoter(world.cache, files_of=self.filesystem.files_of_model),
                requests=RequestStatistics(), kernel=KernelLimits(), stop=lambda: None, pins=world.pins,
            )  # fmt: skip

            async def reload() -> list[operate.Change]:
                return []

            self.handlers = {**commands.handlers(daemon), **operate.handlers(daemon, reload)}
            yield

    async def ask(self, command: str, *paths: str, **arguments: Any) -> list[Reply]:
        """The replies but for those of progress."""
        replies: list[Reply] = []

        async def send(reply: Reply) -> None:
            replies.append(reply)

        await self.handlers[command]({"paths": list(paths), **arguments}, send)
        return replies


def test_evicting_says_how_much_and_from_where(tmp_path: Path) -> None:
    async def test() -> None:
        asked = Asked(World(tmp_path, hot=True))
        async with asked.running():
            await asked.world.load("a")
            await asked.world.cache.tiers[0].flush()
            last = (await asked.ask("evict", "a"))[-1]
            assert (last["freed_bytes"], last["tiers"], last["kind"]) == (
                2 * SIZE,
                {"hot": SIZE, "warm": SIZE},
                "model",
            )
            assert (last["dying_bytes"], last["refused"]) == (0, [])
            assert await asked.world.resident("a") == await asked.world.resident("a", 0) == 0
            assert (await asked.ask("evict", "a"))[-1]["freed_bytes"] == 0
            with pytest.raises(NotFound):
                await asked.ask("evict", "nope")

    run(test)


def test_one_tier_can_be_named(tmp_path: Path) -> None:
    async def test() -> None:
        asked = Asked(World(tmp_path, hot=True))
        async with asked.running():
            await asked.world.load("a")
            await asked.world.cache.tiers[0].flush()
            assert (await asked.ask("evict", "a", tier="hot"))[-1]["tiers"] == {"hot": SIZE}
            assert await asked.world.resident("a") == SIZE
            with pytest.raises(ControlError, match="no cold tier"):
                await asked.ask("evict", "a", tier="cold")

    run(test)


def test_what_is_open_or_pinned_is_refused_with_the_reason(tmp_path: Path) -> None:
    async def test() -> None:
        asked = Asked(World(tmp_path))
        async with asked.running():
            await asked.world.load("a")
            await asked.world.load("b")
            inode = asked.filesystem.resolve(b"a/model.bin").inode
            asked.filesystem.open(inode)
            await asked.world.pins.add([b"b"], "warm", warm=False)
            last = (await asked.ask("evict", "."))[-1]
            assert {one["path"]: one["reason"] for one in last["refused"]} == {
                "a/model.bin": "open", "b/model.bin": "pinned with b: tierfs unpin",
            }  # fmt: skip
            assert (last["freed_bytes"], last["refused_files"], last["refused_bytes"]) == (0, 2, 2 * SIZE)
            asked.filesystem.close(inode)
            assert (await asked.ask("evict", "a"))[-1]["freed_bytes"] == SIZE

    run(test)


def test_what_somebody_still_maps_is_said_to_follow(tmp_path: Path) -> None:
    async def test() -> None:
        asked = Asked(World(tmp_path))
        async with asked.running():
            await asked.world.load("a")
            next(iter(asked.world.warm._index)).handed_out = True
            (path,) = object_files(tmp_path / "warm")
            with path.open("rb"):
                last = (await asked.ask("evict", "a"))[-1]
                assert (last["freed_bytes"], last["dying_bytes"]) == (SIZE, SIZE)
                assert asked.world.warm.statistics().dying_bytes == SIZE

    run(test)


def test_ready_means_that_nothing_is_waited_for(tmp_path: Path) -> None:
    async def test() -> None:
        asked = Asked(World(tmp_path))
        async with asked.running():
            (answer,) = await asked.ask("ready", "a")
            assert (answer["ready"], answer["reason"]) == (False, "512KiB of 512KiB are missing")
            await asked.world.load("a")
            (answer,) = await asked.ask("ready", "a/model.bin")
            assert (answer["ready"], answer["missing_bytes"]) == (True, 0)
            asked.world.source.unavailable = True  # what is here needs no source
            assert (await asked.ask("ready", "a"))[0]["ready"]
            assert "the source is down" in (await asked.ask("ready", "b"))[0]["reason"]

    run(test)


def test_what_no_tier_can_hold_is_ready_while_the_source_is_there(tmp_path: Path) -> None:
    async def test() -> None:
        asked = Asked(World(tmp_path))
        async with asked.running():
            (answer,) = await asked.ask("ready", ".")  # all four of them; there is room for two
            assert answer["ready"] and "larger than the local tiers" in answer["reason"]
            asked.world.source.unavailable = True
            assert not (await asked.ask("ready", "."))[0]["ready"]

    run(test)


def test_where_says_each_file_and_the_rates(tmp_path: Path) -> None:
    async def test() -> None:
        asked = Asked(World(tmp_path))
        async with asked.running():
            assert (await asked.ask("where", "a"))[0]["eta_s"] is None
            await asked.world.load("a")
            (answer,) = await asked.ask("where", ".", files=True)
            assert answer["bytes_per_s"]["source"] > 0 and answer["bytes_per_s"]["warm"] == 0
            expected = (4 * SIZE - SIZE) / answer["bytes_per_s"]["source"]
            assert answer["eta_s"] == pytest.approx(expected)
            placed = {file["path"]: file["tiers"]["warm"] for file in answer["per_file"]}
            assert placed == {"a/model.bin": SIZE, "b/model.bin": 0, "c/model.bin": 0, "d/model.bin": 0}
            await asked.world.load("a")  # now from warm
            (answer,) = await asked.ask("where", "a")
            assert answer["eta_s"] == pytest.approx(SIZE / answer["bytes_per_s"]["warm"])
            assert "per_file" not in answer
            asked.world.source.unavailable = True
            assert [(await asked.ask("where", path))[0]["eta_s"] is None for path in ("a", ".")] == [False, True]

    run(test)


def test_pinning_reports_and_status_says_how_much_of_a_model_is_pinned(tmp_path: Path) -> None:
    async def test() -> None:
        asked = Asked(World(tmp_path))
        async with asked.running():
            replies = await asked.ask("pin", "a", warm=True)
            assert replies[0]["progress"]["total_bytes"] in (0, SIZE)
            assert (replies[-1]["kind"], replies[-1]["state"], replies[-1]["resident_bytes"]) == (
                "model",
                "resident",
                SIZE,
            )
            (status,) = await asked.ask("status")
            assert {model["path"]: model["pinned_bytes"] for model in status["models"]} == {
                "a": SIZE, "b": 0, "c": 0, "d": 0,
            }  # fmt: skip
            assert [reply["path"] for reply in await asked.ask("pins")] == ["a"]
            assert await asked.ask("unpin", "a") == [{"path": "a", "tier": "warm"}]

    run(test)


def test_verify_answers_last_with_all_of_it(tmp_path: Path) -> None:
    async def test() -> None:
        asked = Asked(World(tmp_path))
        async with asked.running():
            await asked.world.load("a")
            await asked.world.load("b")
            last = (await asked.ask("verify", bytes_per_s=1 << 40))[-1]
            assert (last["good_blocks"], last["bad"], last["objects"]) == (16, [], 2)
            assert (await asked.ask("verify", "b", bytes_per_s=1 << 40))[-1]["good_blocks"] == 8
            with pytest.raises(ControlError, match="rate"):
                await asked.ask("verify", bytes_per_s=-1)
            key = ObjectKey((await asked.world.file("a")).version)
            assert os.fsencode("a") and await asked.world.warm.evict(key) == SIZE

    run(test)
