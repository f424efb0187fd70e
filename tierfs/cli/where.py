"""`tierfs where PATH...`: bytes per tier and the load time to expect."""

import json
from typing import Annotated

import typer

from tierfs.blocks.units import format_bytes
from tierfs.cli.errors import one_line
from tierfs.cli.paths import in_one_mount
from tierfs.control.socket import ask


def where(
    paths: Annotated[list[str], typer.Argument(help="Files or directories in a mount.")],
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Say where the bytes are, and how long a load from here will take."""
    with one_line():
        record, relative = in_one_mount(paths)
        answers = list(ask(record, "where", paths=relative))
        if as_json:
            print(json.dumps(answers, indent=2))
            return
        for answer in answers:
            tiers = ", ".join(f"{name} {format_bytes(count)}" for name, count in answer["tiers"].items())
            eta = "not known yet" if answer["eta_s"] is None else f"{answer['eta_s']:.1f} s"
            print(
                f"{answer['path']}: {format_bytes(answer['bytes'])} in {answer['files']} files;"
                f" {tiers or 'no local tier'}, only at the source {format_bytes(answer['missing_bytes'])};"
                f" load time {eta}"
            )
