"""`tierfs reload MOUNTPOINT`: the configuration again, while the mount runs."""

import json
import os
from typing import Annotated

import typer

from tierfs.cli.errors import one_line
from tierfs.cli.saying import say
from tierfs.control import registry
from tierfs.control.socket import ask


def reload(
    mountpoint: Annotated[str, typer.Argument(help="Where the tierfs is mounted.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the documented JSON instead.")] = False,
) -> None:
    """Take over what has changed in the configuration, as far as a running mount can. A mistake changes nothing."""
    with one_line():
        record = registry.find(os.path.abspath(mountpoint))
        answers = list(ask(record, "reload", timeout_s=30.0))
        if as_json:
            print(json.dumps(answers, indent=2))
            return
        if not answers:
            say(f"{record.config}: nothing has changed")
        for answer in answers:
            needs = f" needs {answer['needs']}" if answer["needs"] else ""
            say(f"{answer['key']}: {answer['before']} -> {answer['after']}{needs}")
