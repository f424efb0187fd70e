"""`tierfs top [MOUNTPOINT]`: what a mount does just now. A live table in a terminal, else a line each time."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tierfs.blocks.errors import ControlError
from tierfs.blocks.text import printable
from tierfs.blocks.units import format_bytes, format_duration, parse_duration
from tierfs.cli.errors import one_line
from tierfs.cli.paths import the_mount
from tierfs.cli.saying import say
from tierfs.control import registry
from tierfs.control.rates import sample
from tierfs.control.socket import ask

_LOADS_MAX = 20
_PASSTHROUGH = "what passthrough readers take from hot and warm is not seen by tierfs: only their opens are"


def top(
    mountpoint: Annotated[str | None, typer.Argument(help="The only mount of this user when left out.")] = None,
    interval: Annotated[str, typer.Option(help="How often to look.")] = "1s",
    count: Annotated[int, typer.Option(min=0, help="Look so many times; 0: until Ctrl-C.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One documented JSON object a line.")] = False,
) -> None:
    """Live: rates by tier, models that are coming, what is in flight, the oldest request."""
    with one_line():
        interval_s = float(parse_duration(interval))
        if interval_s <= 0:
            raise ControlError("--interval must be more than nothing")
        samples = _samples(the_mount(mountpoint).mountpoint, interval_s, count)
        try:
            if as_json or not sys.stdout.isatty():
                for one in samples:
                    if as_json:
                        print(json.dumps(one), flush=True)
                    else:
                        say(_line(one))
            else:
                with Live(Text("measuring ..."), auto_refresh=False) as live:
                    for one in samples:
                        live.update(_table(one), refresh=True)
        except KeyboardInterrupt:
            pass  # how one leaves it
        except BrokenPipeError:
            with contextlib.suppress(OSError):  # nobody reads any more, also not what Python would flush at the end
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _samples(mountpoint: str, interval_s: float, count: int) -> Iterator[dict[str, Any]]:
    """What happened in each interval; ``error`` while there is no daemon. Raises ControlError when the mount ends."""
    before: dict[str, Any] | None = None
    before_s = 0.0
    done = 0
    while not count or done < count:
        record = registry.find(mountpoint)
        try:
            after = next(ask(record, "status"))
            now_s = time.monotonic()
        except ControlError as error:
            if not registry.find(mountpoint).alive:
                raise
            before = None
            done += 1
            yield {"time_s": time.time(), "error": str(error)}
        else:
            if before is not None:
                done += 1
                yield sample(before, after, interval_s=now_s - before_s, time_s=time.time())
            before, before_s = after, now_s
        if not count or done < count:
            time.sleep(interval_s)


def _line(one: dict[str, Any]) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(one["time_s"]))
    if "error" in one:
        return f"{at} no answer: {one['error']}"
    parts = [f"{name} {_rate(rate)}" for name, rate in one["read_bytes_per_s"].items()]
    parts += [
        f"replies {_rate(one['replied_bytes_per_s'])}",
        f"passthrough opens {one['passthrough_opens_per_s']:.1f}/s",
    ]
    parts += [f"requests {one['requests']}", f"oldest {format_duration(one['oldest_request_s'])}"]
    parts += [f"loading {one['loading_blocks']}", f"queued {one['queued_prefetch_blocks']}"]
    parts += [f"unwritten {format_bytes(one['queued_write_bytes'])}", f"source {one['source_state']}"]
    for model in one["models"]:
        parts.append(f"{model['path']} {_percent(model)} {_rate(model['resident_bytes_per_s'])}")
    for load in one["loads"]:
        parts.append(f"{load['kind']} {load['path']} {_progress(load)}")
    return f"{at} {', '.join(parts)}"


def _table(one: dict[str, Any]) -> Group:
    if "error" in one:
        return Group(Text(printable(f"no answer: {one['error']}")))
    rates = Table("read from", "rate", box=None, pad_edge=False)
    for name, rate in one["read_bytes_per_s"].items():
        rates.add_row(name, _rate(rate))
    rates.add_row("replied", _rate(one["replied_bytes_per_s"]))
    flight = (
        f"requests {one['requests']}, the oldest {format_duration(one['oldest_request_s'])};"
        f" loading {one['loading_blocks']} blocks, {one['queued_prefetch_blocks']} queued;"
        f" {format_bytes(one['queued_write_bytes'])} to be written; source {one['source_state']}"
    )
    opens = (
        f"open files {one['open_files']}, of these {one['passthrough_files']} in passthrough"
        f" ({one['passthrough_opens_per_s']:.1f} such opens/s)"
    )
    models = Table("model", "resident", "size", "rate", "load from here", box=None, pad_edge=False)
    for model in one["models"]:
        eta = "?" if model["eta_s"] is None else f"{model['eta_s']:.1f} s"
        size = format_bytes(model["bytes"])
        models.add_row(Text(printable(model["path"])), _percent(model), size, _rate(model["resident_bytes_per_s"]), eta)
    note = [Text(_PASSTHROUGH, style="dim")] if one["passthrough_files"] else []
    loads = Table("load", "", "done", "of", "rate", "time left", box=None, pad_edge=False)
    for load in one["loads"][:_LOADS_MAX]:
        left = "?" if load["eta_s"] is None else format_duration(load["eta_s"])
        size = format_bytes(load["bytes"])
        loads.add_row(Text(printable(load["path"])), load["kind"], _done(load), size, _rate(load["bytes_per_s"]), left)
    return Group(rates, Text(flight), Text(opens), *note, *([loads] if one["loads"] else []), models)


def _done(load: dict[str, Any]) -> str:
    """Rounded down; of what is brought without a reader, what is here."""
    done = load["covered_bytes"] if load["kind"] == "reading" else load["resident_bytes"]
    return f"{min(100, 100 * done // load['bytes']) if load['bytes'] else 100} %"


def _progress(load: dict[str, Any]) -> str:
    left = "" if load["eta_s"] is None else f" {format_duration(load['eta_s'])} left"
    return f"{_done(load)} {_rate(load['bytes_per_s'])}{left}"


def _percent(model: dict[str, Any]) -> str:
    return f"{100 * model['resident_bytes'] // model['bytes'] if model['bytes'] else 100} %"


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(int(bytes_per_s))}/s"
