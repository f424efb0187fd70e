"""`tierfs where PATH...`: bytes per tier and the load time to expect."""

import json
from typing import Annotated, Any

import typer

from tierfs.blocks.units import format_bytes
from tierfs.cli.errors import one_line
from tierfs.cli.paths import in_one_mount
from tierfs.cli.saying import say
from tierfs.control.socket import ask


def where(
    paths: Annotated[list[str], typer.Argument(help="Files or directories in a mount.")],
    files: Annotated[bool, typer.Option("--files", help="Each file as well.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the documented JSON instead.")] = False,
) -> None:
    """Say where the bytes are, and how long a load from here will take."""
    with one_line():
        record, relative = in_one_mount(paths)
        answers = list(ask(record, "where", paths=relative, files=files))
        if as_json:
            print(json.dumps(answers, indent=2))
            return
        for answer in answers:
            rates = answer["bytes_per_s"]
            placed = _placed(answer, rates)
            say(f"{answer['path']}: {format_bytes(answer['bytes'])} in {answer['files']} files; {placed}")
            for file in answer.get("per_file", ()):
                say(f"  {file['path']}: {format_bytes(file['bytes'])}; {_placed(file, rates)}")
        measured = ", ".join(f"{name} {format_bytes(int(rate))}/s" for name, rate in rates.items() if rate)
        say(f"at the rates measured so far: {measured or 'none yet'}")


def _placed(answer: dict[str, Any], rates: dict[str, float]) -> str:
    tiers = ", ".join(f"{name} {format_bytes(count)}" for name, count in answer["tiers"].items())
    unmeasured = [name for name, count in answer["tiers"].items() if count and not rates[name]]
    local = f"what {' and '.join(unmeasured)} takes, which is not measured yet (tierfs doctor CONFIG does)"
    if answer["eta_s"] is None and rates["source"]:
        eta = "not known while the source is away"
    elif answer["eta_s"] is None:
        eta = "not known yet"
    elif unmeasured:
        eta = f"{answer['eta_s']:.1f} s and {local}" if answer["eta_s"] else local
    else:
        eta = f"{answer['eta_s']:.1f} s"
    missing = format_bytes(answer["missing_bytes"])
    return f"{tiers or 'no local tier'}, only at the source {missing}; load time {eta}"
