"""`tierfs status [MOUNTPOINT] [--json]`, and `tierfs status --ready PATH` for probes."""

import json
import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tierfs.blocks.text import printable
from tierfs.blocks.units import format_bytes, format_duration
from tierfs.cli.errors import one_line
from tierfs.cli.paths import in_one_mount
from tierfs.cli.saying import say
from tierfs.control import registry
from tierfs.control.socket import ask


def status(
    mountpoint: Annotated[str | None, typer.Argument(help="All mounts of this user when left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the documented JSON instead.")] = False,
    ready: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Only whether PATH can be loaded from here: status 0 or 1."),
    ] = None,
) -> None:
    """Tiers, what is resident, health. Never touches the mount and never waits for the source."""
    with one_line():
        if ready is not None:
            _ready(ready, as_json)
            return
        if mountpoint is None:
            _list(as_json)
            return
        answer = next(ask(registry.find(os.path.abspath(mountpoint)), "status"))
        if as_json:
            print(json.dumps(answer, indent=2))
        else:
            _print(answer)


def _ready(path: str, as_json: bool) -> None:
    record, relative = in_one_mount([path])
    answer = next(ask(record, "ready", paths=relative))
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        eta = "" if answer["ready"] or answer["eta_s"] is None else f"; load time from here {answer['eta_s']:.1f} s"
        say(f"{answer['path']}: {'ready' if answer['ready'] else 'not ready'}: {answer['reason']}{eta}")
    if not answer["ready"]:
        raise SystemExit(1)


def _list(as_json: bool) -> None:
    found = registry.records()
    if as_json:
        print(json.dumps([{"mountpoint": r.mountpoint, "pid": r.pid, "alive": r.alive} for r in found], indent=2))
        return
    if not found:
        say("no tierfs mounts of this user")
    for record in found:
        state = f"pid {record.pid}" if record.alive else f"dead (pid {record.pid} is gone): mount again, or unmount"
        say(f"{record.mountpoint}  {state}")


def _print(answer: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True, markup=False)
    source, memory, kernel = answer["source"], answer["memory"], answer["kernel"]
    uptime = format_duration(answer["daemon"]["uptime_s"])
    say(f"{answer['mountpoint']}  pid {answer['daemon']['pid']}, up {uptime}, mode {answer['mode']}")
    say(f"        {answer['mode_reason']}")
    reason = f" ({source['reason']})" if source["reason"] else ""
    say(
        f"source  {source['url']}  {source['state']}{reason}, {format_bytes(source['fetched_bytes'])} fetched,"
        f" {source['corrupt_blocks']} corrupt, generation {answer['catalog']['generation']}"
    )
    if source["transport"] == "rdma":
        say(
            f"        by RDMA on {source['device'] or 'no device now'}, port {source['port'] or '-'},"
            f" {format_bytes(source['rdma_bytes'])}; {source['rdma_failures']} blocks another way"
        )
    if source["transport_reason"]:
        say(f"        not by RDMA: {source['transport_reason']}")
    for name, tier in answer["tiers"].items():
        trouble = f"  {tier['state']}: {tier['reason']}" if tier["state"] != "ok" else ""
        say(
            f"{name:6}  {format_bytes(tier['used_bytes'])} of {format_bytes(tier['capacity_bytes'])} ({tier['medium']},"
            f" residency: {tier['residency']}), hits {tier['hit_blocks']},"
            f" evicted {tier['evicted_blocks']}, corrupt {tier['corrupt_blocks']},"
            f" bypassed {tier['bypassed_blocks']}, skipped {tier['skipped_blocks']}{trouble}"
        )
        if tier["residency_reason"]:
            say(f"        no pool: {tier['residency_reason']}")
    say(
        f"memory  {format_bytes(memory['used_bytes'])} of {format_bytes(memory['limit_bytes'])};"
        f" oldest request {answer['oldest_request_s']:.1f} s, open files {answer['open_files']}"
    )
    for note in memory["notes"]:
        say(f"        {note}")
    say(f"kernel  read-ahead {format_bytes(kernel['read_ahead_bytes'])}, background {kernel['max_background']}")
    channel = answer["channel"]
    if channel is not None:
        kept_back = sum(sum(tier["kept_back"].values()) for tier in answer["tiers"].values())
        reason = "" if kernel["passthrough"] else f" (none: {kernel['passthrough_reason']}; see `tierfs doctor`)"
        say(
            f"channel pid {channel['pid']}, daemon {channel['epoch']} of this mount; passthrough{reason}:"
            f" opens {channel['passthrough_opens']}, held back {channel['held_back_opens']},"
            f" kept back {kept_back + channel['late_handouts']},"
            f" refused {channel['refused_opens']}"
        )
    for note in kernel["notes"]:
        say(f"        {note}")
    table = Table("model", "size", "resident", "pinned", "load from here", box=None, pad_edge=False)
    for model in answer["models"][:50]:
        # Rounded down: 100 % is all of it.
        percent = 100 * model["resident_bytes"] // model["bytes"] if model["bytes"] else 100
        eta = "?" if model["eta_s"] is None else f"{model['eta_s']:.1f} s"
        pinned = format_bytes(model["pinned_bytes"]) if model["pinned_bytes"] else ""
        table.add_row(printable(model["path"]), format_bytes(model["bytes"]), f"{percent} %", pinned, eta)
    console.print(table)
    if len(answer["models"]) > 50:
        say(f"and {len(answer['models']) - 50} more; --json has all")
