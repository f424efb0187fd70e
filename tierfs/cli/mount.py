"""`tierfs mount CONFIG MOUNTPOINT` and `tierfs unmount MOUNTPOINT`.

Mounting starts a daemon: a child process of its own session that runs the same command with --foreground and writes
one line to a pipe, "ready" or what is wrong. The command returns when that line is there.
"""

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from tierfs.app import logs
from tierfs.app import mount as app_mount
from tierfs.blocks.errors import ControlError, MountFailed, TierfsError
from tierfs.cli.errors import one_line
from tierfs.config.load import load_mount_config
from tierfs.control import registry
from tierfs.control.socket import ask
from tierfs.fuse.kernel import mount_at

_START_MARGIN_S = 60.0  # beyond source.timeout: opening the tiers and verifying their index
_STOP_S = 8.5  # the daemon gives itself 8 s


def mount(
    config: Annotated[Path, typer.Argument(help="The configuration file (TOML).")],
    mountpoint: Annotated[str, typer.Argument(help="An existing directory.")],  # a Path would be looked at: it may hang
    foreground: Annotated[bool, typer.Option(help="Stay in the foreground and log to stderr.")] = False,
    option: Annotated[list[str] | None, typer.Option("--set", help="Override a key: --set warm.capacity=1GiB")] = None,
    ready_fd: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Mount a tree of models. Returns when it is ready to be read."""
    with one_line():
        place = _absolute(mountpoint)
        settings = load_mount_config(config, overrides(option))
        state = Path(settings.state_dir)
        log_file = str(settings.log.file or state / "log" / f"{registry.record_path(place).stem}.log")
        if not foreground:
            _start_daemon(config, place, option or [], settings.source.timeout, log_file)
            return
        daemon = ready_fd >= 0
        waiting = _Waiting(ready_fd)
        try:
            logs.start(
                level=settings.log.level,
                file=log_file if daemon or settings.log.file else None,
                style=settings.log.format,
            )
            app_mount.mount(
                settings,
                place,
                config_path=str(config.absolute()),
                log_file=log_file if daemon else "",
                ready=lambda note: waiting.tell(f"ready {note}"),
            )
        except TierfsError as error:
            waiting.tell(" ".join(str(error).split()))
            raise
        except BaseException as error:
            logging.getLogger(__name__).exception("daemon_ended_by_bug")
            waiting.tell(f"the daemon ended by a bug ({type(error).__name__}); its log: {log_file}")
            raise


def unmount(mountpoint: Annotated[str, typer.Argument(help="Where the tierfs is mounted.")]) -> None:
    """Unmount, and end the daemon. Works while files are open and when the daemon is dead."""
    with one_line():
        place = _absolute(mountpoint)
        found = [record for record in registry.records() if record.mountpoint == place]
        entry = mount_at(place)
        if not found and (entry is None or entry.file_system != "fuse.tierfs"):
            raise MountFailed(f"no tierfs is mounted at {place}")
        for record in found:
            if record.alive:
                try:
                    list(ask(record, "stop", timeout_s=2.0))
                except ControlError:
                    app_mount.detach(place)
                if not _ended(record, _STOP_S):
                    os.kill(record.pid, signal.SIGKILL)  # a crash it is made for; what hangs would keep it for ever
                    if not _ended(record, 1.0):
                        raise MountFailed(f"the daemon (pid {record.pid}) has not ended; its log: {record.log_file}")
        app_mount.unmount_dead(place)


def overrides(options: list[str] | None) -> dict[str, object]:
    """--set key=value options as a mapping. A value that reads as TOML is one (4, true, ["a"]); else it is text."""
    pairs: dict[str, object] = {}
    for option in options or []:
        key, separator, value = option.partition("=")
        if not separator:
            raise MountFailed(f"--set {option}: expected KEY=VALUE, such as warm.capacity=1GiB")
        try:
            pairs[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            pairs[key.strip()] = value.strip()
    return pairs


def _absolute(mountpoint: str) -> str:
    # The mountpoint itself may be a dead or hanging mount, which must not be touched; a symlink to it is resolved.
    path = os.path.abspath(mountpoint)
    place = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    return place if mount_at(place) is not None else os.path.realpath(place)


def _start_daemon(config: Path, place: str, options: list[str], timeout_s: float, log_file: str) -> None:
    receive, send = os.pipe()
    command = [sys.executable, "-m", "tierfs.cli.main", "mount", str(config.absolute()), place, "--foreground"]
    command += ["--ready-fd", str(send)]
    for option in options:
        command += ["--set", option]
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[send],
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": _import_path()},
        )
    finally:
        os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        readable, _, _ = select.select([pipe], [], [], timeout_s + _START_MARGIN_S)
        line = pipe.readline().decode().strip() if readable else ""
    if line.startswith("ready"):
        note = line.removeprefix("ready").strip()
        if note:
            print(f"tierfs: mounted, but {note}", file=sys.stderr)
        return
    if readable and not line:
        assert child.stderr is not None
        line = child.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
    child.terminate()
    raise MountFailed(line or f"the daemon is not ready after {timeout_s + _START_MARGIN_S:g} s; its log: {log_file}")


def _import_path() -> str:
    """Where this tierfs was imported from, so that the daemon is the same one wherever it is started."""
    root = str(Path(__file__).parents[2])
    others = os.environ.get("PYTHONPATH", "")
    return f"{root}{os.pathsep}{others}" if others else root


class _Waiting:
    """The command that waits for one line from its daemon, if there is one; later lines are for nobody."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def tell(self, line: str) -> None:
        """Send the line and end the wait."""
        if self._descriptor >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._descriptor, line.encode() + b"\n")
            os.close(self._descriptor)
            self._descriptor = -1


def _ended(record: registry.Record, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while record.alive:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
