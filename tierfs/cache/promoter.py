"""The promoter: brings whole models from the warm tier into the hot one, behind the readers' backs.

A reader in passthrough asks nobody for its bytes, so what it loads would never get nearer by being read. The file
system tells of opens, app/mount runs this.

    open ─► admitted (policy/admission) ─► waits until the load is over ─► block by block: warm ─► memory ─► hot
            no open for ``quiet_s``, or ``_LATEST_S`` after the first ─┘      ``_AT_ONCE`` of the local slots

What must hold: no reader waits for it; a model that does not fit the hot tier beside what is hotter is left where it
is; nothing is fetched from the source for it. What was brought stays when the daemon ends, and where the hot tier
keeps its residency the next one goes on from there. Demotion copies nothing: what leaves hot is in warm still, which
is larger and sees the same opens.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from tierfs.blocks.errors import TierFailed, TierfsError
from tierfs.cache import mover
from tierfs.cache.block_cache import BlockCache, FileFacts, blocks_of
from tierfs.tiers.interface import LocalTier

log = logging.getLogger(__name__)

_QUIET_S = 5.0
_LATEST_S = 60.0
_AT_ONCE = 2  # blocks: enough to keep a disk busy, few enough to leave it to readers
_MODELS_MAX = 1024  # waiting; more are forgotten until they are opened again


@dataclass
class PromoterStatistics:
    """Counters since the start of the daemon."""

    promoted_models: int = 0
    promoted_bytes: int = 0
    bypassed_models: int = 0  # did not fit beside what is hotter
    waiting_models: int = 0
    promoting: str = ""  # the model that is under way


@dataclass
class _Waiting:
    first_s: float
    last_s: float


class Promoter:
    """See the head of this file. ``files_of`` gives all files of a model in the newest generation."""

    def __init__(
        self, cache: BlockCache, *, files_of: Callable[[bytes], Sequence[FileFacts]], quiet_s: float = _QUIET_S
    ) -> None:
        self._cache = cache
        self._files_of = files_of
        self._quiet_s = quiet_s
        self._hot = next((tier for tier in cache.tiers if tier.name == "hot"), None)
        self._below = [tier for tier in cache.tiers if tier is not self._hot]
        self._waiting: dict[bytes, _Waiting] = {}
        self._wake = trio.Event()
        self._statistics = PromoterStatistics()

    def statistics(self) -> PromoterStatistics:
        """Counters and state."""
        self._statistics.waiting_models = len(self._waiting)
        return self._statistics

    def opened(self, file: FileFacts) -> None:
        """A file was opened; never waits."""
        if self._hot is None or not self._below or not self._cache.hot_admits(file.version):
            return
        waiting = self._waiting.get(file.model)
        if waiting is not None:
            waiting.last_s = trio.current_time()
        elif len(self._waiting) < _MODELS_MAX:
            self._wait_for_the_load(file)

    def resume(self, files: Sequence[FileFacts]) -> None:
        """Models that an earlier daemon had begun to bring: partly hot, the rest of it warm."""
        hot = self._hot
        if hot is None:
            return
        begun = {file.model for file in files if hot.resident_bytes(self._cache.key(file.version))}
        for file in files:
            if file.model in begun and file.model not in self._waiting:
                self._wait_for_the_load(file)

    def _wait_for_the_load(self, file: FileFacts) -> None:
        """The file's model is next when its load is over, if something of the file is to be brought."""
        if self._lacks(file):
            now_s = trio.current_time()
            self._waiting[file.model] = _Waiting(now_s, now_s)
            self._wake.set()

    async def run(self, *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Promote one model after another for ever. Cancellation keeps what has been brought."""
        task_status.started()
        while True:
            self._wake = trio.Event()
            model, wait_s = self._next()
            if model is None:
                with trio.move_on_after(wait_s):
                    await self._wake.wait()
                continue
            del self._waiting[model]
            await self._promote(model)

    def _next(self) -> tuple[bytes | None, float]:
        """The model whose load is over, else in how many seconds to look again."""
        now_s = trio.current_time()
        due_s = {
            model: min(waiting.last_s + self._quiet_s, waiting.first_s + _LATEST_S)
            for model, waiting in self._waiting.items()
        }
        if not due_s:
            return None, float("inf")
        model = min(due_s, key=lambda model: due_s[model])
        return (model, 0.0) if due_s[model] <= now_s else (None, due_s[model] - now_s)

    def _lacks(self, file: FileFacts) -> bool:
        """Whether all of the file is in a tier below, and not all of it in the hot one."""
        assert self._hot is not None
        key = self._cache.key(file.version)
        return self._hot.resident_bytes(key) < file.size_bytes and any(
            tier.resident_bytes(key) >= file.size_bytes for tier in self._below
        )

    async def _promote(self, model: bytes) -> None:
        hot = self._hot
        assert hot is not None
        try:
            files = self._files_of(model)
        except TierfsError:  # another generation has come, and it is not in there any more
            return
        lacking = [file for file in files if self._lacks(file)]
        total_bytes = sum(file.size_bytes for file in lacking)
        if not lacking:
            return
        if total_bytes > hot.statistics().capacity_bytes:
            self._statistics.bypassed_models += 1
            log.info("promotion_bypassed model=%r bytes=%d reason=%r", model, total_bytes, "larger than the hot tier")
            return
        self._statistics.promoting = model.decode("utf-8", "backslashreplace")
        log.info("promotion_started model=%r files=%d bytes=%d", model, len(lacking), total_bytes)
        try:
            outcome = await self._bring(lacking, hot)
        finally:
            self._statistics.promoting = ""
        if outcome:
            self._statistics.bypassed_models += 1
        else:
            self._statistics.promoted_models += 1
        log.info("promotion_ended model=%r outcome=%r", model, outcome or "all of it is hot")

    async def _bring(self, files: Sequence[FileFacts], hot: LocalTier) -> str:
        """Bring them, in order; why it was given up, or ""."""
        send, receive = trio.open_memory_channel[tuple[FileFacts, int]](0)
        trouble: list[str] = []

        def hot_bytes() -> int:
            return sum(hot.resident_bytes(self._cache.key(file.version)) for file in files)

        before_bytes = hot_bytes()

        async def feed() -> None:
            async with send:
                for file in files:
                    for block in blocks_of(file, self._cache.block_bytes):
                        if trouble:
                            return
                        await send.send((file, block))

        async def work() -> None:
            async for file, block in receive:
                key = self._cache.key(file.version)
                if trouble or hot.resident(key, block):
                    continue
                if not any(tier.resident(key, block) for tier in self._below):
                    trouble.append("it was evicted meanwhile")
                    continue
                try:
                    if not await mover.bring(self._cache, file, block, hot):
                        trouble.append("no room beside what is hotter")
                except TierFailed as error:
                    trouble.append(str(error))
                except TierfsError as error:
                    trouble.append(f"{type(error).__name__}: {error}")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed)
            for _ in range(_AT_ONCE):
                nursery.start_soon(work)
        await hot.flush()
        self._statistics.promoted_bytes += max(0, hot_bytes() - before_bytes)
        return trouble[0] if trouble else ""
