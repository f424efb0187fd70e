"""`tierfs restart MOUNTPOINT`: another daemon for a mount, which stays.

The new one runs the code and the configuration that are installed by then. Readers wait meanwhile; passthrough readers
notice nothing. Only in channel mode, where the mount is not the daemon's. What can be seen before (a broken
configuration, a tier of a newer format) is refused while the old daemon still runs.
"""

import contextlib
import os
import signal
import sys
import time
from typing import Annotated

import typer

from tierfs.app import launch
from tierfs.blocks.errors import ControlError
from tierfs.cli.errors import one_line
from tierfs.cli.mount import overrides
from tierfs.cli.saying import say
from tierfs.config.load import load_mount_config
from tierfs.control import registry
from tierfs.control.socket import ask
from tierfs.tiers.objects import check_format

_MARGIN_S = 30.0  # beyond mount.restart_grace: the old daemon ends before the new one starts
_ASK_AGAIN_S = 0.05


def restart(mountpoint: Annotated[str, typer.Argument(help="Where the tierfs is mounted, in channel mode.")]) -> None:
    """Replace the daemon of a mount without unmounting: a new version, or a changed configuration."""
    with one_line():
        record = registry.find(os.path.abspath(mountpoint))
        if not record.alive:
            raise ControlError(f"{record.mountpoint} is dead (pid {record.pid} is gone): mount it again")
        if not record.channel:
            raise ControlError(
                f"{record.mountpoint} runs in direct mode, where the mount ends with its daemon:"
                " unmount and mount again"
            )
        settings = load_mount_config(record.config, overrides(record.options))  # a broken one changes nothing
        launch.check_user(settings, record.pid)
        launch.prepare(settings, record.mountpoint)  # a directory that is new in the configuration
        for directory in launch.tier_directories(settings):
            check_format(directory)
        kept = launch.kept_options(settings, record.mountpoint, record.pid)
        was_starting = not record.daemon_alive  # one that fails just now may not have seen what was put right
        registry.forget_failure(record)
        os.kill(record.pid, signal.SIGHUP)
        deadline_s = time.monotonic() + settings.mount.restart_grace + _MARGIN_S
        while time.monotonic() < deadline_s:
            if not record.alive:
                raise ControlError(f"the channel of {record.mountpoint} ended; its log: {record.log_file}")
            with contextlib.suppress(ControlError):
                if next(ask(record, "status", timeout_s=2.0))["daemon"]["pid"] != record.daemon_pid:
                    if kept:
                        say(f"tierfs: unmount and mount again for these to change: {'; '.join(kept)}", file=sys.stderr)
                    return
            reason = registry.failure(record)
            if reason and was_starting:
                was_starting = False
                registry.forget_failure(record)
            elif reason:
                raise ControlError(
                    f"the new daemon of {record.mountpoint} does not start: {reason}. Readers wait, and the channel"
                    f" tries again for {settings.mount.restart_grace:g} s, then it unmounts: put that right before"
                )
            time.sleep(_ASK_AGAIN_S)
        raise ControlError(f"no other daemon answers for {record.mountpoint}; its log: {record.log_file}")
