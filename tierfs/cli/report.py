"""`tierfs report [MOUNTPOINT]`: what the last loads of models were like, as a table, JSON, a picture or a page."""

import base64
import html
import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tierfs.blocks.errors import ControlError
from tierfs.blocks.text import printable
from tierfs.blocks.units import format_bytes, format_duration
from tierfs.catalog.load_store import read_loads
from tierfs.cli.errors import one_line
from tierfs.cli.paths import the_mount
from tierfs.config.schema import default_state_dir
from tierfs.control import picture, registry
from tierfs.control import report as reports
from tierfs.control.socket import ask

_COLUMNS = (
    "load", "model", "began", "took", "end", "read", "rate", "fetched", "fetched/read", "stalled", "slowest file",
)  # fmt: skip
_WIDTH = 180  # where no terminal says another one


def report(
    mountpoint: Annotated[str | None, typer.Argument(help="The only mount of this user when left out.")] = None,
    load: Annotated[int | None, typer.Option(help="Only the load of that number.")] = None,
    last: Annotated[int, typer.Option(min=1, help="So many of the newest loads.")] = 5,
    png: Annotated[Path | None, typer.Option(help="Write a picture of them there.")] = None,
    page: Annotated[Path | None, typer.Option("--html", help="Write a page there that needs nothing else.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the documented JSON instead.")] = False,
    state_dir: Annotated[
        Path | None, typer.Option(help="Where to look when nothing is mounted: the configuration's state_dir.")
    ] = None,
) -> None:
    """The last cold starts: bytes by tier over time, request sizes, stalls, the slowest shard."""
    with one_line():
        loads = _loads(mountpoint, state_dir)
        loads = [one for one in loads if load is None or one["number"] == load][:last]
        if not loads and (load is not None or png is not None or page is not None):
            raise ControlError("no such load is known" if load is not None else "no load is known yet: nothing to draw")
        try:
            if png is not None:
                png.write_bytes(picture.png(loads))
            if page is not None:
                page.write_text(_page(loads), encoding="utf-8")
        except OSError as error:
            raise ControlError(f"cannot write {error.filename}: {error.strerror}") from error
        if as_json:
            print(json.dumps(loads, indent=2))
        elif png is None and page is None:
            _print(loads)


def _loads(mountpoint: str | None, state_dir: Path | None) -> list[dict[str, Any]]:
    """From the daemon; where there is none, from what it left."""
    path = None if mountpoint is None else os.path.abspath(mountpoint)
    if state_dir is None:
        try:
            record = the_mount(path)
            if record.alive:
                return list(ask(record, "loads"))
            path = record.mountpoint
        except ControlError:
            if path is None or _runs_at(path):
                raise
    kept = [
        one
        for directory in sorted(((state_dir or default_state_dir()) / "mounts").glob("*/loads"))
        for one in read_loads(directory)
        if path is None or one.mountpoint == os.fsencode(path).decode(errors="backslashreplace")
    ]
    return sorted(reports.each(kept), key=lambda one: -float(one["started_s"]))


def _runs_at(path: str) -> bool:
    """Whether a daemon runs there."""
    return any(record.alive and record.mountpoint == path for record in registry.records())


def _row(load: dict[str, Any]) -> list[str]:
    slowest = load["slowest_file"]
    return [
        str(load["number"]), printable(load["path"]),
        time.strftime("%m-%d %H:%M:%S", time.localtime(load["started_s"])),
        format_duration(load["duration_s"]), load["end"], format_bytes(load["read_bytes"]),
        f"{format_bytes(int(load['bytes_per_s']))}/s", format_bytes(load["fetched_bytes"]),
        "-" if load["amplification"] is None else f"{load['amplification']:.2f}",
        f"{load['stalled_reads']} reads, {load['stalled_s']:.1f} s",
        "-" if slowest is None else f"{printable(slowest['path'])} ({slowest['wait_s']:.1f} s)",
    ]  # fmt: skip


def _sizes(load: dict[str, Any]) -> str:
    sizes = sorted((int(size), count) for size, count in load["read_sizes"].items())
    return ", ".join(f"{count} up to {format_bytes(size)}" for size, count in sizes) or "none"


def _print(loads: list[dict[str, Any]]) -> None:
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _WIDTH)
    if not loads:
        console.print("no load is known yet")
        return
    table = Table(*_COLUMNS, box=None, pad_edge=False)
    for load in loads:
        table.add_row(*map(Text, _row(load)))
    console.print(table)
    newest = loads[0]
    console.print(f"load {newest['number']}: reads {_sizes(newest)}; {newest['failed_reads']} failed;"
                  f" {newest['passthrough_opens']} opens in passthrough")  # fmt: skip
    for stall in newest["stalls"][:5]:
        console.print(f"  stall of {stall['seconds']:.2f} s at {stall['at_s']:.1f} s: {printable(stall['path'])}"
                      f" offset {stall['offset_bytes']}, {stall['place']}")  # fmt: skip


def _page(loads: list[dict[str, Any]]) -> str:
    """One file with no other: the pictures are in it. Names are escaped, for a source chose them."""
    style = "body{font:14px sans-serif;margin:2em}td,th{padding:2px 10px;text-align:left}"
    parts = [f"<!DOCTYPE html><html lang=en><meta charset=utf-8><title>tierfs report</title><style>{style}</style>"]
    parts.append("<h1>The last loads</h1><table><tr>" + "".join(f"<th>{column}" for column in _COLUMNS))
    parts += ["<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in _row(load)) for load in loads]
    parts.append("</table>")
    for load in loads:
        image = base64.b64encode(picture.png([load])).decode()
        parts.append(f'<h2>Load {load["number"]}</h2><img alt="bytes over time" src="data:image/png;base64,{image}">')
        parts.append(
            f"<p>Reads: {html.escape(_sizes(load))}; {load['failed_reads']} failed;"
            f" {load['passthrough_opens']} opens in passthrough. Stalls of more than 0.1 s:<ul>"
        )
        for stall in load["stalls"]:
            where = html.escape(f"{printable(stall['path'])} offset {stall['offset_bytes']}, {stall['place']}")
            parts.append(f"<li>{stall['seconds']:.2f} s at {stall['at_s']:.1f} s: {where}")
        parts.append("</ul>")
    return "\n".join(parts)
