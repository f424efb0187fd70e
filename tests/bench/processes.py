"""Processes, mounts and temporary directories of one benchmark run, and how all of them go away again.

Called by the peers (start, mount), by main.py (at its end) and by run.sh (``processes.py WORK`` after main.py, in
case that was killed).  What must hold: only processes that were recorded here are ever signalled, by pid *and* start
time, and no directory is removed while something is mounted in it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_MARK = "BENCH_MOUNT"


class PeerFailed(Exception):
    """A peer could not be started or used; the message is what the table says about it."""


@dataclass(frozen=True)
class ProcessId:
    """A process that cannot be mistaken for a later one with the same number."""

    pid: int
    start_ticks: int


def identify(pid: int) -> ProcessId | None:
    """The process with its start time, or None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else ProcessId(pid, int(fields[19]))


def mark(mount: Path) -> dict[str, str]:
    """The environment in which a daemon for `mount` is started, so that `find_daemons` knows it again."""
    return {_MARK: str(mount)}


def find_daemons(mount: Path) -> list[int]:
    """Pids of the running processes that were started with this mark.

    A command line would not do: JuiceFS rewrites its own and cuts it off.
    """
    wanted = f"{_MARK}={mount}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in variables and identify(int(entry.name)):
            found.append(int(entry.name))
    return found


def last_line(log: Path) -> str:
    """The last line of a log, where programs say why they end."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip()[-300:] if lines else "(it said nothing)"


def mounts_below(directory: Path) -> list[Path]:
    """Mount points at or below `directory`, deepest first. Reads mountinfo only: a dead mount cannot block it."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), line.split()[4])
        if Path(point).is_relative_to(directory):
            found.append(Path(point))
    return sorted(found, key=lambda path: len(path.parts), reverse=True)


def unmount(point: Path) -> None:
    """Unmount `point` if it is mounted, lazily if it is busy."""
    fuser = shutil.which("fusermount3") or shutil.which("fusermount")
    commands = [["umount", str(point)], ["umount", "-l", str(point)]] if os.geteuid() == 0 else []
    if fuser:
        commands.append([fuser, "-u", "-z", str(point)])
    for command in commands:
        if point not in mounts_below(point):
            return
        try:
            subprocess.run(command, capture_output=True, timeout=15, check=False)
        except subprocess.TimeoutExpired:
            continue


class Workspace:
    """The temporary directory of a run (on the disk), one in memory, and the processes started in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.memory_directory = Path("/dev/shm") / directory.name
        self._pids_file = directory / "pids"
        self._children: list[subprocess.Popen[bytes]] = []

    def path(self, name: str) -> Path:
        """A directory of that name in the workspace, made if it is not there."""
        path = self.directory / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def memory_path(self, name: str) -> Path:
        """The same in memory (tmpfs)."""
        path = self.memory_directory / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def record(self, pid: int) -> None:
        """From now on the process `pid` is ours to end."""
        process = identify(pid)
        if process is not None:
            with self._pids_file.open("a") as file:
                file.write(f"{process.pid} {process.start_ticks}\n")

    def spawn(self, command: Sequence[str], *, log: str, environment: Mapping[str, str] | None = None) -> int:
        """Start a long-lived process in a session of its own (^C is ours to handle); returns its pid."""
        with (self.directory / log).open("ab") as output:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
        self._children.append(child)
        self.record(child.pid)
        return child.pid

    def run(
        self, command: Sequence[str], *, timeout_s: float = 60, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a short command to its end. Raises PeerFailed with its last words."""
        name = " ".join([*(command[2:4] if command[1:2] == ["-m"] else [Path(command[0]).name, *command[1:2]])])
        # The output goes to a file: a pipe would stay open in a daemon that the command leaves behind.
        output = self.directory / "command.out"
        with output.open("wb") as file:
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=timeout_s,
                    check=False,
                    env={**os.environ, **(environment or {})},
                )
            except subprocess.TimeoutExpired as error:
                raise PeerFailed(f"{name}: not done after {timeout_s:g} s") from error
            except OSError as error:
                raise PeerFailed(f"{name}: {error}") from error
        if done.returncode != 0:
            raise PeerFailed(f"{name}: exit {done.returncode}: {last_line(output)}")
        return subprocess.CompletedProcess(command, 0, stdout=output.read_text(errors="replace"))

    def end(self, pids: Sequence[int], *, grace_s: float = 10.0) -> None:
        """End these processes."""
        self._end([process for pid in pids if (process := identify(pid))], grace_s=grace_s)

    def _end(self, processes: Sequence[ProcessId], *, grace_s: float) -> None:
        """SIGTERM, then SIGKILL for what is left. Processes that are gone, or not the same any more, are left alone."""
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            alive = [process for process in processes if identify(process.pid) == process]
            for process in alive:
                os.kill(process.pid, number)
            deadline = time.monotonic() + wait_s
            while alive and time.monotonic() < deadline:
                # Children that ended are taken off, so that they do not stay as zombies.
                self._children = [child for child in self._children if child.poll() is None]
                alive = [process for process in alive if identify(process.pid) == process]
                time.sleep(0.01)

    def wait_mounted(
        self, point: Path, *, pid: int | None = None, log: str | None = None, timeout_s: float = 30
    ) -> None:
        """Return when `point` is a mount. Raises PeerFailed when the process ended before, or at the deadline."""
        deadline = time.monotonic() + timeout_s
        while point not in mounts_below(point):
            if pid is not None and identify(pid) is None:
                raise PeerFailed(f"the mount process ended: {last_line(self.directory / log) if log else ''}")
            if time.monotonic() > deadline:
                raise PeerFailed(f"no mount at {point} after {timeout_s:g} s")
            time.sleep(0.02)

    def clean_up(self) -> list[str]:
        """Unmount, end and remove everything. Returns what could not be removed, as messages; may be called again."""
        for point in mounts_below(self.directory):
            unmount(point)
        if self._pids_file.exists():
            lines = [line.split() for line in self._pids_file.read_text().splitlines()]
            self._end([ProcessId(int(pid), int(ticks)) for pid, ticks in lines], grace_s=5.0)
        left = mounts_below(self.directory)
        for point in left:
            unmount(point)
        if mounts_below(self.directory):
            return [f"still mounted, left alone: {point}" for point in mounts_below(self.directory)]
        shutil.rmtree(self.memory_directory, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)
        return [f"could not remove {path}" for path in (self.directory, self.memory_directory) if path.exists()]


if __name__ == "__main__":
    sys.exit("\n".join(Workspace(Path(sys.argv[1])).clean_up()) or None)
