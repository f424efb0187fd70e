"""The `tierfs` command: puts the commands together."""

import typer

from tierfs import __version__
from tierfs.cli import doctor, evict, mount, pin, reload, report, restart, serve, status, top, verify, warm, where
from tierfs.cli.saying import say

app = typer.Typer(
    help="Model weights from the nearest tier.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("serve")(serve.serve)
app.command("mount")(mount.mount)
app.command("unmount")(mount.unmount)
app.command("restart")(restart.restart)
app.command("status")(status.status)
app.command("warm")(warm.warm)
app.command("where")(where.where)
app.command("doctor")(doctor.doctor)
app.command("pin")(pin.pin)
app.command("unpin")(pin.unpin)
app.command("evict")(evict.evict)
app.command("verify")(verify.verify)
app.command("top")(top.top)
app.command("report")(report.report)
app.command("reload")(reload.reload)


def _version(value: bool) -> None:
    if value:
        say(f"tierfs {__version__}")
        raise typer.Exit


@app.callback()
def _options(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True)) -> None:
    pass


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
