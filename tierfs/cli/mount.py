"""`tierfs mount CONFIG MOUNTPOINT` and `tierfs unmount MOUNTPOINT`.

Mounting starts a daemon: a child process of its own session that runs the same command with --foreground and writes
one line to a pipe, "ready" or what is wrong. The command returns when that line is there. In channel mode
`tierfs-channel` is put in front of that command (app/launch), and in the foreground this process becomes the channel.

`/dev/fd/N` for a mountpoint is a mount that somebody else has made (fuse/given.py): every process up to the one that
serves it inherits the descriptor.
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
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated

import typer

from tierfs.app import launch, logs, notify, places
from tierfs.app import mount as app_mount
from tierfs.blocks.errors import ControlError, MountFailed, TierfsError
from tierfs.cli.errors import one_line
from tierfs.cli.saying import say
from tierfs.config.load import given_keys, load_mount_config
from tierfs.config.schema import MountConfig
from tierfs.control import registry
from tierfs.control.socket import ask
from tierfs.fuse import given
from tierfs.fuse.channel import Channel
from tierfs.fuse.kernel import mount_at

_ERRORS_BYTES_MAX = 1 << 20  # a longer file is put aside by the next mount
_START_MARGIN_S = 60.0  # beyond source.timeout: opening the tiers and verifying their index
_STOP_S = 8.5  # the daemon gives itself 8 s


def mount(
    config: Annotated[Path, typer.Argument(help="The configuration file (TOML).")],
    # A Path would be looked at: it may hang.
    mountpoint: Annotated[
        str,
        typer.Argument(help="An existing directory; or /dev/fd/N: an inherited /dev/fuse that is mounted already."),
    ],
    foreground: Annotated[bool, typer.Option(help="Stay in the foreground and log to stderr.")] = False,
    option: Annotated[list[str] | None, typer.Option("--set", help="Override a key: --set warm.capacity=1GiB")] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="With /dev/fd/N: the path by which other commands know this mount, such as where its readers see it."
        ),
    ] = None,
    unless_mounted: Annotated[
        bool, typer.Option(help="Succeed, and say so, where this configuration is mounted there already.")
    ] = False,
    ready_fd: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Mount a tree of models. Returns when it is ready to be read."""
    with one_line(), contextlib.ExitStack() as stack:
        fuse_fd = given.descriptor_of(mountpoint)
        if name is not None and fuse_fd is None:
            raise MountFailed(f"--name {name}: a mountpoint is its own name; only /dev/fd/N may have another one")
        if fuse_fd is not None and not launch.under_a_channel():
            given.check(fuse_fd)
        place = _absolute(name or mountpoint)
        stack.enter_context(_failure_told(place))
        file, changes = config.absolute(), overrides(option)
        settings = load_mount_config(config, changes)
        log_file = str(launch.log_path(settings, place))
        if not foreground:
            stack.enter_context(registry.starting(place, wait_s=settings.source.timeout + _START_MARGIN_S))
            if not unless_mounted or not _told_mounted(place, file, option or []):
                _start_daemon(settings, config, place, fuse_fd, option or [], log_file)
            return
        daemon = ready_fd >= 0
        if not daemon and not launch.under_a_channel():
            _become_channel(settings, config, place, fuse_fd, option or [])
        channel = Channel.from_environment()
        channel_is_first = channel is None or channel.epoch == 1
        if not channel_is_first:
            ready_fd = -1  # the first daemon has answered
        waiting = _Waiting(ready_fd)
        try:
            logs.start(
                level=settings.log.level,
                file=log_file if daemon or settings.log.file else None,
                style=settings.log.format,
            )
            app_mount.mount(
                app_mount.Start(
                    config=settings,
                    mountpoint=place,
                    channel=channel,
                    config_path=str(file),
                    reread=lambda: (load_mount_config(file, changes), given_keys(file, changes)),
                    given_keys=given_keys(file, changes),
                    options=option or [],
                    log_file=log_file if daemon else "",
                    ready=lambda note: _tell_ready(waiting, place, note, unit=not daemon and channel_is_first),
                    given_fd=fuse_fd,
                )
            )
        except TierfsError as error:
            logging.getLogger(__name__).error("daemon_ended reason=%r", " ".join(str(error).split()))
            waiting.tell(" ".join(str(error).split()))
            raise
        except BaseException as error:
            logging.getLogger(__name__).exception("daemon_ended_by_bug")
            waiting.tell(f"the daemon ended by a bug ({type(error).__name__}); its log: {log_file}")
            raise


@contextlib.contextmanager
def _failure_told(place: str) -> Iterator[None]:
    """What keeps a daemon under a channel from starting is left for `tierfs restart` and `status`."""
    if not launch.under_a_channel():
        yield
        return
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, TierfsError) else f"a bug ({type(error).__name__}: {error})"
        with contextlib.suppress(OSError, ControlError):
            registry.write_failure(place, reason)
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
            if record.running:
                _end_daemon(record, place)
        if any(record.given for record in found):
            registry.remove(place)  # it has ended; the mount is for whoever made it to unmount
        else:
            places.unmount_dead(place)


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


def _told_mounted(place: str, file: Path, options: list[str]) -> bool:
    """Whether that very mount is there already, which is then said. Raises MountFailed where another one is."""
    for record in registry.records():
        if record.mountpoint != place or not record.alive or not (record.given or mount_at(place) is not None):
            continue
        if os.path.realpath(record.config) != os.path.realpath(file) or record.options != options:
            given_options = "".join(f" --set {option}" for option in record.options)
            raise MountFailed(
                f"{place} is the mount of another configuration, {record.config}{given_options}:"
                f" `tierfs unmount {place}` first"
            )
        say(f"tierfs: {file} is mounted at {place} already", file=sys.stderr)
        return True
    return False


def _tell_ready(waiting: "_Waiting", place: str, note: str, *, unit: bool) -> None:
    waiting.tell(f"ready {note}")
    if unit:
        notify.ready(f"mounted at {place}{', but ' + note if note else ''}")


def _absolute(mountpoint: str) -> str:
    # The mountpoint itself may be a dead or hanging mount, which must not be touched; a symlink to it is resolved.
    path = os.path.abspath(mountpoint)
    if given.descriptor_of(path) is not None:
        return path  # by itself a name
    place = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    return place if mount_at(place) is not None else os.path.realpath(place)


def _daemon_command(
    config: Path, place: str, fuse_fd: int | None, options: list[str], ready_fd: int | None
) -> list[str]:
    where = [place] if fuse_fd is None else [f"/dev/fd/{fuse_fd}", "--name", place]
    command = [sys.executable, "-m", "tierfs.cli.main", "mount", str(config.absolute()), *where, "--foreground"]
    if ready_fd is not None:
        command += ["--ready-fd", str(ready_fd)]
    for option in options:
        command += ["--set", option]
    return command


def _become_channel(settings: MountConfig, config: Path, place: str, fuse_fd: int | None, options: list[str]) -> None:
    """Replace this process by the channel, which starts this same command below it; returns in direct mode."""
    program = launch.plan(settings).program
    if program is None:
        return
    places.clear_the_way(settings, place, given=fuse_fd is not None)
    launch.prepare(settings, place)
    daemon = _daemon_command(config, place, fuse_fd, options, None)
    command = launch.command(program, settings, place, daemon, fuse_fd=fuse_fd)
    try:
        if fuse_fd is not None:
            os.set_inheritable(fuse_fd, True)
        os.execve(program, command, {**os.environ, **launch.environment(settings)})
    except OSError as error:
        raise MountFailed(f"cannot run {program}: {error.strerror}") from error


def _start_daemon(
    settings: MountConfig, config: Path, place: str, fuse_fd: int | None, options: list[str], log_file: str
) -> None:
    program = launch.plan(settings).program
    receive, send = os.pipe()
    try:
        command = _daemon_command(config, place, fuse_fd, options, send)
        # A channel outlives this command and may have something to say any time, so that a pipe would not do.
        errors: IO[bytes] | None = None
        start = 0
        if program is not None:
            places.clear_the_way(settings, place, given=fuse_fd is not None)
            launch.prepare(settings, place)
            command = launch.command(program, settings, place, command, fuse_fd=fuse_fd, keep_fd=send)
            errors = _errors_file(settings, place)
            start = errors.seek(0, os.SEEK_END)
        with errors or contextlib.nullcontext():
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors or subprocess.PIPE,
                pass_fds=[send] if fuse_fd is None else [send, fuse_fd],
                start_new_session=True,
                cwd="/",
                env={**os.environ, **launch.environment(settings)},
            )
            os.close(send)
            send = -1
            line = _first_line(receive, settings.source.timeout + _START_MARGIN_S)
            if line is not None and line.startswith("ready"):
                note = line.removeprefix("ready").strip()
                if note:
                    say(f"tierfs: mounted, but {note}", file=sys.stderr)
                return
            if line == "":
                # What it says while it ends is there once it has ended.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_STOP_S)
                if errors is not None:
                    errors.seek(start)
                words = errors or child.stderr
                assert words is not None
                line = words.read().decode(errors="replace").strip().rpartition("\n")[2]
                line = line or f"the daemon ended (status {child.poll()}) and did not say why; its log: {log_file}"
                line += f" (`tierfs doctor {config}` says what this machine lacks)"
            if line and settings.mount.user is not None:
                line = f"the daemon, as the user {settings.mount.user}: {line}"  # root may do what that user may not
            child.terminate()
    except OSError as error:
        raise MountFailed(f"the daemon cannot be started: {error}") from error
    finally:
        if send >= 0:
            os.close(send)
    waited = settings.source.timeout + _START_MARGIN_S
    raise MountFailed(line or f"the daemon is not ready after {waited:g} s; its log: {log_file}")


def _first_line(receive: int, timeout_s: float) -> str | None:
    """The line the daemon sends; empty when it ended without one, None when there is none in time."""
    with os.fdopen(receive, "rb") as pipe:
        readable, _, _ = select.select([pipe], [], [], timeout_s)
        return pipe.readline().decode().strip() if readable else None


def _errors_file(settings: MountConfig, place: str) -> IO[bytes]:
    """Where a channel in the background, and what it starts, write their last words."""
    path = launch.log_path(settings, place).with_suffix(".channel.log")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.lstat().st_size > _ERRORS_BYTES_MAX:
        path.replace(path.with_suffix(".log.1"))
    # The directory may be that of a user with fewer rights, who must not make root write elsewhere.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o640), "ab+")


def _end_daemon(record: registry.Record, place: str) -> None:
    """End the owner of a mount: politely, then by the owner's own means, then for good. Raises MountFailed."""
    try:
        list(ask(record, "stop", timeout_s=2.0))
    except ControlError:
        if record.channel or record.given:
            _kill(record.pid, signal.SIGTERM, record.alive)  # it unmounts, whatever its daemon does
        else:
            places.detach(place)
    if _ended(record, _STOP_S):
        return
    # A crash is what they are made for; what hangs would keep the mount for ever.
    _kill(record.pid, signal.SIGKILL, record.alive)
    _kill(record.daemon_pid, signal.SIGKILL, record.channel and record.daemon_alive)
    if not _ended(record, 1.0):
        pid = record.pid if record.alive else record.daemon_pid
        raise MountFailed(f"the daemon (pid {pid}) has not ended; its log: {record.log_file}")


def _kill(pid: int, number: signal.Signals, there: bool) -> None:
    if there:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


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
    while record.running:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
