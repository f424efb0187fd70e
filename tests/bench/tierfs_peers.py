"""tierfs itself, as the benchmark sees it: the commands a user would type, and ``status --json``.

Called by main.py beside the peers.  Each class is one state of the tiers: the file in warm, in hot, or in neither.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import data
from peers import Peer, Setting, files_below, fill_by_reading
from processes import PeerFailed, Workspace, find_daemons, identify, last_line, mark, unmount
from watching import cpu_seconds

MIB = 1 << 20


class Commands:
    """Runs ``tierfs …`` of this checkout."""

    def __init__(self, setting: Setting) -> None:
        self.work = setting.work
        if not (setting.checkout / "tierfs/cli/main.py").exists():
            raise PeerFailed("this checkout has no tierfs command")
        paths = [str(setting.checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {"PYTHONPATH": os.pathsep.join(paths)}
        self.command = [sys.executable, "-m", "tierfs.cli.main"]

    def run(self, mount: Path, *arguments: str, timeout_s: float = 60) -> str:
        """Run one on behalf of `mount` to its end and return what it printed. Raises PeerFailed."""
        environment = {**self.environment, **mark(mount)}
        return self.work.run([*self.command, *arguments], timeout_s=timeout_s, environment=environment).stdout

    def spawn(self, *arguments: str, log: str) -> int:
        """Start one that stays."""
        return self.work.spawn([*self.command, *arguments], log=log, environment=self.environment)


class Server:
    """``tierfs serve`` of one directory; shared by the peers that read from it."""

    def __init__(self, work: Workspace, directory: Path, *, name: str) -> None:
        self.work, self.directory, self.name = work, directory, name
        self._pid: int | None = None
        self._users = 0
        self.url = ""

    def start(self, commands: Commands) -> None:
        """Start it for the first user and wait until it has scanned and digested. Raises PeerFailed."""
        self._users += 1
        if self._users > 1:
            if not self.url:
                raise PeerFailed("tierfs serve could not be started")
            return
        state, log = self.work.path(f"{self.name}-state"), f"{self.name}.log"
        ready = state / "ready"
        self._pid = commands.spawn(
            "serve",
            str(self.directory),
            "--listen",
            "tcp://127.0.0.1:0",
            "--state-dir",
            str(state / "state"),
            "--ready-file",
            str(ready),
            log=log,
        )
        deadline = monotonic() + 180
        while not (ready.exists() and ready.read_text().strip()):
            if identify(self._pid) is None:
                raise PeerFailed(f"tierfs serve ended: {last_line(self.work.directory / log)}")
            if monotonic() > deadline:
                raise PeerFailed("tierfs serve was not ready after 180 s")
            sleep(0.05)
        self.url = ready.read_text().strip()
        wait_until_idle(self._pid)

    def stop(self) -> None:
        """End it with its last user."""
        self._users -= 1
        if self._users == 0 and self._pid is not None:
            self.work.end([self._pid])


def wait_until_idle(pid: int) -> None:
    """Return when a process has used little CPU time for a second: its background work is done. Or after a minute."""
    give_up = monotonic() + 60
    quiet_since, before = monotonic(), cpu_seconds(pid)
    while monotonic() - quiet_since < 1.0 and monotonic() < give_up:
        sleep(0.25)
        now = cpu_seconds(pid)
        if now - before > 0.05:
            quiet_since = monotonic()
        before = now


class Tierfs(Peer):
    """Common to all states: one mount with its own tiers."""

    has_hot = False
    # Options of `tierfs mount`; the rest is as shipped.
    mount_options: tuple[str, ...] = ()

    def __init__(self, setting: Setting, server: Server) -> None:
        super().__init__(setting)
        self.server = server
        self.commands: Commands | None = None
        self.directory = self.work.path(self.name.replace(" ", "-"))
        self.mount = self.directory / "mount"
        self.warm = self.directory / "warm"
        self.hot = self.work.memory_path(self.name.replace(" ", "-")) if self.has_hot else None
        self._pids: list[int] = []  # the daemon and, in channel mode, its channel

    @property
    def file(self) -> Path:
        return self.mount / data.LARGE_NAME

    def cold_files(self) -> list[Path]:
        return [*self.models, self.setting.large.path, *files_below(self.warm)]

    def pids(self) -> list[int]:
        return self._pids

    def memory_tier(self) -> Path | None:
        return self.hot

    def memory_limit_bytes(self) -> int | None:
        limit = self.status().get("memory", {}).get("limit_bytes")
        return limit if isinstance(limit, int) else None

    def counters(self) -> dict[str, float]:
        status = self.status()
        hits = {f"{name}_hit_blocks": tier["hit_blocks"] for name, tier in status["tiers"].items()}
        memory_hits = status["memory"].get("hit_blocks", 0)
        return {"fetched_bytes": status["source"]["fetched_bytes"], "memory_hit_blocks": memory_hits, **hits}

    def start(self) -> None:
        self.commands = Commands(self.setting)
        self.server.start(self.commands)

    def stop(self) -> None:
        self.unmount_export()
        if self.commands is not None:
            self.server.stop()

    def tierfs(self, *arguments: str, timeout_s: float = 60) -> str:
        """Run a command on behalf of this mount."""
        assert self.commands is not None, "started first"
        return self.commands.run(self.mount, *arguments, timeout_s=timeout_s)

    def status(self) -> dict[str, Any]:
        """``tierfs status --json`` of the mount."""
        answer = self.tierfs("status", str(self.mount), "--json", timeout_s=30)
        document: dict[str, Any] = json.loads(answer)
        return document

    def config(self) -> Path:
        """Write the configuration: tiers with room for the file, the rest as shipped."""
        self.warm.mkdir(exist_ok=True)
        room = f"{(2 * self.setting.large.size_bytes + 2 * data.CHASER_BYTES + (256 << 20)) // MIB}MiB"
        lines = [
            f'state_dir = "{self.directory / "state"}"',
            "[source]",
            f'url = "{self.server.url}"',
            "[warm]",
            f'path = "{self.warm}"',
            f'capacity = "{room}"',
        ]
        if self.hot is not None:
            lines += ["[hot]", f'path = "{self.hot}"', f'capacity = "{room}"']
        path = self.directory / "tierfs.toml"
        path.write_text("\n".join([*lines, self.setting.config_extra]) + "\n")
        return path

    def mount_export(self) -> float:
        """``tierfs mount``; returns the seconds it took."""
        config = self.config()
        self.mount.mkdir(exist_ok=True)
        start = monotonic()
        try:
            self.tierfs("mount", str(config), str(self.mount), *self.mount_options)
        finally:
            for pid in find_daemons(self.mount):
                self.work.record(pid)
        took_s = monotonic() - start
        status = self.status()
        self._pids = [int(status["daemon"]["pid"])]
        if status["mode"] == "channel":
            self._pids.append(int(status["channel"]["pid"]))
        for pid in self._pids:
            self.work.record(pid)
        return took_s

    def unmount_export(self) -> None:
        """``tierfs unmount``; a daemon that does not go is ended."""
        if self.commands is None:
            return
        pids = self.pids() or find_daemons(self.mount)
        try:
            if pids:
                self.tierfs("unmount", str(self.mount), timeout_s=20)
        except PeerFailed:
            pass  # what is left goes the hard way
        finally:
            unmount(self.mount)
            self.work.end(pids)
            self._pids = []

    def require_resident(self, tier: str) -> None:
        """Raises PeerFailed unless the tier holds the whole file."""
        used = self.status()["tiers"][tier]["used_bytes"]
        if used < self.setting.large.size_bytes:
            raise PeerFailed(f"{tier} holds {used} of {self.setting.large.size_bytes} bytes after tierfs warm")


class TierfsWarm(Tierfs):
    """The whole file in the warm tier, on the same disk."""

    name = "tierfs warm"

    def start(self) -> None:
        super().start()
        self.mount_export()
        self.tierfs("warm", *map(str, self.models), timeout_s=300)
        self.require_resident("warm")

    def prepare(self) -> None:
        # A new daemon for every run: blocks that the last one kept in its own memory are not cold.
        self.unmount_export()
        self.mount_export()
        self.require_resident("warm")

    def objection(self, counted: dict[str, float]) -> str:
        return f"{counted['fetched_bytes']:,.0f} bytes came from the source" if counted["fetched_bytes"] else ""


class TierfsWarmDirect(TierfsWarm):
    """The same with every byte through Python: what channel mode is compared with."""

    name = "tierfs warm, direct mode"
    mount_options = ("--set", "mount.mode=direct")


class TierFile(Peer):
    """The very objects that `TierfsWarm` opens, past tierfs: what a passthrough open can reach at best.

    No copy of them: where an object lies on the disk, and in how many pieces, decides its speed as well.
    """

    name = "tier file"

    @property
    def file(self) -> Path:
        return self._object(self.setting.large.path)

    @property
    def gguf(self) -> Path:
        return self._object(self.setting.gguf)

    def _object(self, path: Path) -> Path:
        size_bytes = path.stat().st_size
        objects = files_below(self.work.path(TierfsWarm.name.replace(" ", "-")) / "warm" / "objects")
        for file, length in objects.items():
            if length == size_bytes:
                return file
        raise PeerFailed(f"{TierfsWarm.name} is not there, or has no object of {size_bytes} bytes")

    def start(self) -> None:
        _ = self.file


class TierfsPartly(Tierfs):
    """The first three quarters of the file in the warm tier, so that no open of it is passthrough.

    Only the first half is read then: what readahead plans beyond it is here, too.
    """

    name = "tierfs partly warm"

    def start(self) -> None:
        super().start()
        self.mount_export()
        with self.file.open("rb", buffering=0) as file:
            while file.tell() < 3 * self.setting.large.size_bytes // 4 and file.read(4 << 20):
                pass
        deadline = monotonic() + 60
        while self.status()["tiers"]["warm"]["queued_bytes"]:
            if monotonic() > deadline:
                raise PeerFailed("the warm tier had not written what was read after a minute")
            sleep(0.2)
        used_bytes = self.status()["tiers"]["warm"]["used_bytes"]
        if not 3 / 4 <= used_bytes / self.setting.large.size_bytes < 1:
            raise PeerFailed(f"{used_bytes} of {self.setting.large.size_bytes} bytes are warm: not part of the file")

    def prepare(self) -> None:
        self.unmount_export()
        self.mount_export()

    def objection(self, counted: dict[str, float]) -> str:
        return f"{counted['fetched_bytes']:,.0f} bytes came from the source" if counted["fetched_bytes"] else ""


class TierfsPartlyDirect(TierfsPartly):
    """The same with every byte through Python."""

    name = "tierfs partly warm, direct mode"
    mount_options = ("--set", "mount.mode=direct")


class MemoryFile(Peer):
    """A copy of the file on a tmpfs: what a passthrough open of the hot tier can reach at best."""

    name = "tmpfs file"

    @property
    def file(self) -> Path:
        return self.work.memory_path("tmpfs-file") / data.LARGE_NAME

    def start(self) -> None:
        shutil.copyfile(self.setting.large.path, self.file)

    def stop(self) -> None:
        self.file.unlink(missing_ok=True)

    def cold_files(self) -> list[Path]:
        return []


class TierfsHot(Tierfs):
    """The whole file in the hot tier, on a tmpfs.

    A new daemon would have to fill it anew.  So the daemon's own memory, which it asks before any tier, is made small
    and is filled with something else.
    """

    name = "tierfs hot"
    has_hot = True
    mount_options = ("--set", f"memory.limit={data.CHASER_BYTES // 2 // MIB}MiB")

    def cold_files(self) -> list[Path]:
        # Under passthrough the file's pages are the tier's own, which are in memory by design.
        return [] if self.status().get("kernel", {}).get("passthrough") is True else [self.file]

    def start(self) -> None:
        super().start()
        self.mount_export()
        self.tierfs("warm", str(self.file), "--tier", "hot", timeout_s=300)
        self.require_resident("hot")
        # What has been read to its end is the first to leave the daemon's memory.
        fill_by_reading(self.file)
        fill_by_reading(self.mount / data.CHASER_NAME)

    def objection(self, counted: dict[str, float]) -> str:
        if self.status()["kernel"]["passthrough"]:
            return "bytes came from the source" if counted["fetched_bytes"] else ""
        elsewhere = {name: value for name, value in counted.items() if name != "hot_hit_blocks" and value}
        if elsewhere or not counted["hot_hit_blocks"]:
            return "not from the hot tier alone: " + ", ".join(f"{name} {value:g}" for name, value in counted.items())
        return ""


class TierfsCold(Tierfs):
    """Empty tiers for every run; the bytes come from `tierfs serve` over TCP on loopback."""

    name = "tierfs cold"

    def prepare(self) -> None:
        self.unmount_export()
        shutil.rmtree(self.warm, ignore_errors=True)
        self.mount_export()

    def finish(self) -> None:
        self.unmount_export()
        shutil.rmtree(self.warm, ignore_errors=True)


class TierfsTree(Tierfs):
    """The directory of many small files."""

    name = "tierfs directory"

    @property
    def file(self) -> Path:
        return self.mount

    def cold_files(self) -> list[Path]:
        return []

    def start(self) -> None:
        super().start()
        self.mount_export()

    def remount(self) -> float:
        """Unmount, mount; returns the seconds until the mount command returned and a first entry was listed."""
        self.unmount_export()
        took_s = self.mount_export()
        start = monotonic()
        with os.scandir(self.mount) as entries:
            next(entries)
        return took_s + monotonic() - start
