"""`tierfs doctor [CONFIG] [--measure] [--json]`: what is missing on this machine, and how to get it."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tierfs import __version__
from tierfs.app.doctor.examination import Examination, examine
from tierfs.app.doctor.finding import Level
from tierfs.blocks.text import printable
from tierfs.cli.errors import one_line
from tierfs.cli.saying import say

_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="A configuration of a mount; without one, that of the only mount that is up.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also write and read a temporary file where there is no object to read.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the documented JSON instead.")] = False,
) -> None:
    """Look at this machine. Changes nothing, and needs no rights. Exit status 1 when there is a problem."""
    with one_line():
        found = examine(config, measure=measure)
    if as_json:
        print(json.dumps(as_document(found), indent=2))
    else:
        _print(found)
    problems = found.count(Level.PROBLEM)
    if problems:
        say(f"tierfs: {problems} of the findings are problems: each has its mend line", file=sys.stderr)
        raise typer.Exit(1)


def as_document(found: Examination) -> dict[str, object]:
    """What --json prints: docs/DOCTOR.md."""
    return {
        "version": __version__,
        "config": found.config or None,
        "counts": {level.value: found.count(level) for level in Level},
        "findings": [asdict(finding) for finding in found.findings],
    }


def _print(found: Examination) -> None:
    console = Console(highlight=False, soft_wrap=True, markup=False)
    for finding in found.findings:
        console.print(f"{finding.level.value:8}", style=_STYLES[finding.level], end="")
        console.print(printable(f" {finding.what}"))
        if finding.why:
            console.print(printable(f"         why   {finding.why}"))
        if finding.mend:
            console.print(printable(f"         mend  {finding.mend}"))
    counts = [f"{found.count(level)} {level.value}" for level in reversed(Level)]
    console.print(", ".join(counts))
