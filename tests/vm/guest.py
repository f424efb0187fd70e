"""What tests and jobs use inside the guest: where its devices are, cutting the power, and a real mount.

Python starts slowly on an emulated processor (ten seconds for one `tierfs` command), so that a mount is made and asked
by the functions behind the commands, in the process of the test; only daemon and server are processes of their own.
"""

import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.vm.qemu import CUT_BYTE, ROOT
from tierfs.cli.mount import mount, unmount
from tierfs.control import registry
from tierfs.control.socket import ask

PMEM = Path("/mnt/pmem")
NVME = Path("/mnt/nvme")
SHARE = Path("/share")
BLOCK_BYTES = 4 << 20
ANSWER_S = 180.0
MOUNT_S = 200.0
SERVER = "127.0.0.1:7411"
RDMA_HOST = "10.77.0.1"  # of rxe0; what is sent there never leaves the guest, but goes through the device
RXE0 = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters")


def cut_power() -> None:
    """End QEMU at this very instruction, with nothing flushed. Does not return."""
    port = os.open("/dev/port", os.O_WRONLY)
    os.pwrite(port, bytes([CUT_BYTE]), 0xF4)
    raise AssertionError("the power is still on")


def write_model(path: Path, size_bytes: int, seed: int) -> bytes:
    """Make a file of reproducible bytes, and return them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = random.Random(seed).randbytes(size_bytes)
    path.write_bytes(content)
    return content


def write_token(directory: Path) -> Path:
    """A file with the token that servers of these tests have."""
    token = directory / "token"
    token.write_text("a token of the test machine only\n")
    return token


def rdma_packets() -> int:
    """How many packets rxe0 has sent and received so far."""
    return sum(int((RXE0 / name).read_text()) for name in ("sent_pkts", "rcvd_pkts"))


def loopback_bytes() -> int:
    """What TCP between processes of the guest has carried so far, whatever the address."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise AssertionError("there is no lo")


def drop_caches() -> None:
    """Forget clean pages."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


class Mounted:
    """A mount, warm on the NVMe disk and hot on the NVDIMM; a context manager that unmounts it.

    ``hot``, ``warm`` and ``source`` are more lines of those tables; without ``hot`` (``warm`` None) there is no such
    tier.
    ``directory`` gets the mountpoint and the configuration; ``name`` tells its tiers and its state, on the devices,
    from those of others, and finds them again after a power cut.
    """

    def __init__(
        self,
        url: str,
        directory: Path,
        name: str,
        *,
        hot: str | None = None,
        warm: str | None = "",
        source: str = "",
        mode: str = "channel",
        timeout: str = "120s",
    ) -> None:
        self.path = directory / "mnt"
        self.hot = PMEM / name / "hot"
        self.warm = NVME / name / "warm"
        self._config = directory / "mount.toml"
        self.path.mkdir()
        self.state = NVME / name / "state"
        self._config.write_text(
            f'state_dir = "{self.state}"\n'
            f'[source]\nurl = "{url}"\ntimeout = "{timeout}"\n{source}\n'
            + (f'[hot]\npath = "{self.hot}"\n{hot}\n' if hot is not None else "")
            + (f'[warm]\npath = "{self.warm}"\n{warm}\n' if warm is not None else "")
            + f'[memory]\nlimit = "96MiB"\n[mount]\nmode = "{mode}"\n'
        )

    def __enter__(self) -> "Mounted":
        # A child, as the command is a process of its own: the daemon must not be a child of the test.
        command = multiprocessing.get_context("fork").Process(target=mount, args=(self._config, str(self.path)))
        command.start()
        command.join(MOUNT_S)
        assert command.exitcode == 0, f"mount ended with {command.exitcode}: {self.log()}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            print(self.log())
        unmount(str(self.path))

    def ask(self, command: str, **arguments: object) -> dict[str, Any]:
        """Ask the daemon; its last answer."""
        answers = list(ask(registry.find(str(self.path)), command, timeout_s=ANSWER_S, **arguments))
        return answers[-1] if answers else {}

    def status(self) -> dict[str, Any]:
        """What `tierfs status --json` prints."""
        return self.ask("status")

    def log(self) -> str:
        """The daemon's log."""
        return "".join(path.read_text() for path in (self.state / "log").glob("*"))


class Server:
    """`tierfs serve` of one directory; a context manager that ends it. A mount waits by itself until it answers.

    ``host`` is the address to serve at; one that is not this machine's own needs a token, and ``source`` has the lines
    that a mount needs for it.
    """

    def __init__(self, exported: Path, state: Path, host: str | None = None) -> None:
        address = SERVER if host is None else f"{host}:7411"
        self.url = f"tierfs://{address}/"
        self.source = ""
        command = [sys.executable, "-m", "tierfs.cli.main", "serve", str(exported), "--listen", f"tcp://{address}"]
        if host is not None:
            token = write_token(state.parent)
            self.source = f'token_file = "{token}"'
            command += ["--token-file", str(token)]
        self._process = subprocess.Popen([*command, "--state-dir", str(state)], cwd=ROOT)
        self.pid = self._process.pid

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()


def resident_kib(path: Path) -> int:
    """The Rss of this process's maps of that file, from smaps: pages of persistent memory do not count as any."""
    total, counting = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            counting = line.endswith(f" {path}")
        elif counting and words[0] == "Rss:":
            total += int(words[1])
    return total


def eventually(condition: Callable[[], bool], what: str, within_s: float = 120.0) -> None:
    """Wait until something is so; fail with ``what`` otherwise."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.1)
