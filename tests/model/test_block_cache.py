"""The block cache against a dictionary: a state machine reads, writes behind, promotes, evicts, pins, hands out, stops,
crashes and reboots, over real tiers on real directories, while calls fail and files are damaged.

What must hold: a read is exactly the bytes of the version that was opened, or a clean error that the source's state
explains; where the bytes are here and nothing is wrong, they are served without the source; capacity is never exceeded;
what is open is not evicted; a file that somebody maps stays as it is; no buffer is lost.
"""

import contextlib
import mmap
import os
import random
import shutil
import sqlite3
import tempfile
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.local_tiers import FakeLender, object_files, until
from tests.model.faulty_os import FAULTS, Faults
from tests.model.machines import run_long, run_short
from tierfs.blocks.errors import CorruptBlock, SourceTimeout, StaleVersion, TierfsError
from tierfs.blocks.ids import ContentId, ObjectKey, VersionId, content_id, digest_block
from tierfs.blocks.spans import Span, block_count, block_length
from tierfs.cache.block_cache import BlockCache, FileFacts, blocks_of
from tierfs.cache.buffers import BufferPool
from tierfs.cache.prefetcher import Prefetcher
from tierfs.cache.promoter import Promoter
from tierfs.fs.filesystem import Filesystem
from tierfs.fs.inodes import Inodes
from tierfs.fs.tree import Tree
from tierfs.policy.readahead import ReadaheadConfig
from tierfs.testing.sources import MemorySource, version_of
from tierfs.tiers.interface import LentFile, Part
from tierfs.tiers.local import DirectoryTier

BLOCK = 16 << 10
TICK_S = 0.02  # two writes in one tick of the file system's clock have one time
WAIT_S = 30.0  # for whatever must come to an end
PATIENT_S, IMPATIENT_S = 20.0, 0.05  # the source's timeout while it is there, and while it is known to be away
AFTER_S = 1.2  # what a reader waited for in vain is refused for a second to those who come after it
SHM = Path("/dev/shm")

# Sizes at every border; two files of one content; four models of which warm holds two or three, and hot one.
SIZES = {
    b"a/one.bin": 3 * BLOCK, b"a/two.bin": 2 * BLOCK + 1, b"b/one.bin": 5 * BLOCK - 1, b"c/one.bin": 4 * BLOCK,
    b"c/copy.bin": 4 * BLOCK, b"d/one.bin": 6 * BLOCK + 4097, b"d/tiny.bin": 1, b"d/none.bin": 0,
}  # fmt: skip
LENGTHS = [1, 4096, BLOCK, BLOCK + 1, 3 * BLOCK, 10 * BLOCK]
WARM_BYTES, HOT_BYTES = 20 * BLOCK, 8 * BLOCK

paths = st.sampled_from(sorted(SIZES))
Harm = tuple[int, str, int]  # to which file, what, and where in it
harms = st.tuples(
    st.integers(0, 15), st.sampled_from(["flip", "flip", "swap", "cut", "remove"]), st.integers(0, 16 * BLOCK)
)
Answer = TypeVar("Answer")


def data_of(path: bytes, generation: int) -> bytes:
    name = b"c" if path.startswith(b"c/") else path
    pattern = digest_block(name + b"%d" % generation)
    return (pattern * (SIZES[path] // len(pattern) + 1))[: SIZES[path]] if SIZES[path] < BLOCK else _long(path, pattern)


def _long(path: bytes, pattern: bytes) -> bytes:
    blocks = [digest_block(pattern + b"%d" % number) * (BLOCK // len(pattern)) for number in range(8)]
    return b"".join(blocks)[: SIZES[path]]


def _taken_bytes(place: Path) -> int:
    taken = 0
    for file in (*place.glob("objects/*/*"), *place.glob("dying/*")):
        with contextlib.suppress(FileNotFoundError):
            taken += file.stat().st_blocks * 512
    return taken


class CrashingTier(DirectoryTier):
    """A tier that can end as one does whose process is killed: nothing is saved any more, and nothing marked."""

    crash = False

    async def _stop(self) -> None:
        if not self.crash:
            await super()._stop()
            return
        for device in self._devices:
            self._filler.drop_queue(device)
            await device.blocking(device.close, False)
        self._removals.stop()


@dataclass
class World:
    """One daemon's life."""

    cache: BlockCache
    filesystem: Filesystem
    promoter: Promoter
    hot: CrashingTier
    warm: CrashingTier
    lender: FakeLender
    stop: trio.Event = field(default_factory=trio.Event)
    stopped: trio.Event = field(default_factory=trio.Event)

    @property
    def tiers(self) -> tuple[CrashingTier, CrashingTier]:
        return self.hot, self.warm


class Loop:
    """A trio run in a thread of its own, since the rules of a state machine are plain calls."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error: BaseException | None = None
        self._thread.start()
        assert self._ready.wait(WAIT_S)

    def _run(self) -> None:
        async def main() -> None:
            self._token = trio.lowlevel.current_trio_token()
            self._stop = trio.Event()
            async with trio.open_nursery() as self.nursery:
                self._ready.set()
                await self._stop.wait()
                self.nursery.cancel_scope.cancel()

        try:
            trio.run(main)
        except BaseException as error:
            self._error = error

    def call(self, work: Callable[..., Awaitable[Answer]], *arguments: Any) -> Answer:
        """Run it in the loop, with a bound."""

        async def bounded() -> Answer:
            with trio.fail_after(WAIT_S):
                return await work(*arguments)

        try:
            return trio.from_thread.run(bounded, trio_token=self._token)
        except trio.RunFinishedError:
            assert self._error is not None
            raise self._error from None

    def end(self) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            trio.from_thread.run_sync(self._stop.set, trio_token=self._token)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error


@dataclass
class OpenFile:
    """A file that somebody has open, and what it must hold for ever."""

    path: bytes
    inode: int
    facts: FileFacts
    data: bytes


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(prefix="tierfs-model-"))
        self.hot_place = (SHM if SHM.is_dir() else self.place) / f"tierfs-model-{uuid.uuid4().hex}"
        self.faults = Faults()
        self.faults.place()
        self.loop = Loop()
        self.source: Any = None
        self.files = {path: data_of(path, 0) for path in SIZES}
        self.generations = dict.fromkeys(SIZES, 0)
        self.contents: dict[VersionId, ContentId] = {}
        self.opened: list[OpenFile] = []
        # None where nothing was handed out: what is drawn must not depend on how fast a thread was.
        self.maps: list[tuple[mmap.mmap | None, bytes]] = []
        self.parts: list[tuple[Part | None, bytes]] = []
        self.pinned_blocks: dict[tuple[str, ObjectKey], set[int]] = {}
        self.harmed = False  # something may be missing that was here
        self.shrunk = False
        self.back_at_s = -10.0  # when the source came back
        self.revision = 0
        self.world: World | None = None

    def teardown(self) -> None:
        try:
            self.faults.disarm()
            if self.world is not None:
                self.loop.call(self._heal)
                self.all_is_right()
                self.end(crash=False)
        finally:
            self.unmap()
            self.faults.remove()
            try:
                self.loop.end()
            finally:
                shutil.rmtree(self.place, ignore_errors=True)
                shutil.rmtree(self.hot_place, ignore_errors=True)

    # -- lives of a daemon

    @initialize(seed=st.integers(0, 1 << 32), faulty=st.booleans())
    def begin(self, seed: int, faulty: bool) -> None:
        self.random = random.Random(seed)
        self.faulty = faulty

        async def make() -> None:
            self.source = MemorySource(self.files, block_bytes=BLOCK)

        self.loop.call(make)
        self.start()

    def start(self) -> None:
        self.world = self.loop.call(partial(self.loop.nursery.start, self._live))
        self.pinned_blocks = {}

    async def _live(self, task_status: "trio.TaskStatus[World]") -> None:
        def tier(name: str, place: Path, capacity_bytes: int, mapped: bool) -> CrashingTier:
            return CrashingTier(
                name, [place], block_bytes=BLOCK, capacity_bytes=capacity_bytes, mapped=mapped, probe_s=0.02,
                clock=lambda: time.time() * 1e4,
            )  # fmt: skip

        hot, warm = tier("hot", self.hot_place, HOT_BYTES, True), tier("warm", self.place / "warm", WARM_BYTES, False)
        warm.lender = lender = FakeLender()
        cache = BlockCache(
            source=self.source, tiers=[hot, warm], pool=BufferPool(limit_bytes=16 * BLOCK, block_bytes=BLOCK),
            block_bytes=BLOCK, source_timeout_s=PATIENT_S,
        )  # fmt: skip
        prefetcher = Prefetcher(cache)
        async with trio.open_nursery() as nursery:
            for one in (hot, warm):
                await nursery.start(one.run)
            await nursery.start(lambda task_status: cache.run(task_status=task_status))
            await nursery.start(lambda task_status: prefetcher.run(task_status=task_status))
            publication = await self.source.publication()
            inodes = Inodes(None)
            cache.learn(publication.contents)
            filesystem = Filesystem(
                Tree(publication.catalog, inodes), inodes=inodes, cache=cache, prefetcher=prefetcher,
                readahead=ReadaheadConfig(window_max_bytes=4 * BLOCK), request_timeout_s=WAIT_S,
                on_open=lambda file: promoter.opened(file),
            )  # fmt: skip
            promoter = Promoter(cache, files_of=filesystem.files_of_model, quiet_s=0.0)
            await nursery.start(lambda task_status: promoter.run(task_status=task_status))
            world = World(cache, filesystem, promoter, hot, warm, lender)
            task_status.started(world)
            await world.stop.wait()
            nursery.cancel_scope.cancel()
        world.stopped.set()

    def end(self, *, crash: bool) -> None:
        world, self.world = self.world, None
        assert world is not None

        async def stop() -> None:
            for part, _ in self.parts:
                if part is not None:
                    part.hold.release()
            world.hot.crash = world.warm.crash = crash
            world.stop.set()
            await world.stopped.wait()
            for slot in list(world.lender.files):  # as those of a daemon that is gone
                os.close(world.lender.files.pop(slot))

        self.loop.call(stop)
        self.parts, self.opened = [], []

    @rule(how=st.sampled_from(["stop", "crash", "crash", "reboot"]), flushed=st.booleans(), harm=st.none() | harms)
    def restart(self, how: str, flushed: bool, harm: Harm | None) -> None:
        if flushed:
            self.flush()
        if how == "reboot":
            self.unmap()
        self.end(crash=how != "stop")
        self.faults.disarm()
        if how == "reboot":
            with contextlib.closing(sqlite3.connect(self.place / "warm" / "residency.db")) as db, db:
                db.execute("UPDATE meta SET value = '0' WHERE name = 'clean'")
                db.execute("UPDATE meta SET value = 'another boot' WHERE name = 'boot'")
        if harm is not None:
            self.damage_file(*harm)
        self.shrunk = False
        self.start()

    # -- what goes wrong

    @rule(fault=st.sampled_from(FAULTS), times=st.sampled_from([1, 1, 2, 5]))
    def arm(self, fault: tuple[str, int | str], times: int) -> None:
        self.faults.arm(*fault, times)
        self.harmed = True

    @rule(harm=harms)
    def damage(self, harm: Harm) -> None:
        self.flush()
        self.damage_file(*harm)

    def damage_file(self, which: int, how: str, where: int) -> None:
        """Somebody writes to an object's file, cuts it short or takes it away; not to one that we map ourselves."""
        self.harmed = True
        kept = {os.fstat(fd).st_ino for fd in self.world.lender.files.values()} if self.world is not None else set()
        warm = object_files(self.place / "warm")
        hot = object_files(self.hot_place) if self.world is not None else []
        if any(mapped for mapped, _ in self.maps):
            return
        with contextlib.suppress(FileNotFoundError):  # one has left meanwhile
            free = [file for file in (*warm, *hot) if file.stat().st_ino not in kept]
            if not free:
                return
            file = free[which % len(free)]
            time.sleep(TICK_S)
            if how == "remove":
                file.unlink()
            elif how == "cut" and file in warm:  # what is mapped would end us by SIGBUS
                os.truncate(file, where % (file.stat().st_size + 1))
            elif file.stat().st_size:
                with file.open("r+b") as handle:
                    size = file.stat().st_size
                    at = where % size
                    # Never into a hole: it would take space of which the tier cannot know.
                    data_bytes = os.lseek(handle.fileno(), 0, os.SEEK_HOLE)
                    if how == "swap" and data_bytes >= 2 * BLOCK:
                        first, second = handle.read(BLOCK), handle.read(BLOCK)
                        handle.seek(0)
                        handle.write(second + first)
                    elif os.lseek(handle.fileno(), at, os.SEEK_HOLE) > at:
                        handle.seek(at)
                        byte = handle.read(1)[0]
                        handle.seek(at)
                        handle.write(bytes([byte ^ 1]))

    @rule(how=st.sampled_from(["away", "back", "wrong once", "wrong for long"]))
    def change_source(self, how: str) -> None:
        async def change() -> None:
            if how == "wrong once":
                self.source.corrupt_next = 2
            elif how == "wrong for long":
                self.source.corrupt_next = 1 << 30
            elif how == "away":
                self.source.unavailable = True
            else:
                self._source_is_back()

        self.loop.call(change)

    @rule()
    def heal(self) -> None:
        """Everything works again, and after a moment is back in service."""
        self.faults.disarm()
        self.loop.call(self._heal)

    def _source_is_back(self) -> None:
        if self.source.unavailable:
            self.back_at_s = trio.current_time()
        self.source.unavailable, self.source.corrupt_next = False, 0

    async def _heal(self) -> None:
        self._source_is_back()
        await trio.sleep(max(0.0, self.back_at_s + AFTER_S - trio.current_time()))
        await self._settled()
        with trio.fail_after(WAIT_S):
            await until(lambda: all(tier.statistics().state == "ok" for tier in self.world.tiers))

    # -- what the export does

    @rule(path=paths)
    def publish(self, path: bytes) -> None:
        self.generations[path] += 1
        self.files[path] = data_of(path, self.generations[path])
        self._publish()

    @rule(path=paths)
    def digest(self, path: bytes) -> None:
        """The source has digested a file: its content id is known, and equal files are one from now on."""
        data = self.files[path]
        digests = [digest_block(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
        self.contents[version_of(path, data)] = content_id(b"".join(digests), len(data))
        self.pinned_blocks = {}
        self._publish()

    def _publish(self) -> None:
        async def publish() -> None:
            newest = {version_of(path, data) for path, data in self.files.items()}
            contents = {version: content for version, content in self.contents.items() if version in newest}
            self.source.publish(self.files, contents)
            publication = await self.source.publication()
            world = self.world
            world.cache.learn(publication.contents)
            world.filesystem.replace(Tree(publication.catalog, world.filesystem.inodes))
            world.cache.retain(newest | world.filesystem.open_versions())

        self.loop.call(publish)

    # -- what readers do

    @rule(path=paths)
    @precondition(lambda self: len(self.opened) < 8)
    def open(self, path: bytes) -> None:
        async def open_() -> OpenFile:
            inode = self.world.filesystem.resolve(path).inode
            return OpenFile(path, inode, self.world.filesystem.open(inode).facts, self.files[path])

        self.opened.append(self.loop.call(open_))

    @rule(which=st.integers(0, 7))
    @precondition(lambda self: self.opened)
    def close(self, which: int) -> None:
        self._close(self.opened.pop(which % len(self.opened)))

    @rule(path=paths)
    def load(self, path: bytes) -> None:
        """A whole file from its first to its last byte, as a loader does: opened, read, closed."""
        self.open(path)
        self._load(self.opened[-1])
        self._close(self.opened.pop())

    def _load(self, file: OpenFile, *, slowly: bool = False) -> None:
        """``slowly``: each block is given the time to become resident."""

        async def load() -> None:
            if slowly:
                await self._settled()
                self.world.cache.memory.clear()
            for offset in range(0, len(file.data) + 1, BLOCK):
                if not await self._read(file, offset, BLOCK, must=self._patience([(file, offset, BLOCK)])):
                    return
                if slowly:
                    await self._settled()

        self.loop.call(load)

    def _close(self, file: OpenFile) -> None:
        async def close() -> None:
            self.world.filesystem.close(file.inode)

        self.loop.call(close)

    @invariant()
    def reads_are_right_after_each_step(self) -> None:
        """Somebody always reads: whole files, or here and there in what is open."""
        if self.world is None:
            return
        if self.faulty and self.random.random() < 0.3:
            self.harmed = True
            self.faults.arm(*self.random.choice(FAULTS), 1)
        if not self.opened or self.random.random() < 0.3:
            self.load(self.random.choice(sorted(SIZES)))
            return
        wanted = []
        for _ in range(self.random.randint(1, 4)):
            file = self.random.choice(self.opened)
            wanted.append((file, self.random.randint(0, len(file.data)), self.random.choice(LENGTHS)))
        self._read_all(wanted)

    def _read_all(self, wanted: list[tuple[OpenFile, int, int]]) -> None:
        patience_s = self.random.choice([0.0, 0.001, 0.01, *[WAIT_S] * 6])  # some readers are killed

        async def read_all() -> None:
            must = self._patience(wanted)
            with trio.move_on_after(patience_s):
                async with trio.open_nursery() as nursery:
                    for one in wanted:
                        nursery.start_soon(partial(self._read, *one, must=must))

        self.loop.call(read_all)

    def _patience(self, wanted: list[tuple[OpenFile, int, int]]) -> bool:
        """Whether none of these reads may fail. Who then waits has time; who waits in vain shall not wait for long."""
        must = all(self._is_here(file, offset, length) for file, offset, length in wanted)
        timeout_s = IMPATIENT_S if self.source.unavailable and not must else PATIENT_S
        self.world.cache.configure(source_timeout_s=timeout_s, hot_admission="first")
        return must

    async def _read(self, file: OpenFile, offset: int, length: int, *, must: bool) -> bool:
        """Whether it could be read."""
        expected = file.data[offset : offset + length]
        try:
            found = bytes(await self.world.filesystem.view(file.inode).read(offset, length))
        except TierfsError as error:
            assert not must, f"{file.path!r} at {offset}: all of it is here, and yet {error!r}"
            self._explained(file, error)
            return False
        assert found == expected, f"wrong bytes of {file.path!r} at {offset}, {length} bytes asked for"
        return True

    def _is_here(self, file: OpenFile, offset: int, length: int) -> bool:
        """Whether every block of it is in memory or a tier, and nothing is wrong with those."""
        if self.harmed:
            return False
        cache = self.world.cache
        key = cache.key(file.facts.version)
        blocks = range(offset // BLOCK, -(-min(offset + length, len(file.data)) // BLOCK))
        return all(any(tier.resident(key, block) for tier in self.world.tiers) for block in blocks)

    def _explained(self, file: OpenFile, error: TierfsError) -> None:
        """A reader may only fail for what the source does just now."""
        source = self.source
        stale = file.facts.version not in {version_of(path, data) for path, data in self.files.items()}
        if isinstance(error, StaleVersion):
            assert stale, error
        elif isinstance(error, CorruptBlock):
            assert source.corrupt_next > 1000, error
        elif isinstance(error, SourceTimeout):
            assert source.unavailable or trio.current_time() - self.back_at_s < AFTER_S, error
        else:
            raise error

    # -- what operators and the kernel do

    @rule(path=paths, hot=st.booleans())
    def evict(self, path: bytes, hot: bool) -> None:
        async def evict() -> None:
            tier = self.world.hot if hot else self.world.warm
            key = self.world.cache.key(version_of(path, self.files[path]))
            is_open = key in {self.world.cache.key(file.facts.version) for file in self.opened}
            before = tier.resident_bytes(key)
            freed = 0
            with trio.move_on_after(WAIT_S if not self.parts else TICK_S):  # its space follows when they are copied
                freed = await tier.evict(key)
            assert not freed or not is_open
            assert tier.resident_bytes(key) == (before if is_open else 0)

        self.loop.call(evict)

    @rule()
    def drop_memory(self) -> None:
        """Memory is wanted for something else: what is read next comes from a tier, or the source."""

        async def drop() -> None:
            self.world.cache.memory.clear()
            self.world.cache.pool.notify()

        self.loop.call(drop)

    @rule(part=st.sampled_from([0.3, 0.6, 1.0]))
    def resize(self, part: float) -> None:
        async def resize() -> None:
            self.world.warm.resize(capacity_bytes=int(WARM_BYTES * part))
            self.shrunk = part < 1.0
            self.harmed = True

        self.loop.call(resize)

    @rule()
    def flush(self) -> None:
        self.loop.call(self._settled)

    async def _settled(self) -> None:
        """Until nothing is under way."""
        world = self.world
        for tier in world.tiers:
            await tier.flush()
        if not self.source.unavailable:  # else what is under way comes to nothing
            await until(lambda: not world.cache.loading and not world.promoter.statistics().promoting)
        for tier in world.tiers:
            await tier.flush()

    @rule(path=paths)
    @precondition(lambda self: len(self.opened) < 8 and len(self.maps) < 3)
    def hand_out(self, path: bytes) -> None:
        """The kernel reads the file itself from now on, and a reader maps it."""
        self.open(path)
        file = self.opened[-1]
        self._load(file, slowly=True)

        async def whole() -> LentFile | None:
            return await self.world.warm.whole(self.world.cache.key(file.facts.version))

        lent = self.loop.call(whole)
        self.maps.append((None if lent is None else self.world.lender.map(lent), file.data))

    @rule()
    @precondition(lambda self: self.maps)
    def unmap(self) -> None:
        for mapped, _ in self.maps:
            if mapped is not None:
                mapped.close()
        self.maps = []

    @rule(path=paths, number=st.integers(0, 6))
    @precondition(lambda self: len(self.opened) < 8 and len(self.parts) < 4)
    def locate(self, path: bytes, number: int) -> None:
        """A READ is answered with the place of its bytes, which the channel copies later."""
        self.open(path)
        file = self.opened[-1]
        self._load(file, slowly=True)
        if not file.data:
            return
        block = number % block_count(len(file.data), BLOCK)
        length = block_length(len(file.data), BLOCK, block)

        async def locate() -> Part | None:
            return await self.world.warm.locate(self.world.cache.key(file.facts.version), Span(block, 0, length))

        part = self.loop.call(locate)
        self.parts.append((part, file.data[block * BLOCK : block * BLOCK + length]))

    @rule(media_error=st.booleans())
    @precondition(lambda self: self.parts)
    def copied(self, media_error: bool) -> None:
        """The channel is done with one, or the medium failed it: then it is quarantined, and read from below."""
        part, expected = self.parts.pop()
        if part is None:
            return

        async def done() -> None:
            if part.lent.slot in self.world.lender.files:
                if media_error:
                    self.harmed = True
                    await self.world.warm.failed(part.lent, part.offset_bytes, 5)
                elif not self.harmed:
                    assert self.world.lender.read(part) == expected
            part.hold.release()

        self.loop.call(done)

    # -- what must hold after each step

    @invariant()
    def mapped_files_stay_as_they_are(self) -> None:
        for mapped, expected in self.maps:
            assert mapped is None or mapped[:] == expected

    @invariant()
    def places_stay_good_until_released(self) -> None:
        if not self.harmed:
            for part, expected in self.parts:
                assert part is None or self.world.lender.read(part) == expected

    @invariant()
    def capacity_is_kept(self) -> None:
        if self.world is None or self.shrunk:
            return
        for tier, place, limit in (
            (self.world.hot, self.hot_place, HOT_BYTES), (self.world.warm, self.place / "warm", WARM_BYTES),
        ):  # fmt: skip
            used = tier._space.used_bytes - tier._space.leaving_bytes  # what comes waits for what is leaving
            assert used <= limit, f"{tier.name}: {used} of {limit} bytes"
            # Files come and go while they are counted one by one: what is too much must be so each time.
            taken = min(_taken_bytes(place) for _ in range(5 if _taken_bytes(place) > limit else 1))
            assert taken <= limit, f"{tier.name}: {taken} of {limit} bytes on the device"

    @invariant()
    def what_is_open_is_not_evicted(self) -> None:
        if self.world is None:
            return

        async def resident() -> dict[tuple[str, ObjectKey], set[int]]:
            found = {}
            for file in self.opened:
                key = self.world.cache.key(file.facts.version)
                for tier in self.world.tiers:
                    blocks = {block for block in blocks_of(file.facts, BLOCK) if tier.resident(key, block)}
                    found[tier.name, key] = blocks
            return found

        now = self.loop.call(resident)
        if not self.harmed:
            for place, blocks in self.pinned_blocks.items():
                assert blocks <= now.get(place, blocks), f"of what is open {place} has lost blocks"
        self.pinned_blocks = now

    @rule(turn=st.integers(0, 4))
    def sometimes_all_is_right(self, turn: int) -> None:
        if turn == 0:
            self.all_is_right()

    def all_is_right(self) -> None:
        """Every file of the newest generation reads whole and right, what is resident is right, no buffer is lost."""
        self.faults.disarm()
        self.loop.call(self._all_is_right)
        self.harmed, self.pinned_blocks = self.shrunk, {}

    async def _all_is_right(self) -> None:
        await self._heal()
        world = self.world
        world.cache.configure(source_timeout_s=PATIENT_S, hot_admission="first")
        for path, data in self.files.items():
            inode = world.filesystem.resolve(path).inode
            view = world.filesystem.open(inode)
            assert bytes(await view.read(0, len(data) + 1)) == data, path
            world.filesystem.close(inode)
        await self._settled()
        known = {}
        for path, data in self.files.items():
            known[world.cache.key(version_of(path, data))] = data
        for tier in world.tiers:
            for facts, _ in tier.objects():
                if facts.key not in known:
                    continue
                data = known[facts.key]
                for block in range(block_count(len(data), BLOCK)):
                    part = data[block * BLOCK : block * BLOCK + BLOCK]
                    buffer = memoryview(mmap.mmap(-1, BLOCK))[: len(part)]
                    if tier.resident(facts.key, block):
                        good = await tier.read_block(facts.key, block, buffer)
                        assert not good or buffer == part
                        assert good or not tier.resident(facts.key, block)
        await self._settled()
        await until(lambda: world.cache.pool.used_slots == len(world.cache.memory))
        assert world.cache._leased == 0


def test_the_cache_is_a_dictionary_whatever_goes_wrong() -> None:
    run_short(CacheMachine, examples=15, steps=30)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_cache_is_a_dictionary_whatever_goes_wrong_on_long_walks() -> None:
    run_long(CacheMachine, steps=80)
