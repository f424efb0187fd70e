"""What an operator changes over the control socket: pin, unpin, evict, verify, reload; and what a probe asks: ready.

Beside commands.py, which only looks, and warms. Where a command takes long it reports several times a second; a client
that goes away ends evict and verify, while what is pinned goes on coming. The keys are an interface (docs/COMMANDS.md).
"""

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import trio

from tierfs.blocks.errors import ControlError
from tierfs.blocks.units import format_bytes
from tierfs.cache import mover, verifier
from tierfs.cache.block_cache import FileFacts
from tierfs.control.commands import Daemon, paths_of, tier_of, where
from tierfs.control.socket import Handler, Reply, Send
from tierfs.fs.pins import PinState, kind_of
from tierfs.tiers.interface import LocalTier

_PROGRESS_S = 0.3
_RATE_BYTES_PER_S = 256 << 20  # of a verify: a tenth of what an NVMe disk reads
_DYING_S = 1.0  # how long an eviction waits to see whether somebody maps what it has evicted
_LOOK_S = 0.05
_REFUSED_TOLD = 100


@dataclass(frozen=True)
class Change:
    """One key whose value is another one in the file. ``needs``: what brings it into force; empty when it is."""

    key: str
    before: str
    after: str
    needs: str = ""


Reload = Callable[[], Awaitable[Sequence[Change]]]


def handlers(daemon: Daemon, reload: Reload) -> Mapping[str, Handler]:
    """Command name to handler. ``reload`` raises ConfigError and changes nothing where the file has a mistake."""

    async def pins_(request: Mapping[str, Any], send: Send) -> None:
        for state in daemon.pins.states():
            await send(_pin_reply(state))

    async def pin_(request: Mapping[str, Any], send: Send) -> None:
        tier = tier_of(daemon, request.get("tier"))
        pins = await daemon.pins.add(paths_of(request), tier.name, warm=bool(request.get("warm", True)))
        progress = mover.WarmProgress()
        if request.get("warm", True):
            await _reporting(send, lambda: {"progress": asdict(progress)}, lambda: daemon.pins.bring(pins, progress))
        for state in daemon.pins.states(pins):
            await send({**_pin_reply(state), "trouble": progress.trouble})

    async def unpin_(request: Mapping[str, Any], send: Send) -> None:
        tier_name = request.get("tier")
        for pin in await daemon.pins.remove(paths_of(request), None if tier_name is None else str(tier_name)):
            await send({"path": os.fsdecode(pin.path) or ".", "tier": pin.tier})

    async def evict_(request: Mapping[str, Any], send: Send) -> None:
        tiers = [tier_of(daemon, request["tier"])] if request.get("tier") else list(daemon.cache.tiers)
        for path in paths_of(request):
            answer = _Evicted(os.fsdecode(path), kind_of(daemon.filesystem.tree, path), dict.fromkeys(
                (tier.name for tier in tiers), 0))  # fmt: skip
            files = daemon.filesystem.files_below(path)
            answer.files = len(files)
            await _reporting(send, lambda: asdict(answer), lambda: _evict(daemon, files, tiers, answer))  # noqa: B023
            await send(asdict(answer))

    async def verify_(request: Mapping[str, Any], send: Send) -> None:
        rate = request.get("bytes_per_s") or _RATE_BYTES_PER_S
        if not isinstance(rate, int) or rate <= 0:
            raise ControlError(f"a rate of {rate!r} bytes a second cannot be kept")
        paths = paths_of(request)
        everything = daemon.filesystem.files_below(b"")
        wanted = {file.version for path in paths for file in daemon.filesystem.files_below(path)} if paths else None
        jobs = verifier.jobs_for(daemon.cache, everything, wanted)
        progress = verifier.VerifyProgress()
        repair = bool(request.get("repair", True))
        await _reporting(
            send,
            lambda: asdict(progress),
            lambda: verifier.verify(daemon.cache, jobs, progress, repair=repair, bytes_per_s=rate),
        )
        await send(asdict(progress))

    async def ready_(request: Mapping[str, Any], send: Send) -> None:
        for path in paths_of(request):
            await send(await ready(daemon, path))

    async def reload_(request: Mapping[str, Any], send: Send) -> None:
        for change in await reload():
            await send(asdict(change))

    return {
        "pins": pins_,
        "pin": pin_,
        "unpin": unpin_,
        "evict": evict_,
        "verify": verify_,
        "ready": ready_,
        "reload": reload_,
    }


async def ready(daemon: Daemon, path: bytes) -> Reply:
    """Whether a load of that path, begun now, would not wait for anything that a local tier was meant to spare it.

    Ready: all of it is resident. What no tier of this mount can hold is ready when the source is connected, for it will
    never be more than that.
    """
    answer = await where(daemon, path)
    missing = answer["missing_bytes"]
    largest = max((tier.statistics().high_bytes for tier in daemon.cache.tiers), default=0)
    source = daemon.cache.source.statistics()
    connected = source.state == "connected"
    if not missing:
        is_ready, reason = True, "all of it is resident"
    elif answer["bytes"] > largest:
        is_ready = connected
        reason = f"larger than the local tiers; the source is {source.state}" if largest else (
            f"there is no local tier; the source is {source.state}"
        )  # fmt: skip
    else:
        is_ready = False
        reason = f"{format_bytes(missing)} of {format_bytes(answer['bytes'])} are missing" + (
            "" if connected else f", and the source is {source.state}"
        )
    keys = ("path", "bytes", "resident_bytes", "missing_bytes", "eta_s")
    return {**{key: answer[key] for key in keys}, "ready": is_ready, "reason": reason}


@dataclass
class _Evicted:
    """What one evict has done so far; the reply."""

    path: str
    kind: str
    tiers: dict[str, int]
    files: int = 0
    freed_bytes: int = 0
    dying_bytes: int = 0
    refused_files: int = 0
    refused_bytes: int = 0
    refused: list[dict[str, str]] = field(default_factory=list)


async def _evict(daemon: Daemon, files: Sequence[FileFacts], tiers: Sequence[LocalTier], answer: _Evicted) -> None:
    for tier in tiers:
        dying_before = tier.statistics().dying_bytes
        freed = 0
        for file in files:
            key = daemon.cache.key(file.version)
            resident_bytes = tier.resident_bytes(key)
            if not resident_bytes:
                continue
            reason = _held_by(daemon, tier, file)
            gone = 0 if reason else await tier.evict(key)
            if gone:
                freed += gone
                answer.tiers[tier.name] += gone
                answer.freed_bytes += gone
                continue
            answer.refused_files += 1
            answer.refused_bytes += resident_bytes
            if len(answer.refused) < _REFUSED_TOLD:
                reason = reason or "in use: another file of the same content is open or pinned, or it is being brought"
                answer.refused.append({"path": file.name, "tier": tier.name, "reason": reason})
        # What was handed out is looked at a moment later: only then it is known whether somebody still maps it.
        with trio.move_on_after(_DYING_S if freed else 0):
            while tier.statistics().dying_bytes > dying_before:  # noqa: ASYNC110 - the tier shows it, and tells nobody
                await trio.sleep(_LOOK_S)
        answer.dying_bytes += min(freed, max(0, tier.statistics().dying_bytes - dying_before))


def _held_by(daemon: Daemon, tier: LocalTier, file: FileFacts) -> str:
    pin = daemon.pins.pin_of(tier.name, file.version)
    if pin is not None:
        return f"pinned with {os.fsdecode(pin.path) or '.'}: tierfs unpin"
    return "open" if file.version in daemon.filesystem.open_versions() else ""


def _pin_reply(state: PinState) -> Reply:
    return {
        "path": os.fsdecode(state.pin.path) or ".",
        "tier": state.pin.tier,
        "warm": state.pin.warm,
        "kind": state.kind,
        "files": state.files,
        "bytes": state.size_bytes,
        "resident_bytes": state.resident_bytes,
        "state": state.state,
        "reason": state.reason,
    }


async def _reporting(send: Send, reply: Callable[[], Reply], work: Callable[[], Awaitable[None]]) -> None:
    """Do the work, and tell how far it is all the while. A client that goes away ends the telling, and the work."""

    async def report() -> None:
        while True:
            await send(reply())
            await trio.sleep(_PROGRESS_S)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(report)
        await work()
        nursery.cancel_scope.cancel()
