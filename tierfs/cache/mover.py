"""The mover: brings whole files into a local tier on request (`tierfs warm`), with progress.

Unlike write-behind it waits when the tier's queue is full, since nobody reads meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import trio

from tierfs.blocks.errors import SourceTimeout, TierFailed, TierfsError
from tierfs.blocks.ids import ObjectKey, VersionId
from tierfs.blocks.spans import block_length
from tierfs.cache.block_cache import BlockCache, FileFacts, blocks_of
from tierfs.tiers.interface import LocalTier, Offer

_FULL_S = 0.005
_AT_ONCE = 8  # blocks; enough to hide the source's latency, few enough to leave the pool to readers


@dataclass
class WarmProgress:
    """How far a warm has come."""

    total_bytes: int = 0
    done_bytes: int = 0
    bypassed_bytes: int = 0  # no room in the tier that may be taken
    failed_bytes: int = 0
    trouble: str = ""  # the first that was met
    source_away: bool = False


async def warm(cache: BlockCache, files: Sequence[FileFacts], tier: LocalTier, progress: WarmProgress) -> None:
    """Bring these files into that tier, counting in ``progress`` as it goes; returns when all is durable.

    Trouble with one block is counted and does not stop the others, but when the source stays away for its whole timeout
    the rest is given up too. What is left of a file of which a block found no room is not even fetched: a tier takes
    whole models or nothing. Cancellation keeps what has been brought.
    """
    no_room: set[VersionId] = set()
    skipped_bytes = 0
    send, receive = trio.open_memory_channel[tuple[FileFacts, int]](0)

    async def feed() -> None:
        nonlocal skipped_bytes
        async with send:
            for file in files:
                for block in blocks_of(file, cache.block_bytes):
                    if file.version in no_room:
                        left_bytes = file.size_bytes - block * cache.block_bytes
                        skipped_bytes += left_bytes
                        progress.bypassed_bytes += left_bytes
                        break
                    await send.send((file, block))

    async def work() -> None:
        async for file, block in receive:
            length = block_length(file.size_bytes, cache.block_bytes, block)
            try:
                if progress.source_away:
                    raise SourceTimeout("the source is away")
                kept = await bring(cache, file, block, tier)
            except TierfsError as error:
                progress.source_away = progress.source_away or isinstance(error, SourceTimeout)
                progress.failed_bytes += length
                progress.trouble = progress.trouble or str(error)
                continue
            if kept:
                progress.done_bytes += length
            else:
                progress.bypassed_bytes += length
                no_room.add(file.version)

    # In use, as far as placement is concerned: a model must not be evicted while it is being brought.
    keys = [ObjectKey(file.version) for file in files]
    for key in keys:
        tier.touch(key)
        tier.pin(key)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed)
            for _ in range(_AT_ONCE):
                nursery.start_soon(work)
        await tier.flush()
        # What counts is what is there, not what was accepted: a disk may have failed, or been full.
        there = sum(tier.resident_bytes(cache.key(file.version)) for file in files)
        found_bytes = min(skipped_bytes, max(0, there - progress.done_bytes))  # among what was not even looked at
        progress.done_bytes += found_bytes
        progress.bypassed_bytes -= found_bytes
        progress.bypassed_bytes += max(0, progress.done_bytes - there)
        progress.done_bytes = min(progress.done_bytes, there)
    finally:
        for key in keys:
            tier.unpin(key)


async def bring(cache: BlockCache, file: FileFacts, block: int, tier: LocalTier) -> bool:
    """Whether the block is in the tier, or on its way there, afterwards.

    Raises as reads do, and TierFailed when the tier is out of service.
    """
    while True:
        if tier.resident(cache.key(file.version), block):
            return True
        answer = await cache.load_into(tier, file, block)
        if answer in (Offer.ACCEPTED, Offer.RESIDENT):
            return True
        if answer is Offer.BYPASSED:
            return False
        if answer is Offer.FAILED:
            raise TierFailed(f"the tier is out of service: {tier.statistics().reason}")
        await tier.flush()
        await trio.sleep(_FULL_S)  # another tier may be what is full
