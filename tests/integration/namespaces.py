"""A private mount namespace in which a test sets up the machine it needs: /dev/fuse for everybody, an fuse.conf.

Nothing of it is seen outside, and all of its mounts go with it. Needs root.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.integration.processes import ENVIRONMENT, ROOT, eventually, runs

NOBODY = 65534
_SETUP = """
set -eu
python=$1 work=$2 device_mode=$3; shift 3
"$python" -I -S -c "$DETACH"
mknod "$work/fuse" c 10 229; chmod "$device_mode" "$work/fuse"; mount --bind "$work/fuse" /dev/fuse
mount --bind "$work/fuse.conf" /etc/fuse.conf
mkdir -p /run/tierfs; mount -t tmpfs -o mode=711 tmpfs /run/tierfs
# Where the interpreter lies in somebody's home, nobody else may run it: a home that shows it alone takes its place.
if [ $# -gt 0 ]; then
    hidden=$1; shift; number=0
    for path; do number=$((number + 1)); mkdir "$work/kept$number"; mount --rbind "$path" "$work/kept$number"; done
    mount -t tmpfs -o mode=755 tmpfs "$hidden"; number=0
    for path; do number=$((number + 1)); mkdir -p "$path"; mount --move "$work/kept$number" "$path"; done
fi
echo ready
read -r end || true
"""


# The mounts of other tests must not live on here. Not by umount(8), which looks at each before.
_DETACH = """
import ctypes
for line in reversed(open("/proc/self/mountinfo", "rb").read().splitlines()):
    if b" - fuse.tierfs " in line:
        ctypes.CDLL(None).umount2(line.split()[4], 2)
"""


class Namespace:
    """Use run() for commands in it. ``close`` ends every process that is in it."""

    def __init__(self, work: Path, *, fuse_conf: str = "", device_mode: str = "666") -> None:
        self.work = work
        (work / "fuse.conf").write_text(fuse_conf)
        (work / "run").mkdir()
        os.chown(work / "run", NOBODY, NOBODY)
        self.environment = {
            **ENVIRONMENT,
            "XDG_RUNTIME_DIR": str(work / "run"),
            "HOME": str(work),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = ["unshare", "-m", "--propagation", "private", "sh", "-c", _SETUP, "sh"]
        self._holder = subprocess.Popen(
            [*command, sys.executable, str(work), device_mode, *_hidden()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "DETACH": _DETACH},
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n", "the namespace could not be made"
        self._name = self._namespace_of(self._holder.pid)

    def command(self, *words: object, user: int = 0) -> list[str]:
        """What runs this command in the namespace as that user, without any capability if it is not root."""
        inside = ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", f"--wd={self.work}"]
        change = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"] if user else []
        return [*inside, *change, *map(str, words)]

    def run(
        self, *words: object, user: int = 0, check: bool = True, pass_fds: Sequence[int] = (), timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run one command to its end."""
        done = subprocess.run(
            self.command(*words, user=user),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=self.environment,
            pass_fds=pass_fds,
        )
        assert not check or done.returncode == 0, f"{words} ended with {done.returncode}: {done.stderr}{done.stdout}"
        return done

    def tierfs(self, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a tierfs command to its end."""
        return self.run(sys.executable, "-m", "tierfs.cli.main", *arguments, **options)

    def mounts(self) -> list[str]:
        """Where a tierfs is mounted in it."""
        lines = Path(f"/proc/{self._holder.pid}/mountinfo").read_text().splitlines()
        return [line.split()[4] for line in lines if " - fuse.tierfs " in line]

    def processes(self) -> dict[int, str]:
        """The processes in it, zombies too, by pid: state and command."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            pid = int(entry.name)
            try:
                if pid != self._holder.pid and self._namespace_of(pid) == self._name:
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    found[pid] = f"{state} {(entry / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()}"
            except OSError:
                continue
        return found

    def close(self) -> None:
        """Whatever happened: no process and no mount stays."""
        for pid in self.processes():
            for number in (signal.SIGKILL, signal.SIGCONT):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
        self._holder.kill()
        self._holder.communicate()
        eventually(lambda: not any(runs(pid) for pid in self.processes()), "the processes of the namespace have ended")

    @staticmethod
    def _namespace_of(pid: int) -> str:
        return os.readlink(f"/proc/{pid}/ns/mnt")


def _hidden() -> list[str]:
    """The directory nobody else may enter on the way to what a daemon runs, and what lies below it; else nothing."""
    needed = [Path(sys.base_prefix), Path(sys.prefix), ROOT]
    closed = {parent for path in needed for parent in path.parents if not parent.stat().st_mode & 0o001}
    if not closed:
        return []
    hidden = min(closed, key=lambda path: len(path.parts))
    below = [path for path in dict.fromkeys(needed) if hidden in path.parents]
    return [str(hidden), *(str(path) for path in below if not any(other in path.parents for other in below))]
