"""The verifier: reads every resident block of the local tiers and compares it with its digest (`tierfs verify`).

    object by object, nearest tier first, one block at a time ─► good
         (waits while readers wait,  └► bad: dropped by the tier, with its object where that was handed out
          and for the rate)                 └► brought again from the next tier, or the source

What must hold: readers do not notice: one block under way, in a buffer of its own, never before a reader's load, never
faster than the rate, which also bounds what passthrough readers lose, for those are not seen. A bad block is never
served again, repaired or not.
"""

import logging
import mmap
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import trio

from tierfs.blocks.errors import SourceTimeout, TierfsError
from tierfs.blocks.ids import ObjectKey, VersionId
from tierfs.blocks.spans import block_count, block_length
from tierfs.cache import mover
from tierfs.cache.block_cache import BlockCache, FileFacts
from tierfs.tiers.interface import Checked, LocalTier, ObjectFacts

log = logging.getLogger(__name__)

_BAD_TOLD = 100  # bad blocks that are told one by one
_PATIENCE_S = 0.5  # a block waits no longer for readers: they may keep coming for ever
_LOOK_S = 0.005
_REPAIR_S = 10.0  # how long a block may find no room: its old object has to leave first
_REPAIR_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class Job:
    """One object to check; ``file`` is what it can be brought again by, if any path of this generation has it."""

    tier: LocalTier
    object: ObjectFacts
    file: FileFacts | None


@dataclass(frozen=True, slots=True)
class BadBlock:
    """One that was bad; ``outcome``: repaired, dropped (no path needs it any more), or why it is missing now."""

    tier: str
    path: str
    block: int
    outcome: str


@dataclass
class VerifyProgress:
    """How far a verify has come. Bytes are of resident blocks."""

    total_bytes: int = 0
    checked_bytes: int = 0
    objects: int = 0
    good_blocks: int = 0
    bad_blocks: int = 0
    repaired_blocks: int = 0  # of these
    gone_blocks: int = 0  # evicted before their turn came
    unread_blocks: int = 0  # could not be read just now
    trouble: str = ""  # the first reason why something is not repaired or not read
    path: str = ""  # under way
    duration_s: float = 0.0
    source_away: bool = False
    bad: list[BadBlock] = field(default_factory=list)  # the first of them


def jobs_for(cache: BlockCache, files: Sequence[FileFacts], wanted: Collection[VersionId] | None) -> list[Job]:
    """What is to be checked: all objects of all tiers, or with ``wanted`` those of these versions.

    ``files``: all of the newest generation.
    """
    by_key = {ObjectKey(file.version): file for file in files} | {cache.key(file.version): file for file in files}
    chosen = None if wanted is None else {key for v in wanted for key in (ObjectKey(v), cache.key(v))}
    jobs = []
    for tier in cache.tiers:
        for facts, keys in tier.objects():
            file = next((by_key[key] for key in keys if key in by_key), None)
            if chosen is None or keys & chosen:
                jobs.append(Job(tier, facts, file))
    return jobs


async def verify(
    cache: BlockCache, jobs: Sequence[Job], progress: VerifyProgress, *, repair: bool, bytes_per_s: int
) -> None:
    """Check all of it, counting as it goes. Cancellation leaves what was found bad dropped, and the rest as it was."""
    progress.total_bytes = sum(job.tier.resident_bytes(job.object.key) for job in jobs)
    pace = _Pace(bytes_per_s)
    started_s = trio.current_time()
    with mmap.mmap(-1, max((job.object.block_bytes for job in jobs), default=mmap.PAGESIZE)) as memory:
        view = memoryview(memory)  # page aligned, so that the page cache is passed by
        try:
            for job in jobs:
                progress.path = job.object.path.decode("utf-8", "backslashreplace")
                await _verify_object(cache, job, progress, view, pace, repair=repair)
                progress.objects += 1
                progress.duration_s = trio.current_time() - started_s
        finally:
            view.release()
    progress.path = ""


class _Pace:
    """Gives a turn when the rate allows it, and readers do."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._due_s = 0.0

    async def turn(self, cache: BlockCache, length_bytes: int) -> None:
        await trio.sleep_until(self._due_s)
        with trio.move_on_after(_PATIENCE_S):
            while cache.loading > cache.prefetching:  # noqa: ASYNC110 - it is low priority to look now and then
                await trio.sleep(_LOOK_S)
        self._due_s = max(self._due_s, trio.current_time()) + length_bytes / self._bytes_per_s


async def _verify_object(
    cache: BlockCache, job: Job, progress: VerifyProgress, view: memoryview, pace: _Pace, *, repair: bool
) -> None:
    tier, facts = job.tier, job.object
    blocks = [n for n in range(block_count(facts.size_bytes, facts.block_bytes)) if tier.resident(facts.key, n)]
    for position, block in enumerate(blocks):
        length = block_length(facts.size_bytes, facts.block_bytes, block)
        await pace.turn(cache, length)
        with view[:length] as buffer:
            found = await tier.check_block(facts.key, block, buffer)
        progress.checked_bytes += length
        if found is Checked.GOOD:
            progress.good_blocks += 1
        elif found is Checked.GONE:
            progress.gone_blocks += 1
        elif found is Checked.UNREAD:
            progress.unread_blocks += 1
            state = tier.statistics()
            progress.trouble = progress.trouble or f"{tier.name} could not be read: {state.reason or 'try again'}"
        else:
            whole = not tier.resident_bytes(facts.key)
            await _deal_with(cache, job, block, blocks if whole else [block], progress, repair=repair)
            if whole:  # its object went with it; what came back was compared on its way
                rest = blocks[position + 1 :]
                progress.checked_bytes += sum(block_length(facts.size_bytes, facts.block_bytes, n) for n in rest)
                return


async def _deal_with(
    cache: BlockCache, job: Job, block: int, lost: Sequence[int], progress: VerifyProgress, *, repair: bool
) -> None:
    """A block is bad; ``lost`` are those that are missing now: that one, or all of its object."""
    progress.bad_blocks += 1
    file = job.file
    if file is None:
        outcome = "dropped"
    elif not repair:
        outcome = "not repaired: --no-repair"
    else:
        reason = ""
        for number in lost:
            reason = reason or await _repair(cache, job.tier, file, number, progress)
        outcome = reason or "repaired"
    if outcome in ("repaired", "dropped"):
        progress.repaired_blocks += 1
    else:
        progress.trouble = progress.trouble or outcome
    log.warning("verify_found_bad tier=%s path=%r block=%d outcome=%r", job.tier.name, job.object.path, block, outcome)
    if len(progress.bad) < _BAD_TOLD:
        name = job.object.path.decode("utf-8", "backslashreplace")
        progress.bad.append(BadBlock(job.tier.name, name, block, outcome))


async def _repair(cache: BlockCache, tier: LocalTier, file: FileFacts, block: int, progress: VerifyProgress) -> str:
    """Bring it again; why it is not there afterwards, or ""."""
    if progress.source_away:
        return "the source is away"
    deadline_s = trio.current_time() + _REPAIR_S
    try:
        while trio.current_time() < deadline_s:
            if await mover.bring(cache, file, block, tier):
                await tier.flush()
                if tier.resident(cache.key(file.version), block):
                    return ""
            await trio.sleep(_REPAIR_AGAIN_S)  # the object it was in is still on its way out
    except TierfsError as error:
        progress.source_away = isinstance(error, SourceTimeout)
        return str(error)
    return f"no room in the {tier.name} tier"
