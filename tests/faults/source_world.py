"""A server, a mount, and a relay between them that can be hurt; and what must hold whatever the fault is."""

import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.fault_proxy import FaultProxy, none
from tests.integration.processes import drop_caches, eventually, tierfs

# Prints the sum of the file, or the errno that a read or open ended with; "map" walks a map instead of reading.
# When told to hold, it says that the file is open (and mapped), and reads when its standard input ends.
READER = """
import hashlib, mmap, os, sys
how, path = sys.argv[1:3]
try:
    descriptor = os.open(path, os.O_RDONLY)
    if how == "map":
        data = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    if sys.argv[3:] == ["hold"]:
        print("open", flush=True)
        sys.stdin.read()
    if how == "map":
        print(hashlib.sha256(data).hexdigest())
    else:
        sum = hashlib.sha256()
        while piece := os.read(descriptor, 1 << 20):
            sum.update(piece)
        print(sum.hexdigest())
except OSError as error:
    print(error.errno)
"""
RIGHT = "right"


@dataclass(frozen=True)
class Outcome:
    """What a reader got: "right", or the name of an errno; and after how long."""

    what: str
    took_s: float


class SourceWorld:
    """Model a is in warm, b to d are cold. Lines of the log are counted from the fault on."""

    def __init__(
        self,
        models: Path,
        tmp_path: Path,
        serve: Any,
        mount: Any,
        *,
        mode: str = "channel",
        timeout: str = "2s",
        token: str = "",
        before_mount: Callable[[], None] = lambda: None,
        warm_directory: Path | None = None,
    ) -> None:
        self.models = models
        self._readers: list[subprocess.Popen[str]] = []
        self.token_file = tmp_path / "token"
        options = []
        if token:
            self.token_file.write_text(token)
            self.token_file.chmod(0o600)
            options = ["--token-file", str(self.token_file)]
        self.server = serve(models, *options)
        self.proxy = FaultProxy(self.server.url)
        self.mount_token = tmp_path / "mount-token"
        if token:
            self.mount_token.write_text(token)
            self.mount_token.chmod(0o600)
        before_mount()
        self.mounted = mount(
            self.proxy.url,
            warm=f'path = "{warm_directory or tmp_path / "warm"}"\ncapacity = "1GiB"',
            timeout=timeout,
            mode=mode,
            token_file=str(self.mount_token) if token else "",
        )
        tierfs("warm", self.mounted.path / "a")
        self._logged_before = len(self._log_lines())

    def close(self) -> None:
        """End the readers and the proxy; the fixtures end the rest."""
        for reader in self._readers:
            with reader:
                reader.kill()
        self.proxy.close()

    def start(self, model: str, how: str = "read") -> "subprocess.Popen[str]":
        """A process that reads one model."""
        return self._run(how, str(self.mounted.path / model / "model.bin"))

    def hold(self, model: str, how: str = "read") -> "subprocess.Popen[str]":
        """A process that has one model open, and reads it only when its outcome is asked for."""
        reader = self._run(how, str(self.mounted.path / model / "model.bin"), "hold")
        assert reader.stdout is not None and reader.stdout.readline() == "open\n"
        return reader

    def outcome(self, model: str, reader: "subprocess.Popen[str]", within_s: float, *, sigbus: bool = False) -> str:
        """What it printed. A wrong byte, a hang and a signal fail the test; SIGBUS of a map may stand for ENOTCONN."""
        with reader:
            try:
                printed = reader.communicate(timeout=within_s)[0].strip()
            finally:
                reader.kill()
        if sigbus and reader.returncode == -signal.SIGBUS:
            return "ENOTCONN"
        assert reader.returncode == 0, f"the reader of {model} ended with {reader.returncode}"
        if printed.isdigit():
            return errno.errorcode[int(printed)]
        assert printed == self._sum(model), f"wrong bytes in {model}"
        return RIGHT

    def read(self, model: str, how: str = "read", *, within_s: float = 30) -> Outcome:
        """Read one model to its end, or to its errno."""
        started_s = time.monotonic()
        what = self.outcome(model, self.start(model, how), within_s)
        return Outcome(what, time.monotonic() - started_s)

    def gets_sigbus(self, model: str, *, within_s: float) -> None:
        """A walk over a map ends with the signal that stands for a page that cannot be had."""
        reader = self.start(model, "map")
        try:
            assert reader.communicate(timeout=within_s)[0] == ""
        finally:
            reader.kill()
        assert reader.returncode == -signal.SIGBUS

    def others_are_fine(self) -> None:
        """What is in warm is read, and names and status are answered, as if nothing were."""
        drop_caches()
        started_s = time.monotonic()
        assert self.read("a").what == RIGHT
        assert sorted(os.listdir(self.mounted.path)) == ["a", "b", "c", "d"]
        assert os.stat(self.mounted.path / "d" / "model.bin").st_size
        assert os.statvfs(self.mounted.path).f_blocks > 0
        self.mounted.status()
        assert time.monotonic() - started_s < 8

    def killed_reader_is_gone(self, model: str, *, within_s: float) -> None:
        """A reader that waits for the source ends when it is killed."""
        reader = self.start(model)
        try:
            time.sleep(0.5)
            assert reader.poll() is None, "the reader does not wait"
        finally:
            reader.send_signal(signal.SIGKILL)
            reader.communicate(timeout=within_s)

    def heals(self, *models: str, within_s: float = 15) -> None:
        """Without a person, soon after the end of the fault, everything is read."""
        self.proxy.suffer(none)
        eventually(lambda: self.mounted.status()["source"]["state"] == "connected", "connected again", within_s)
        for model in models:
            deadline = time.monotonic() + within_s
            while (outcome := self.read(model)).what != RIGHT:
                assert time.monotonic() < deadline, f"{model} is not readable again: {outcome}"

    def said(self, *events: str) -> int:
        """How many lines of such events were logged since the beginning."""
        return sum(line.split()[4] in events for line in self._log_lines()[self._logged_before :])

    def log_is_short(self, lines: int = 60) -> None:
        """It names the cause, and not a thousand times."""
        worrying = [line for line in self._log_lines()[self._logged_before :] if line.split()[2] != "INFO"]
        assert len(worrying) <= lines, "\n".join(worrying[:80])

    def _run(self, *arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", READER, *arguments]
        self._readers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return self._readers[-1]

    def _sum(self, model: str) -> str:
        return hashlib.sha256((self.models / model / "model.bin").read_bytes()).hexdigest()

    def _log_lines(self) -> list[str]:
        """Date, time, level, module, event and what belongs to it."""
        daemons = [path for path in (self.mounted.work / "state" / "log").glob("*.log") if ".channel." not in path.name]
        return [line for path in daemons for line in path.read_text().splitlines() if line.startswith("20")]
