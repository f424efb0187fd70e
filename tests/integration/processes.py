"""Real `tierfs serve` and `tierfs mount` processes for tests, ended on every path."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tierfs.blocks.errors import ControlError
from tierfs.control import registry
from tierfs.control.socket import ask

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def tierfs(
    *arguments: object, timeout_s: float = 60, check: bool = True, prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end; ``prefix`` is a command that runs it in turn."""
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "tierfs.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=ENVIRONMENT,
    )
    if check and done.returncode != 0:
        raise AssertionError(f"tierfs {arguments} ended with {done.returncode}: {done.stderr}")
    return done


def eventually(condition: Callable[[], bool], what: str, within_s: float = 20) -> None:
    """Wait until something is so; fail with ``what`` otherwise."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.02)


class Serve:
    """A running server of one directory."""

    def __init__(self, directory: Path, work: Path, *options: str, port: int = 0) -> None:
        self._ready = work / "ready"
        self._log = (work / "serve.log").open("ab")
        self.command = [sys.executable, "-m", "tierfs.cli.main", "serve", str(directory)]
        self.command += ["--listen", f"tcp://127.0.0.1:{port}", "--state-dir", str(work / "serve-state")]
        self.command += ["--ready-file", str(self._ready), *options]
        self.log = work / "serve.log"
        self.url = ""
        self.start()

    def start(self, within_s: float = 20) -> None:
        """Start, again at the same address after a stop."""
        self._ready.unlink(missing_ok=True)
        if self.url:
            address = self.url.removeprefix("tierfs://").rstrip("/")
            self.command[self.command.index("--listen") + 1] = f"tcp://{address}"
        self.process = subprocess.Popen(self.command, stdout=self._log, stderr=self._log, env=ENVIRONMENT)
        eventually(lambda: self._ready.exists() or self.process.poll() is not None, "the server is ready", within_s)
        assert self.process.poll() is None, self.log.read_text()
        self.url = self._ready.read_text().split()[0]

    def kill(self) -> None:
        """As a crash does."""
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> None:
        """End it, if it runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        self._log.close()


class Mount:
    """A tierfs that can be mounted; `warm`, `hot`, `source` and `options` are lines of those tables, and of mount's."""

    def __init__(
        self,
        url: str,
        work: Path,
        *,
        warm: str = "",
        hot: str = "",
        extra: str = "",
        timeout: str = "10s",
        token_file: str = "",
        mode: str = "direct",
        options: str = "",
        source: str = "",
        descriptor_limit: int = 0,
    ) -> None:
        self._prefix = ("prlimit", f"--nofile={descriptor_limit}:{descriptor_limit}") if descriptor_limit else ()
        self.path = work / "mnt"
        self.path.mkdir()
        self.work = work
        self.pid = 0
        self.config = work / "mount.toml"
        text = f'state_dir = "{work}/state"\n[source]\nurl = "{url}"\ntimeout = "{timeout}"\n'
        text += f'token_file = "{token_file}"\n' if token_file else ""
        text += source
        text += f"[warm]\n{warm}\n" if warm else ""
        text += f"[hot]\n{hot}\n" if hot else ""
        text += f'[mount]\nmode = "{mode}"\n{options}\n'
        self.config.write_text(text + extra)
        self.channel_pid = 0

    def mount(self, within_s: float = 60) -> None:
        """Mount, as the command does."""
        tierfs("mount", self.config, self.path, prefix=self._prefix, timeout_s=within_s)
        status = self.status()
        self.pid = int(status["daemon"]["pid"])
        self.channel_pid = int(status["channel"]["pid"]) if status["mode"] == "channel" else 0

    def status(self) -> dict[str, Any]:
        """What `tierfs status --json` prints, asked for in this process: starting one takes longer than the answer."""
        with mock.patch.dict(os.environ, {registry.ENVIRONMENT: ENVIRONMENT.get(registry.ENVIRONMENT, "")}):
            try:
                return next(ask(registry.find(str(self.path)), "status"))
            except ControlError as error:
                raise AssertionError(f"no status of {self.path}: {error}") from error

    def unmount(self) -> None:
        """`tierfs unmount`."""
        tierfs("unmount", self.path, timeout_s=20)

    def kill(self) -> None:
        """Kill the daemon as the OOM killer does; the dead mount stays."""
        os.kill(self.pid, signal.SIGKILL)
        eventually(lambda: not runs(self.pid), "the daemon is gone")

    def log(self) -> str:
        """The daemon's log."""
        return "".join(path.read_text() for path in (self.work / "state" / "log").glob("*.log"))

    def cleanup(self) -> None:
        """Whatever happened: no mount and no process stays."""
        if self.channel_pid and runs(self.channel_pid):
            tierfs("unmount", self.path, check=False)
            if runs(self.channel_pid):
                os.kill(self.channel_pid, signal.SIGKILL)
        subprocess.run(["umount", "-l", str(self.path)], capture_output=True, check=False)
        if self.pid and runs(self.pid):
            os.kill(self.pid, signal.SIGCONT)
            os.kill(self.pid, signal.SIGTERM)
            try:
                eventually(lambda: not runs(self.pid), "the daemon has ended", within_s=12)
            except AssertionError:
                os.kill(self.pid, signal.SIGKILL)
        tierfs("unmount", self.path, check=False)


def runs(pid: int) -> bool:
    """Whether that process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def drop_caches() -> None:
    """Forget clean pages, so that the next read reaches the daemon (root only)."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def process_status(pid: int) -> dict[str, int]:
    """VmRSS and RssAnon in KiB, and Threads."""
    fields = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: int(value.split()[0]) for name, _, value in fields if name in ("VmRSS", "RssAnon", "Threads")}


def descriptors(pid: int) -> list[str]:
    """What the descriptors of a process are."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue
    return found


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for one in found:
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += map(int, children.read_text().split())
            except OSError:
                continue
    return found


def waits_of(pid: int) -> str:
    """What every thread of a process does just now: its state, where in the kernel it waits, and (root) its stack."""
    lines = [f"{pid}:"]
    try:
        lines[0] += " " + " ".join(Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0"))[:300]
        for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            stack = " < ".join(line.split()[-1].partition("+")[0] for line in (task / "stack").read_text().splitlines())
            lines.append(f"  {task.name} {name} {rest.split()[0]} {(task / 'wchan').read_text()}: {stack}")
    except OSError as error:
        lines.append(f"  {error}")
    return "\n".join(lines)


def waiting_requests() -> str:
    """How many requests each FUSE connection of this machine has under way; see the kernel's fuse.rst."""
    counts = sorted(Path("/sys/fs/fuse/connections").glob("*/waiting"))
    return "requests under way: " + ", ".join(f"{path.parent.name}: {path.read_text().strip()}" for path in counts)
