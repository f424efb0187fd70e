"""`tierfs warm PATH... [--tier hot|warm] [--check]`."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from tierfs.blocks.errors import ControlError
from tierfs.blocks.units import format_bytes
from tierfs.cli.errors import one_line
from tierfs.cli.paths import in_one_mount
from tierfs.cli.progress import bar
from tierfs.cli.saying import say
from tierfs.control.socket import ask


def warm(
    paths: Annotated[list[str], typer.Argument(help="Files or directories in a mount.")],
    tier: Annotated[str | None, typer.Option(help="hot or warm; warm, if there is one, when left out.")] = None,
    check: Annotated[bool, typer.Option(help="Only say what is resident; status 0 when everything is.")] = False,
) -> None:
    """Bring models into a local tier before somebody needs them."""
    with one_line():
        record, relative = in_one_mount(paths)
        if check:
            _check(ask(record, "where", paths=relative), tier)
            return
        last: dict[str, Any] = {}
        with bar("warming") as show:
            for last in ask(record, "warm", paths=relative, tier=tier, timeout_s=120.0):
                show(last["total_bytes"], last["done_bytes"] + last["bypassed_bytes"] + last["failed_bytes"])
        if last["failed_bytes"]:
            raise ControlError(f"{format_bytes(last['failed_bytes'])} could not be brought: {last['trouble']}")
        if last["bypassed_bytes"]:
            raise ControlError(
                f"{format_bytes(last['bypassed_bytes'])} do not fit into the tier beside what is in use or hotter;"
                " raise its capacity"
            )
        say(f"{format_bytes(last['total_bytes'])} resident")


def _check(answers: Iterator[dict[str, Any]], tier: str | None) -> None:
    complete = True
    for answer in answers:
        if tier is not None and tier not in answer["tiers"]:
            raise ControlError(f"there is no {tier} tier in this mount's configuration")
        resident = answer["resident_bytes"] if tier is None else answer["tiers"][tier]
        complete = complete and resident == answer["bytes"]
        missing = answer["bytes"] - resident
        say(
            f"{answer['path']}: {'all' if not missing else format_bytes(resident)} of {format_bytes(answer['bytes'])}"
            f" resident{f', {format_bytes(missing)} missing' if missing else ''}"
        )
    if not complete:
        raise SystemExit(1)
