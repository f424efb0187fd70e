"""Reloading: what can change does, what cannot is named, and a mistake changes nothing."""

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.local_tiers import run
from tests.models_world import BLOCK, SIZE, World
from tierfs.app.reload import LIVE, MOUNT, RESTART, Reloader, flat
from tierfs.blocks.errors import ConfigError
from tierfs.cache.prefetcher import Prefetcher
from tierfs.config.load import given_keys, keys, load_mount_config
from tierfs.config.schema import MountConfig
from tierfs.fs.filesystem import Filesystem
from tierfs.fs.inodes import Inodes
from tierfs.fuse.operations import Operations, Presentation
from tierfs.policy.readahead import ReadaheadConfig

TEXT = """
state_dir = "{0}/state"
[source]
url = "tierfs://127.0.0.1:1/x"
{source}
[warm]
path = "{0}/warm"
{warm}
"""


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    """Reloading sets the level of all logs."""
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


class Running:
    """The parts of a mount that take other settings, and the file they come from."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file = root / "mount.toml"
        self.world = World(root)

    def write(self, *, source: str = "", warm: str = 'capacity = "4MiB"', more: str = "") -> None:
        self.file.write_text(TEXT.format(self.root, source=source, warm=warm) + more)

    @asynccontextmanager
    async def reloader(self) -> AsyncIterator[Reloader]:
        async with self.world.running():
            cache = self.world.cache
            self.prefetcher = Prefetcher(cache)
            self.filesystem = Filesystem(
                await self.world.tree(), inodes=Inodes(None), cache=cache, prefetcher=self.prefetcher,
                readahead=ReadaheadConfig(window_max_bytes=8 * BLOCK), request_timeout_s=60,
            )  # fmt: skip
            self.operations = Operations(self.filesystem, Presentation(0, 0, 5.0))
            yield Reloader(
                load_mount_config(self.file), lambda: (load_mount_config(self.file), given_keys(self.file)),
                given_keys(self.file), channel=True, filesystem=self.filesystem, prefetcher=self.prefetcher,
                operations=self.operations, tiers=[self.world.warm], pins=self.world.pins,
            )  # fmt: skip


def test_every_key_can_change_or_says_what_it_needs() -> None:
    assert sorted([*LIVE, *RESTART, *MOUNT]) == sorted(keys(MountConfig))


def test_what_can_change_does(tmp_path: Path) -> None:
    async def test() -> None:
        running = Running(tmp_path)
        running.write()
        async with running.reloader() as reloader:
            view = running.filesystem.open(running.filesystem.resolve(b"a/model.bin").inode)
            assert await reloader.reload() == []
            running.write(
                source='timeout = "7s"',
                warm='capacity = "5MiB"\nhigh_watermark = 0.8\nlow_watermark = "50%"',
                more='[mount]\nmetadata_ttl = "1s"\nrequest_timeout = "40s"\n[log]\nlevel = "error"\n'
                '[readahead]\nrate_max = "1MiB/s"\nwindow_max = "8MiB"\n',
            )
            changes = {change.key: change for change in await reloader.reload()}
            assert logging.getLogger().level == logging.ERROR
            assert {change.needs for change in changes.values()} == {""}
            assert (changes["warm.capacity"].before, changes["warm.capacity"].after) == ("4MiB", "5MiB")
            statistics = running.world.warm.statistics()
            assert (statistics.capacity_bytes, statistics.high_bytes) == (5 << 20, 4 << 20)
            assert running.operations.presentation.metadata_ttl_s == 1.0
            assert view.request_timeout_s == 40.0
            assert running.world.cache._timeout_s == 7.0
            assert running.prefetcher._rate is not None
            assert await reloader.reload() == []

    run(test)


def test_a_smaller_capacity_evicts(tmp_path: Path) -> None:
    async def test() -> None:
        running = Running(tmp_path)
        running.write()
        async with running.reloader() as reloader:
            await running.world.load("a")
            await running.world.load("b")
            running.write(warm=f'capacity = "{SIZE + BLOCK}B"')
            (change,) = await reloader.reload()
            assert not change.needs
            with trio.fail_after(10):
                while running.world.warm.statistics().used_bytes > SIZE + BLOCK:  # noqa: ASYNC110
                    await trio.sleep(0.02)

    run(test)


def test_a_mistake_changes_nothing_and_is_explained(tmp_path: Path) -> None:
    async def test() -> None:
        running = Running(tmp_path)
        running.write()
        async with running.reloader() as reloader:
            running.write(source='timeout = "7s"', warm='capacity = "lots"')
            with pytest.raises(ConfigError, match=r"warm.capacity is \"lots\".*nothing was changed"):
                await reloader.reload()
            assert running.world.cache._timeout_s == 0.5

    run(test)


def test_what_cannot_change_says_what_it_needs_each_time(tmp_path: Path) -> None:
    async def test() -> None:
        running = Running(tmp_path)
        running.write()
        async with running.reloader() as reloader:
            running.write(
                source="connections = 9",
                more=f'[memory]\nlimit = "2GiB"\n[mount]\nread_ahead = "1MiB"\n[hot]\npath = "{tmp_path}/hot"\n',
            )
            for _ in range(2):
                needs = {change.key: change.needs for change in await reloader.reload()}
                assert needs == {
                    "source.connections": "`tierfs restart`",
                    "memory.limit": "`tierfs restart`",
                    "mount.read_ahead": "unmounting and mounting again",
                    "hot.path": "`tierfs restart`",
                    "hot.admit": "`tierfs restart`",
                }

    run(test)


def test_a_capacity_below_what_is_pinned_is_not_taken(tmp_path: Path) -> None:
    async def test() -> None:
        running = Running(tmp_path)
        running.write()
        async with running.reloader() as reloader:
            await running.world.pins.add([b"a"], "warm", warm=False)
            running.write(warm='capacity = "256KiB"')
            (change,) = await reloader.reload()
            assert change.needs == "unpinning: 512KiB are pinned in warm"
            assert running.world.warm.statistics().capacity_bytes > SIZE

    run(test)


def test_a_capacity_that_was_measured_is_no_change(tmp_path: Path) -> None:
    running = Running(tmp_path)
    running.write(warm="")
    assert "warm.capacity" not in given_keys(running.file)
    assert "warm.capacity" in given_keys(running.file, {"warm.capacity": "1GiB"})
    assert flat(load_mount_config(running.file))["warm.capacity"] > 0

    async def test() -> None:
        async with running.reloader() as reloader:
            (tmp_path / "more").write_bytes(bytes(1 << 20))
            assert await reloader.reload() == []

    run(test)
