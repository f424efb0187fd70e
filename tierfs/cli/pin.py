"""`tierfs pin [PATH...]` and `tierfs unpin PATH...`."""

import json
import os
from typing import Annotated, Any

import typer

from tierfs.blocks.errors import ControlError
from tierfs.blocks.units import format_bytes
from tierfs.cli.errors import one_line
from tierfs.cli.paths import in_one_mount
from tierfs.cli.progress import bar
from tierfs.cli.saying import say
from tierfs.control import registry
from tierfs.control.socket import ask


def pin(
    paths: Annotated[list[str] | None, typer.Argument(help="Files or directories in a mount; none: list.")] = None,
    tier: Annotated[str | None, typer.Option(help="hot or warm; warm, if there is one, when left out.")] = None,
    warm: Annotated[bool, typer.Option(help="Bring what is not resident, now and whenever PATH changes.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the documented JSON instead.")] = False,
) -> None:
    """Keep models in a local tier whatever else wants room there; without PATH, list what is pinned."""
    with one_line():
        if not paths:
            _list(as_json)
            return
        record, relative = in_one_mount(paths)
        answers = []
        with bar("pinning") as show:
            for answer in ask(record, "pin", paths=relative, tier=tier, warm=warm, timeout_s=120.0):
                if "progress" in answer:
                    progress = answer["progress"]
                    done = progress["done_bytes"] + progress["bypassed_bytes"] + progress["failed_bytes"]
                    show(progress["total_bytes"], done)
                else:
                    answers.append(answer)
        if as_json:
            print(json.dumps(answers, indent=2))
        else:
            for answer in answers:
                say(
                    f"{answer['path']} ({_what(answer)}): pinned in {answer['tier']},"
                    f" {format_bytes(answer['resident_bytes'])} of {format_bytes(answer['bytes'])} resident"
                )
        missing = [answer for answer in answers if answer["state"] in ("missing", "coming")]
        if missing:
            raise ControlError(
                f"pinned, but {missing[0]['path']} is not all there:"
                f" {missing[0]['reason'] or missing[0]['trouble'] or 'still coming'}; it is tried again"
            )


def unpin(
    paths: Annotated[list[str], typer.Argument(help="Paths that were pinned.")],
    tier: Annotated[str | None, typer.Option(help="Only the pin in that tier.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the documented JSON instead.")] = False,
) -> None:
    """Let models be evicted again when room is needed. Nothing is removed by this."""
    with one_line():
        record, relative = in_one_mount(paths)
        answers = list(ask(record, "unpin", paths=relative, tier=tier))
        if as_json:
            print(json.dumps(answers, indent=2))
            return
        for answer in answers:
            say(f"{answer['path']}: no longer pinned in {answer['tier']}")


def _list(as_json: bool) -> None:
    found: list[dict[str, Any]] = []
    trouble: ControlError | None = None
    for record in registry.records():
        try:
            if record.alive:
                found += [{"mountpoint": record.mountpoint, **answer} for answer in ask(record, "pins")]
        except ControlError as error:  # the others are told all the same
            trouble = trouble or error
    if as_json:
        print(json.dumps(found, indent=2))
    elif not found and trouble is None:
        say("nothing is pinned in the mounts of this user")
    else:
        for pinned in found:
            place = os.path.normpath(os.path.join(pinned["mountpoint"], pinned["path"]))
            resident = f"{format_bytes(pinned['resident_bytes'])} of {format_bytes(pinned['bytes'])} resident"
            state = f"{pinned['state']}: {pinned['reason']}" if pinned["reason"] else pinned["state"]
            say(f"{place} ({_what(pinned)}): in {pinned['tier']}, {resident}, {state}")
    if trouble is not None:
        raise trouble


def _what(answer: dict[str, Any]) -> str:
    files = f"{answer['files']} file{'' if answer['files'] == 1 else 's'}"
    return (
        f"{answer['kind']}, {files}" if answer["kind"] in ("model", "directory") else answer["kind"] or "nothing there"
    )
