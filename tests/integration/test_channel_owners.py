"""Who owns a mount besides root's own channel: an unprivileged user, root for another user, a container's launcher.

Each test has a mount namespace of its own (namespaces.py), in which /dev/fuse is for everybody and /etc/fuse.conf is
the test's.
"""

import ctypes
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.namespaces import NOBODY, Namespace
from tests.integration.processes import eventually
from tests.integration.test_channel import build

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces and becomes other users: needs root"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed"),
]

BLOCK = 1 << 20
SIZE = 3 * BLOCK + 1234
NAMES = ("one.bin", "two.bin")


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("owners"), "plain")


@pytest.fixture
def work(program: Path) -> Iterator[Path]:
    """A directory that every user may enter: those of pytest are for their owner."""
    directory = Path(tempfile.mkdtemp(prefix="tierfs-owners-"))
    directory.chmod(0o755)
    shutil.copy(program, directory / "tierfs-channel")
    (directory / "models").mkdir(mode=0o755)
    for number, name in enumerate(NAMES):
        (directory / "models" / name).write_bytes(random.Random(number).randbytes(SIZE))
    (directory / "mnt").mkdir()
    (directory / "theirs").mkdir()
    os.chown(directory / "theirs", NOBODY, NOBODY)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def make_namespace(work: Path) -> Iterator[Callable[..., Namespace]]:
    made: list[Namespace] = []

    def make(**options: str) -> Namespace:
        made.append(Namespace(work, **options))
        made[-1].environment["TIERFS_CHANNEL_PROGRAM"] = str(work / "tierfs-channel")
        return made[-1]

    yield make
    for namespace in made:
        namespace.close()


class Mounted:
    """A mount in a namespace, by commands of one user."""

    def __init__(self, namespace: Namespace, *, user: int, options: str = "", extra: str = "") -> None:
        work = namespace.work
        self.namespace, self.user = namespace, user
        self.path = work / "mnt"
        self.name = str(self.path)
        if user:
            os.chown(self.path, user, user)
        self.config = work / "mount.toml"
        self.config.write_text(
            f'state_dir = "{work}/theirs/state"\n[source]\nurl = "dir:{work}/models"\nblock_size = "1MiB"\n'
            f'[warm]\npath = "{work}/theirs/warm"\ncapacity = "64MiB"\n[memory]\nlimit = "32MiB"\n'
            f"[mount]\n{options}\n{extra}"
        )

    def tierfs(self, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.namespace.tierfs(*words, user=self.user, check=check)

    def mount(self) -> None:
        self.tierfs("mount", self.config, self.path)

    def refused(self) -> str:
        """What a mount that must fail says; it leaves nothing behind."""
        done = self.tierfs("mount", self.config, self.path, check=False)
        assert done.returncode == 1, done.stdout
        eventually(lambda: not self.namespace.processes(), "no process is left")
        assert self.namespace.mounts() == []
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.tierfs("status", self.name, "--json").stdout)
        return answer

    def check_reads(self, *, user: int | None = None, path: Path | None = None) -> None:
        """Every byte of every file is right."""
        for number, name in enumerate(NAMES):
            place = (path or self.path) / name
            found = self.namespace.run("sha256sum", place, user=self.user if user is None else user).stdout.split()[0]
            assert found == hashlib.sha256(random.Random(number).randbytes(SIZE)).hexdigest(), place

    def kill_daemon(self) -> None:
        """And wait for the next one."""
        before = self.status()["daemon"]["pid"]
        os.kill(before, signal.SIGKILL)

        def there() -> bool:
            done = self.tierfs("status", self.name, "--json", check=False)
            return done.returncode == 0 and json.loads(done.stdout)["daemon"]["pid"] != before

        eventually(there, "another daemon answers", within_s=30)

    def restart(self) -> None:
        before = self.status()["daemon"]["pid"]
        self.tierfs("restart", self.name)
        assert self.status()["daemon"]["pid"] != before

    def unmount(self) -> None:
        """Nothing is left of it, no zombie either."""
        self.tierfs("unmount", self.name)
        eventually(lambda: not self.namespace.processes(), "no process is left")


def test_without_root_fusermount_mounts_and_all_but_passthrough_works(
    make_namespace: Callable[..., Namespace],
) -> None:
    namespace = make_namespace()
    mounted = Mounted(namespace, user=NOBODY, options="allow_other = false")
    mounted.mount()
    assert namespace.mounts() == [str(mounted.path)]
    status = mounted.status()
    assert status["mode"] == "channel" and '"auto"' in status["mode_reason"]
    assert not status["kernel"]["passthrough"] and "CAP_SYS_ADMIN" in status["kernel"]["passthrough_reason"]
    assert "CAP_SYS_ADMIN" in mounted.tierfs("status", mounted.path).stdout
    mounted.check_reads()
    mounted.kill_daemon()
    mounted.check_reads()
    mounted.restart()
    mounted.check_reads()
    channel = mounted.status()["channel"]
    assert (channel["passthrough_opens"], channel["bad_messages"]) == (0, 0)
    mounted.unmount()
    assert namespace.mounts() == []


def test_without_root_a_killed_channel_is_healed_by_the_next_mount(make_namespace: Callable[..., Namespace]) -> None:
    namespace = make_namespace()
    mounted = Mounted(namespace, user=NOBODY, options="allow_other = false")
    mounted.mount()
    os.kill(mounted.status()["channel"]["pid"], signal.SIGKILL)
    eventually(lambda: not namespace.processes(), "the daemon ends with its channel")
    assert "not connected" in namespace.run("ls", mounted.path, user=NOBODY, check=False).stderr
    mounted.mount()
    mounted.check_reads()
    mounted.unmount()
    assert namespace.mounts() == []


@pytest.mark.parametrize("mode", ["channel", "direct"])
def test_allow_other_needs_the_word_of_fuse_conf(make_namespace: Callable[..., Namespace], mode: str) -> None:
    mounted = Mounted(make_namespace(), user=NOBODY, options=f'mode = "{mode}"')
    words = mounted.refused()
    assert "user_allow_other" in words and "/etc/fuse.conf" in words and "mount.allow_other" in words
    if mode == "channel":
        assert "only allowed if" in words, "these are not the words of fusermount3"
        (mounted.namespace.work / "fuse.conf").write_text("user_allow_other\n")
        mounted.mount()
        mounted.check_reads(user=0)


def test_fusermount_says_why_it_does_not_mount(make_namespace: Callable[..., Namespace]) -> None:
    mounted = Mounted(make_namespace(), user=NOBODY, options="allow_other = false")
    os.chown(mounted.path, 0, 0)
    assert "no write access" in mounted.refused()


def test_a_closed_dev_fuse_is_one_clear_error(make_namespace: Callable[..., Namespace]) -> None:
    mounted = Mounted(make_namespace(device_mode="600"), user=NOBODY, options="allow_other = false")
    assert "/dev/fuse cannot be opened: Permission denied" in mounted.refused()
