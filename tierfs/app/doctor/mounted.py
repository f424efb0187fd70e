"""The mounts that are up: whether their daemons live and answer, and how they read ahead. Called by examination.py.

Nothing here touches a mount: /proc, /sys and the control sockets tell.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierfs.app.doctor.finding import Finding, ok, problem, warning
from tierfs.app.doctor.looking import read_number
from tierfs.blocks.errors import ControlError
from tierfs.blocks.units import format_bytes
from tierfs.config.mounts import mounts
from tierfs.control import registry
from tierfs.control.socket import ask

ANSWER_S = 3.0
MOUNTS_MAX = 16  # asked, so that the look has a bound
_READ_AHEAD_LOW_KB = 1024
_READ_AHEAD_WANTED_KB = 4096


@dataclass(frozen=True, kw_only=True)
class Mounted:
    """A mount of this user. ``trouble``: why its daemon gave no status."""

    mountpoint: str
    config: str
    pid: int  # of the daemon
    alive: bool
    trouble: str = ""
    device: str = ""  # MAJOR:MINOR; empty where the kernel has no such mount here
    read_ahead_kb: int | None = None
    mode: str = ""
    passthrough: bool = False
    passthrough_reason: str = ""
    source_state: str = ""
    source_reason: str = ""
    transport: str = ""  # how blocks come now
    transport_reason: str = ""  # why not by RDMA
    route: str = ""  # the RDMA devices and ports in use
    tiers: tuple[tuple[str, str, str], ...] = ()  # name, state, reason
    largest_model_bytes: int = 0


def look(root: Path = Path("/")) -> list[Mounted]:
    """``root`` is where /proc and /sys are found."""
    table = {entry.mountpoint: entry for entry in mounts(root / "proc/self/mountinfo")}
    found = []
    for record in registry.records()[:MOUNTS_MAX]:
        entry = table.get(record.mountpoint)
        ours = entry is not None and entry.file_system == "fuse.tierfs"
        device = entry.device if entry is not None and ours else ""
        answer: Mapping[str, Any] | None = None
        trouble = ""
        try:
            answer = next(ask(record, "status", timeout_s=ANSWER_S))
        except ControlError as error:
            trouble = str(error)
        found.append(
            Mounted(
                mountpoint=record.mountpoint,
                config=record.config,
                pid=record.daemon_pid or record.pid,
                alive=record.alive,
                trouble=trouble,
                device=device,
                read_ahead_kb=read_number(root / "sys/class/bdi" / device / "read_ahead_kb") if device else None,
                **({} if answer is None else _of(answer)),
            )
        )
    return found


def judge(facts: list[Mounted]) -> list[Finding]:
    """Pure."""
    return [finding for mounted in facts for finding in _one(mounted)]


def _of(answer: Mapping[str, Any]) -> dict[str, Any]:
    kernel, source = answer["kernel"], answer["source"]
    return {
        "mode": answer["mode"],
        "passthrough": kernel["passthrough"],
        "passthrough_reason": kernel["passthrough_reason"],
        "source_state": source["state"],
        "source_reason": source["reason"],
        "transport": source["transport"],
        "transport_reason": source["transport_reason"],
        "route": f"{source['device']} port {source['port']}" if source["device"] else "",
        "tiers": tuple((name, tier["state"], tier["reason"]) for name, tier in answer["tiers"].items()),
        "largest_model_bytes": max((model["bytes"] for model in answer["models"]), default=0),
    }


def _one(mounted: Mounted) -> list[Finding]:
    place = mounted.mountpoint
    if not mounted.alive:
        mend = f"tierfs mount {mounted.config} {place}, or tierfs unmount {place}"
        return [problem("mount.dead", f"{place}: its owner is gone", "its readers get ENOTCONN", mend)]
    if mounted.trouble:
        mend = f"tierfs restart {place} (under a channel), or tierfs unmount {place} and mount again; look at its log"
        return [problem("mount.silent", f"{place}: {mounted.trouble}", "its readers wait", mend)]
    findings = [ok("mount.answers", f"{place}: the daemon answers, mode {mounted.mode}")]
    if mounted.read_ahead_kb is not None and mounted.read_ahead_kb < _READ_AHEAD_LOW_KB:
        what = f"{place} is read ahead by {format_bytes(mounted.read_ahead_kb * 1024)}"
        why = "what is not read by passthrough comes in requests of that size: a fraction of the speed"
        mend = f"as root: echo {_READ_AHEAD_WANTED_KB} > /sys/class/bdi/{mounted.device}/read_ahead_kb"
        findings.append(warning("mount.read_ahead", what, why, mend))
    if not mounted.passthrough:
        what = f"{place} has no passthrough: {mounted.passthrough_reason}"
        why = "resident models are read through tierfs, not by the kernel alone"
        findings.append(warning("mount.passthrough", what, why, "see the findings on passthrough and channel"))
    if mounted.transport == "rdma" and not mounted.route:
        what = f"{place}: no block comes: source.transport is rdma, and there is none now: {mounted.transport_reason}"
        mend = 'mend what source.transport says, or set source.transport = "auto" and: tierfs restart MOUNTPOINT'
        findings.append(warning("mount.transport", what, "its readers wait, up to source.timeout", mend))
    elif mounted.transport in ("rdma", "tcp"):
        by = f"by RDMA, on {mounted.route}" if mounted.route else f"by TCP, not by RDMA: {mounted.transport_reason}"
        findings.append(ok("mount.transport", f"{place}: blocks come {by}"))
    if mounted.source_state == "down":
        what = f"{place}: the source is down: {mounted.source_reason}"
        findings.append(problem("mount.source", what, "only what is resident can be read", "bring the source back"))
    for name, state, reason in mounted.tiers:
        if state != "ok":
            what = f"{place}: the {name} tier is {state}: {reason}"
            findings.append(problem("mount.tier", what, "it takes no new blocks", "mend what the reason says"))
    return findings
