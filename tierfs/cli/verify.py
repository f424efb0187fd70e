"""`tierfs verify [PATH...]`.

Exit status: 0 all good, 1 something was bad and is repaired, 2 something is bad or unread, 3 it could not be done.
"""

import json
from typing import Annotated, Any

import typer

from tierfs.blocks.errors import ControlError
from tierfs.blocks.units import format_bytes, format_duration, parse_rate
from tierfs.cli.errors import one_line
from tierfs.cli.paths import in_one_mount, the_mount
from tierfs.cli.progress import bar
from tierfs.cli.saying import say
from tierfs.control.socket import ask


def verify(
    paths: Annotated[
        list[str] | None, typer.Argument(help="Files or directories in a mount, or a mountpoint; else the only mount.")
    ] = None,
    repair: Annotated[bool, typer.Option(help="Bring bad blocks again from the next tier, or the source.")] = True,
    rate: Annotated[str, typer.Option(help="Read no faster than that.")] = "256MiB/s",
    as_json: Annotated[bool, typer.Option("--json", help="Print the documented JSON instead.")] = False,
) -> None:
    """Compare every resident block of the local tiers with its digest, in the background of readers."""
    with one_line(3):
        bytes_per_s = int(parse_rate(rate))
        record, relative = in_one_mount(paths) if paths else (the_mount(None), [])
        if relative == ["."]:
            relative = []  # all that is there, also what no path leads to any more
        answer: dict[str, Any] = {}
        with bar("verifying") as show:
            for answer in ask(
                record, "verify", paths=relative, repair=repair, bytes_per_s=bytes_per_s, timeout_s=120.0
            ):
                show(answer["total_bytes"], answer["checked_bytes"])
        if not answer:
            raise ControlError("the daemon has not verified anything")
        if as_json:
            print(json.dumps(answer, indent=2))
        else:
            _print(answer)
    if answer["bad_blocks"] > answer["repaired_blocks"] or answer["unread_blocks"]:
        raise SystemExit(2)
    if answer["bad_blocks"]:
        raise SystemExit(1)


def _print(answer: dict[str, Any]) -> None:
    for bad in answer["bad"]:
        say(f"bad: {bad['path']} block {bad['block']} in {bad['tier']}: {bad['outcome']}")
    untold = answer["bad_blocks"] - len(answer["bad"])
    if untold > 0:
        say(f"and {untold} more; the daemon's log has them (verify_found_bad)")
    parts = [f"{answer['good_blocks']} blocks good", f"{answer['bad_blocks']} bad"]
    if answer["bad_blocks"]:
        parts.append(f"{answer['repaired_blocks']} of these repaired")
    if answer["gone_blocks"]:
        parts.append(f"{answer['gone_blocks']} evicted meanwhile")
    if answer["unread_blocks"]:
        parts.append(f"{answer['unread_blocks']} not read")
    if answer["trouble"]:
        parts.append(f"first reason: {answer['trouble']}")
    took = format_duration(answer["duration_s"])
    say(f"{format_bytes(answer['checked_bytes'])} in {answer['objects']} objects, {took}: {', '.join(parts)}")
