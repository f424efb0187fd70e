"""What a daemon answers on its control socket: status, where, warm, check, stop. See operate.py for the rest.

None of it waits for the source or touches the mount, so it works when everything else hangs. The keys are an
interface (docs/STATUS.md).
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import trio

from tierfs import __version__
from tierfs.blocks.errors import ControlError, NotFound
from tierfs.cache import mover
from tierfs.cache.block_cache import BlockCache, FileFacts, blocks_of
from tierfs.cache.model_loads import ModelLoads
from tierfs.cache.prefetcher import Prefetcher
from tierfs.cache.promoter import Promoter
from tierfs.control import report
from tierfs.control.socket import Handler, Reply, Send
from tierfs.fs.filesystem import Filesystem
from tierfs.fs.pins import Pins
from tierfs.fs.tree import Tree
from tierfs.fuse.channel import Channel
from tierfs.fuse.kernel import KernelLimits, limits_of
from tierfs.fuse.operations import RequestStatistics
from tierfs.tiers.interface import LocalTier

_FILES_PER_SLICE = 500  # files looked at between two checkpoints of a long report
_PROGRESS_S = 0.3


@dataclass
class Daemon:
    """The parts a command may look at."""

    mountpoint: str
    started: float
    mode_reason: str
    channel: Channel | None
    memory_limit_bytes: int
    memory_notes: list[str]  # what is wrong with it, and what to do
    filesystem: Filesystem
    prefetcher: Prefetcher
    promoter: Promoter
    requests: RequestStatistics
    kernel: KernelLimits
    stop: Callable[[], None]
    pins: Pins
    loads: ModelLoads = field(default_factory=ModelLoads)

    @property
    def cache(self) -> BlockCache:
        """The block cache."""
        return self.filesystem.cache


def handlers(daemon: Daemon) -> Mapping[str, Handler]:
    """Command name to handler."""

    threads = trio.CapacityLimiter(2)  # a state directory that does not answer must not use up those of others

    async def stop(request: Mapping[str, Any], send: Send) -> None:
        await send({"stopping": True})
        daemon.stop()

    async def status_(request: Mapping[str, Any], send: Send) -> None:
        await send(await status(daemon))

    async def where_(request: Mapping[str, Any], send: Send) -> None:
        for path in paths_of(request):
            await send(await where(daemon, path, per_file=bool(request.get("files"))))

    async def warm_(request: Mapping[str, Any], send: Send) -> None:
        tier = tier_of(daemon, request.get("tier"))
        files = [file for path in paths_of(request) for file in daemon.filesystem.files_below(path)]
        progress = mover.WarmProgress(total_bytes=sum(file.size_bytes for file in files))

        async def report() -> None:
            while True:
                await send(asdict(progress))
                await trio.sleep(_PROGRESS_S)

        # A client that goes away ends report(), and with it the work.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(report)
            await mover.warm(daemon.cache, files, tier, progress)
            nursery.cancel_scope.cancel()
        await send(asdict(progress))

    async def loads_(request: Mapping[str, Any], send: Send) -> None:
        kept = await trio.to_thread.run_sync(daemon.loads.kept, limiter=threads, abandon_on_cancel=True)
        for load in report.newest(kept, daemon.loads.newest(time.monotonic())):
            await send(load)

    return {"status": status_, "where": where_, "warm": warm_, "stop": stop, "loads": loads_}


async def status(daemon: Daemon) -> Reply:
    """Everything `tierfs status --json` prints."""
    return {
        **figures(daemon),
        "loads": await _loads(daemon),
        "models": await _models(daemon, daemon.filesystem.tree),
    }


def figures(daemon: Daemon) -> Reply:
    """The same without the models, which takes no longer where there are many of them."""
    cache = daemon.cache
    source = cache.source.statistics()
    tree = daemon.filesystem.tree
    return {
        "version": __version__,
        "mountpoint": daemon.mountpoint,
        "daemon": {"pid": os.getpid(), "uptime_s": time.time() - daemon.started},
        "mode": "direct" if daemon.channel is None else "channel",
        "mode_reason": daemon.mode_reason,
        "channel": None if daemon.channel is None else _channel(daemon.channel, cache),
        "source": {
            **asdict(source),
            "state_age_s": max(0.0, time.time() - source.since_s) if source.since_s else 0.0,
            "retries": cache.statistics.source_retries,
            "corrupt_blocks": cache.statistics.corrupt_blocks,
            "bytes_per_s": cache.source_rate,
        },
        "catalog": {
            "export": tree.catalog.export,
            "generation": tree.catalog.generation,
            "entries": len(tree.catalog.entries),
            "bytes": tree.total_bytes,
            "block_bytes": tree.catalog.block_bytes,
        },
        "tiers": {tier.name: asdict(tier.statistics()) for tier in cache.tiers},
        "memory": {
            "limit_bytes": daemon.memory_limit_bytes,
            "used_bytes": cache.pool.used_bytes,
            "blocks": len(cache.memory),
            "hit_blocks": cache.statistics.memory_hit_blocks,
            "unread_blocks": cache.memory.prefetched_unread,
            "dropped_unread_blocks": cache.memory.dropped_unread,
            "notes": daemon.memory_notes,
        },
        "kernel": asdict(daemon.kernel if daemon.channel is None else limits_of(daemon.channel)),
        "requests": {
            "reads": daemon.requests.reads,
            "read_bytes": daemon.requests.read_bytes,
            "failed": daemon.requests.failed,
            "running": len(daemon.requests.running),
        },
        "oldest_request_s": daemon.requests.oldest_s(),
        "open_files": daemon.filesystem.open_files,
        "loading_blocks": cache.loading,
        "queued_prefetch_blocks": daemon.prefetcher.queued_blocks,
        "dropped_prefetch_blocks": daemon.prefetcher.dropped_blocks,
        "promotion": asdict(daemon.promoter.statistics()),
    }


def _channel(channel: Channel, cache: BlockCache) -> Reply:
    counters = channel.counters()
    return {
        "pid": channel.pid,
        "epoch": channel.epoch,
        "outstanding_leases": channel.outstanding,
        "late_handouts": cache.statistics.late_handouts,
        "requests": counters.requests,
        "read_sizes": counters.read_sizes,
        **counters.named,
    }


async def where(daemon: Daemon, path: bytes, *, per_file: bool = False) -> Reply:
    """Bytes per tier of what lies at or below a path, and how long a load from here would take."""
    files = daemon.filesystem.files_below(path)
    cache = daemon.cache
    rates: dict[str, float] = {tier.name: cache.rate_of(tier) for tier in cache.tiers}
    answer = {
        "path": os.fsdecode(path),
        "files": len(files),
        **await _placed(daemon, files),
        "bytes_per_s": {**rates, "source": cache.source_rate},
    }
    if per_file:
        answer["per_file"] = [{"path": os.fsdecode(file.path), **await _placed(daemon, [file])} for file in files]
    return answer


async def _placed(daemon: Daemon, files: Sequence[FileFacts]) -> Reply:
    counts = await _count(daemon, files)
    total = sum(file.size_bytes for file in files)
    return {
        "bytes": total,
        "tiers": {tier.name: counts[tier.name] for tier in daemon.cache.tiers},
        "resident_bytes": counts["resident"],
        "missing_bytes": total - counts["resident"],
        "eta_s": _eta_s(daemon, total, counts),
    }


async def _loads(daemon: Daemon) -> list[Reply]:
    """The models that are being read or brought just now."""
    loads = []
    for load in daemon.loads.under_way():
        try:
            files = daemon.filesystem.files_of_model(load.model)
        except NotFound:  # superseded meanwhile
            continue
        counts = await _count(daemon, files)
        total = sum(file.size_bytes for file in files)
        now_s = time.monotonic()
        rate = load.rate(now_s)
        left = max(0, total - (load.record.covered_bytes if load.reading else counts["resident"]))
        loads.append(
            {
                "path": load.record.path,
                "kind": "reading" if load.reading else "bringing",
                "started_s": load.record.started_s,
                "elapsed_s": now_s - load.began_s,
                "bytes": total,
                "resident_bytes": counts["resident"],
                "tiers": {tier.name: counts[tier.name] for tier in daemon.cache.tiers},
                "read_bytes": load.record.read_bytes,
                "covered_bytes": load.record.covered_bytes,
                "fetched_bytes": load.record.source_bytes,
                "bytes_per_s": rate,
                "eta_s": 0.0 if not left else left / rate if rate > 0 else None,
            }
        )
    return loads


async def _models(daemon: Daemon, tree: Tree) -> list[Reply]:
    by_model: dict[bytes, list[FileFacts]] = {}
    for position, node in enumerate(tree.files_below(tree.at(0))):
        facts = tree.facts(node)
        by_model.setdefault(facts.model, []).append(facts)
        if position % _FILES_PER_SLICE == 0:
            await trio.lowlevel.checkpoint()
    models = []
    for model, files in by_model.items():
        total = sum(file.size_bytes for file in files)
        counts = await _count(daemon, files)
        models.append(
            {
                "path": os.fsdecode(model),
                "bytes": total,
                "resident_bytes": counts["resident"],
                "pinned_bytes": sum(file.size_bytes for file in files if daemon.pins.is_pinned(file.version)),
                "eta_s": _eta_s(daemon, total, counts),
            }
        )
    return models


async def _count(daemon: Daemon, files: Sequence[FileFacts]) -> dict[str, int]:
    """Resident bytes by tier name, and under "resident" those in any tier."""
    cache = daemon.cache
    counts = {tier.name: 0 for tier in cache.tiers}
    counts["resident"] = 0
    for position, file in enumerate(files):
        if position % _FILES_PER_SLICE == _FILES_PER_SLICE - 1:
            await trio.lowlevel.checkpoint()
        key = cache.key(file.version)
        in_tiers = [tier.resident_bytes(key) for tier in cache.tiers]
        for tier, resident in zip(cache.tiers, in_tiers, strict=True):
            counts[tier.name] += resident
        held = [resident for resident in in_tiers if resident]
        if len(held) <= 1 or max(held) >= file.size_bytes:
            counts["resident"] += max(held, default=0)
        else:
            counts["resident"] += sum(
                min(cache.block_bytes, file.size_bytes - block * cache.block_bytes)
                for block in blocks_of(file, cache.block_bytes)
                if any(tier.resident(key, block) for tier in cache.tiers)
            )
    return counts


def _eta_s(daemon: Daemon, total_bytes: int, counts: Mapping[str, int]) -> float | None:
    """Expected seconds to load from here, by the rates measured so far; None while the source's is not known, or the
    source is away: nobody can say then when what is missing will be here.

    Each byte counts where it is nearest. A tier that nothing was loaded from yet counts as no wait.
    """
    cache = daemon.cache
    left = counts["resident"]
    missing = total_bytes - left
    if missing and (not cache.source_rate or cache.source.statistics().state != "connected"):
        return None
    seconds = missing / cache.source_rate if missing else 0.0
    for tier in cache.tiers:
        nearest = min(left, counts[tier.name])
        left -= nearest
        rate = cache.rate_of(tier)
        seconds += nearest / rate if rate else 0.0
    return seconds


def tier_of(daemon: Daemon, name: object) -> LocalTier:
    """The tier of that name; the farthest one for None. Raises ControlError."""
    for tier in reversed(daemon.cache.tiers):
        if name is None or tier.name == name:
            return tier
    raise ControlError(
        f"there is no {name} tier in this mount's configuration" if name else "this mount has no local tier to warm"
    )


def paths_of(request: Mapping[str, Any]) -> list[bytes]:
    """The paths a request is about, relative to the mountpoint. Raises ControlError."""
    paths = request.get("paths")
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ControlError("the request has no list of paths")
    return [os.fsencode(path) for path in paths]
