"""`tierfs evict PATH... [--tier hot|warm]`."""

import json
from typing import Annotated, Any

import typer

from tierfs.blocks.errors import ControlError
from tierfs.blocks.units import format_bytes
from tierfs.cli.errors import one_line
from tierfs.cli.paths import in_one_mount
from tierfs.cli.saying import say
from tierfs.control.socket import ask


def evict(
    paths: Annotated[list[str], typer.Argument(help="Files or directories in a mount.")],
    tier: Annotated[str | None, typer.Option(help="hot or warm; both when left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the documented JSON instead.")] = False,
) -> None:
    """Free what models hold in the local tiers. What is open or pinned stays, with the reason, and status 1."""
    with one_line():
        record, relative = in_one_mount(paths)
        last: dict[str, dict[str, Any]] = {}
        for answer in ask(record, "evict", paths=relative, tier=tier, timeout_s=60.0):
            last[answer["path"]] = answer  # it is told again and again while it goes on
        if as_json:
            print(json.dumps(list(last.values()), indent=2))
        else:
            for answer in last.values():
                _print(answer)
        refused = [one for answer in last.values() for one in answer["refused"]]
        if refused:
            files = sum(answer["refused_files"] for answer in last.values())
            size = format_bytes(sum(answer["refused_bytes"] for answer in last.values()))
            first = f"{refused[0]['path']} in {refused[0]['tier']} is {refused[0]['reason']}"
            raise ControlError(f"{size} in {files} file{'' if files == 1 else 's'} stay; the first: {first}")


def _print(answer: dict[str, Any]) -> None:
    tiers = ", ".join(f"{name} {format_bytes(count)}" for name, count in answer["tiers"].items() if count)
    say(
        f"{answer['path']} ({answer['kind']}): {format_bytes(answer['freed_bytes'])} evicted"
        f"{f' ({tiers})' if tiers else ''}"
    )
    if answer["dying_bytes"]:
        say(
            f"  {format_bytes(answer['dying_bytes'])} of it are mapped by somebody still: that space follows when they"
            " let go (dying_bytes in `tierfs status --json`)"
        )
