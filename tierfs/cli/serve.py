"""`tierfs serve [CONFIG|DIR]`."""

from pathlib import Path
from typing import Annotated

import typer

from tierfs.app import logs
from tierfs.app import serve as app_serve
from tierfs.blocks.errors import ConfigError
from tierfs.cli.errors import one_line
from tierfs.cli.mount import overrides
from tierfs.config.load import load_serve_config, serve_config_for_directory

_DEFAULT = Path("/etc/tierfs/serve.toml")


def serve(
    what: Annotated[Path, typer.Argument(help="A directory of models, or a configuration file (TOML).")] = _DEFAULT,
    listen: Annotated[list[str] | None, typer.Option(help="tcp://HOST:PORT; may be repeated.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the shared token.")] = None,
    settle: Annotated[str | None, typer.Option(help="Keep files out until still that long (a DIR only).")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where digests are remembered.")] = None,
    ready_file: Annotated[Path | None, typer.Option(help="Gets the URLs once connections may come.")] = None,
    option: Annotated[list[str] | None, typer.Option("--set", help="Override a key: --set log.level=debug")] = None,
) -> None:
    """Export a directory of models. Serves at once; scans and digests in the background."""
    with one_line():
        changes = overrides(option)
        if listen:
            changes["server.listen"] = listen
        if token_file is not None:
            changes["server.token_file"] = str(token_file)
        if state_dir is not None:
            changes["server.state_dir"] = str(state_dir)
        if what.is_dir():
            if settle is not None:
                changes["exports..settle"] = settle
            settings = serve_config_for_directory(what, changes)
        elif settle is not None:
            raise ConfigError("--settle goes with a directory; in a configuration file it is exports.NAME.settle")
        else:
            settings = load_serve_config(what, changes)
        logs.start(
            level=settings.log.level,
            file=None if settings.log.file is None else str(settings.log.file),
            style=settings.log.format,
        )
        app_serve.serve(settings, ready_file=ready_file)
