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
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.namespaces import NOBODY, Namespace
from tests.integration.processes import ROOT, eventually
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

    def kill_daemon(self, *, seen: Path | None = None) -> None:
        """And wait for the next one, as a reader does; ``seen``: where the mount is outside of the namespace."""
        before = self.status()["daemon"]["pid"]
        os.kill(before, signal.SIGKILL)
        name = f"not-there-{before}"  # which no cache of the kernel knows
        if seen is not None:
            subprocess.run(["stat", str(seen / name)], capture_output=True, timeout=60, check=False)
        else:
            self.namespace.run("stat", self.path / name, user=self.user, check=False)
        assert self.status()["daemon"]["pid"] != before

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


def test_root_of_a_user_namespace_mounts_without_passthrough_and_is_told_why(
    make_namespace: Callable[..., Namespace],
) -> None:
    namespace = make_namespace()
    mounted = Mounted(namespace, user=0)
    os.chown(namespace.work / "theirs", 0, 0)
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-euc"]  # as rootless containers are
    if namespace.run(*inside, "true", check=False).returncode != 0:
        pytest.skip("this kernel gives no user namespaces")
    tierfs = f"{sys.executable} -m tierfs.cli.main"
    script = f"{tierfs} mount {mounted.config} {mounted.path}; {tierfs} warm {mounted.path} >&2"
    script += f"; sha256sum {mounted.path}/{NAMES[0]} >&2; {tierfs} status --json {mounted.path}"
    done = namespace.run(*inside, f"{script}; {tierfs} unmount {mounted.path}")
    status = json.loads(done.stdout)
    assert status["mode"] == "channel"
    assert not status["kernel"]["passthrough"] and "user namespace" in status["kernel"]["passthrough_reason"]
    assert hashlib.sha256(random.Random(0).randbytes(SIZE)).hexdigest() in done.stderr
    assert status["channel"]["refused_opens"] == 0


# -- root's channel, and a daemon of another user ------------------------------------------------------------------


def rights(pid: int) -> dict[str, str]:
    """Of every thread of the process, which must agree: the lines of proc_pid_status(5) that say what it may."""
    names = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs")
    threads = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        threads.append({name: " ".join(lines[name].split()) for name in names})
    assert all(thread == threads[0] for thread in threads), threads
    return threads[0]


KILL, SETGID, SETUID, SYS_ADMIN = 5, 6, 7, 21  # capability(7)
NONE = "0" * 16


def test_the_daemon_of_a_user_has_no_rights_and_the_channel_few(make_namespace: Callable[..., Namespace]) -> None:
    mounted = Mounted(make_namespace(), user=0, options='user = "nobody"')
    mounted.mount()
    kept = sum(1 << bit for bit in (KILL, SETGID, SETUID, SYS_ADMIN))

    def check() -> None:
        status = mounted.status()
        daemon, channel = rights(status["daemon"]["pid"]), rights(status["channel"]["pid"])
        assert daemon["Uid"] == daemon["Gid"] == " ".join([str(NOBODY)] * 4)
        assert [daemon[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")] == [NONE] * 5
        assert daemon["NoNewPrivs"] == "1"
        assert channel["CapEff"] == channel["CapPrm"] == f"{kept:016x}"
        assert channel["CapInh"] == channel["CapAmb"] == channel["CapBnd"] == NONE

    check()
    mounted.kill_daemon()
    check()  # the next daemon as the first one
    mounted.check_reads(user=1)
    mounted.unmount()


def test_the_daemon_of_a_user_gives_passthrough_of_its_own_files_alone(
    make_namespace: Callable[..., Namespace],
) -> None:
    namespace = make_namespace()
    mounted = Mounted(namespace, user=0, options='user = "nobody"\nmetadata_ttl = "0s"')
    (namespace.work / "theirs").chmod(0o700)  # as homes are: root without its capabilities may not look into it
    mounted.mount()
    assert mounted.status()["mode"] == "channel"
    if not mounted.status()["kernel"]["passthrough"]:
        pytest.skip("this kernel has no FUSE passthrough")
    mounted.tierfs("warm", mounted.path)
    mounted.check_reads()
    assert mounted.status()["channel"]["passthrough_opens"] == len(NAMES)
    mounted.restart()
    for path in (namespace.work / "theirs" / "warm").rglob("*"):
        if path.is_file() and path.stat().st_size == SIZE:
            os.chown(path, 1, 1)
            path.chmod(0o666)
    mounted.check_reads()
    channel = mounted.status()["channel"]
    assert channel["passthrough_opens"] == len(NAMES)  # the channel counts over all its daemons: no more
    assert channel["bad_messages"] == 0
    log = "".join(path.read_text() for path in (namespace.work / "theirs").rglob("*.log"))
    assert "not a regular file of the daemon's user" in log


def test_the_next_daemon_of_a_user_has_its_groups_and_directories(make_namespace: Callable[..., Namespace]) -> None:
    namespace = make_namespace()
    mounted = Mounted(namespace, user=0, options='user = "nobody"')
    groups = namespace.work / "group"
    groups.write_text(Path("/etc/group").read_text() + "tierfs-readers:x:4242:nobody\n")
    namespace.run("mount", "--bind", groups, "/etc/group")
    shutil.rmtree(namespace.work / "theirs")  # made, and given to the user, at the first start
    os.chown(namespace.work / "models", 0, 4242)
    (namespace.work / "models").chmod(0o750)
    mounted.mount()
    assert rights(mounted.status()["daemon"]["pid"])["Groups"].split() == ["4242", str(NOBODY)]
    text = mounted.config.read_text()
    elsewhere = namespace.work / "elsewhere" / "warm"  # where that user could make nothing
    mounted.config.write_text(text.replace(str(namespace.work / "theirs" / "warm"), str(elsewhere)))
    mounted.restart()
    assert elsewhere.stat().st_uid == NOBODY
    mounted.config.write_text(text.replace('"nobody"', '"daemon"'))
    before = mounted.status()["daemon"]["pid"]
    assert "mount.user" in mounted.tierfs("restart", mounted.path, check=False).stderr
    assert mounted.status()["daemon"]["pid"] == before
    mounted.unmount()


def test_what_root_left_is_given_to_the_user(make_namespace: Callable[..., Namespace]) -> None:
    namespace = make_namespace()
    mounted = Mounted(namespace, user=0)
    shutil.rmtree(namespace.work / "theirs")
    mounted.mount()
    daemon, channel = rights(mounted.status()["daemon"]["pid"]), rights(mounted.status()["channel"]["pid"])
    assert channel["CapEff"] == channel["CapPrm"] == f"{1 << SYS_ADMIN:016x}"
    assert daemon["CapEff"] == daemon["CapBnd"] == channel["CapBnd"]
    assert not int(daemon["CapBnd"], 16) & sum(1 << bit for bit in (KILL, SETGID, SETUID, SYS_ADMIN))
    mounted.tierfs("warm", mounted.path)
    os.kill(mounted.status()["channel"]["pid"], signal.SIGKILL)
    eventually(lambda: not namespace.processes(), "the daemon ends with its channel")
    mounted.config.write_text(mounted.config.read_text() + 'user = "nobody"\n')
    mounted.mount()
    status = mounted.status()
    assert rights(status["daemon"]["pid"])["CapBnd"] == NONE
    assert status["models"][0]["resident_bytes"] == status["models"][0]["bytes"] > 0, "what was warm is not"
    mounted.check_reads()
    mounted.unmount()
    mounted.config.write_text(mounted.config.read_text().replace('user = "nobody"', ""))
    mounted.mount()  # and root again
    mounted.check_reads()
    mounted.unmount()


@pytest.mark.parametrize(
    ("hidden", "words"),
    [("mount.toml", "mount.toml"), ("token", "source.token_file"), ("models", "models"), ("log", "log.file")],
)
def test_what_the_user_may_not_read_is_one_clear_error(
    make_namespace: Callable[..., Namespace], hidden: str, words: str
) -> None:
    namespace = make_namespace()
    mounted = Mounted(namespace, user=0, options='user = "nobody"')
    if hidden == "token":
        (namespace.work / "token").write_text("secret")
        url = f'"dir:{namespace.work}/models"'
        text = mounted.config.read_text().replace(
            url, f'"tierfs://127.0.0.1:9/"\ntoken_file = "{namespace.work}/token"'
        )
        mounted.config.write_text(text.replace('block_size = "1MiB"', ""))
    if hidden == "log":
        (namespace.work / "log").mkdir()
        mounted.config.write_text(mounted.config.read_text() + f'[log]\nfile = "{namespace.work}/log/x.log"\n')
    mounted.config.write_text(mounted.config.read_text().replace("[source]", '[source]\ntimeout = "1s"'))
    (namespace.work / hidden).chmod(0o700 if hidden == "models" else 0o600)
    said = mounted.refused()
    assert words in said and "the user nobody" in said, said
    assert "Permission denied" in said or "not readable" in said, said


def test_a_user_who_may_not_run_the_daemon_is_one_clear_error(make_namespace: Callable[..., Namespace]) -> None:
    namespace = make_namespace()
    mounted = Mounted(namespace, user=0, options='user = "nobody"')
    (namespace.work / "private").mkdir(mode=0o700)
    python = namespace.work / "private" / "python"
    python.symlink_to(sys.executable)
    namespace.environment["PYTHONPATH"] += f":{sysconfig.get_path('purelib')}"
    done = namespace.run(python, "-m", "tierfs.cli.main", "mount", mounted.config, mounted.path, check=False)
    assert done.returncode == 1
    assert "cannot be run as user 65534: Permission denied" in done.stderr, done.stderr


# -- a mount that somebody else has made ------------------------------------------------------------------------------


class Launcher:
    """The privileged side: it opens /dev/fuse, mounts in the test's own namespace, and hands the descriptor over."""

    def __init__(self, path: Path, *, flags: int = 1 | 2 | 4) -> None:  # MS_RDONLY, MS_NOSUID, MS_NODEV
        self.path = path
        self.descriptor = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        self._libc = ctypes.CDLL(None, use_errno=True)
        options = f"fd={self.descriptor},rootmode=40000,user_id={NOBODY},group_id={NOBODY},allow_other"
        if self._libc.mount(b"models", os.fsencode(path), b"fuse.tierfs", flags, options.encode()):
            raise OSError(ctypes.get_errno(), "mount(2)")

    def hand_over(self) -> None:
        """The process has its own copy: with this one, the mount would outlive it and hang."""
        os.close(self.descriptor)
        self.descriptor = -1

    def unmount(self) -> None:
        self._libc.umount2(os.fsencode(self.path), 2)
        if self.descriptor >= 0:
            self.hand_over()


@pytest.fixture
def launch(work: Path) -> Iterator[Callable[..., Launcher]]:
    """launch(name, ...) mounts on a directory of that name; unmounted afterwards."""
    made: list[Launcher] = []

    def make(name: str = "seen", **options: int) -> Launcher:
        (work / name).mkdir()
        made.append(Launcher(work / name, **options))
        return made[-1]

    yield make
    for launcher in made:
        launcher.unmount()


def digest(path: Path) -> str:
    """As a reader outside of the container sees it."""
    done = subprocess.run(["sha256sum", str(path)], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.split()[0]


def check_reads_at(path: Path) -> None:
    for number, name in enumerate(NAMES):
        assert digest(path / name) == hashlib.sha256(random.Random(number).randbytes(SIZE)).hexdigest()


def start(mounted: Mounted, launcher: Launcher, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """`tierfs mount CONFIG /dev/fd/N` in the container, by a user without any right."""
    descriptor = launcher.descriptor
    return mounted.namespace.tierfs(
        "mount", mounted.config, f"/dev/fd/{descriptor}", *words, user=mounted.user, pass_fds=[descriptor], check=check
    )


def opened_devices(pid: int) -> int:
    """How many /dev/fuse a process has open."""
    directory = f"/proc/{pid}/fd"
    return [os.readlink(f"{directory}/{number}") for number in os.listdir(directory)].count("/dev/fuse")


def ended(path: Path) -> bool:
    done = subprocess.run(["ls", str(path)], capture_output=True, text=True, timeout=30, check=False)
    return "not connected" in done.stderr


def test_a_user_without_rights_serves_a_mount_that_somebody_else_made(
    make_namespace: Callable[..., Namespace], launch: Callable[..., Launcher]
) -> None:
    mounted = Mounted(make_namespace(), user=NOBODY)
    launcher = launch()  # after the namespace: it is not seen there
    early = subprocess.Popen(["sha256sum", str(launcher.path / NAMES[0])], stdout=subprocess.PIPE, text=True)
    start(mounted, launcher)
    mounted.name = f"/dev/fd/{launcher.descriptor}"
    known = "fuse_connection" in Path(f"/proc/self/fdinfo/{launcher.descriptor}").read_text()  # since Linux 6.16
    launcher.hand_over()
    out, _ = early.communicate(timeout=30)  # it asked before there was anybody to answer, the INIT included
    assert out.split()[0] == hashlib.sha256(random.Random(0).randbytes(SIZE)).hexdigest()
    check_reads_at(launcher.path)
    status = mounted.status()
    assert (status["mode"], status["mountpoint"]) == ("channel", mounted.name)
    assert "somebody else has mounted" in status["mode_reason"]
    assert "CAP_SYS_ADMIN" in status["kernel"]["passthrough_reason"]
    assert mounted.tierfs("status").stdout.startswith(f"{mounted.name}  pid ")
    mounted.tierfs("warm", f"{mounted.name}/{NAMES[1]}")
    assert (status["kernel"]["read_ahead_bytes"] > 0) == known
    assert opened_devices(status["channel"]["pid"]) == 2
    assert opened_devices(status["daemon"]["pid"]) == 0
    mounted.kill_daemon(seen=launcher.path)
    check_reads_at(launcher.path)
    mounted.restart()
    check_reads_at(launcher.path)
    mounted.unmount()
    assert ended(launcher.path)
    assert f" {launcher.path} " in Path("/proc/self/mountinfo").read_text()


def test_the_launcher_unmounts_and_the_channel_ends(
    make_namespace: Callable[..., Namespace], launch: Callable[..., Launcher]
) -> None:
    launcher = launch(flags=2 | 4)  # forgot MS_RDONLY: files stay as they are all the same
    mounted = Mounted(make_namespace(), user=NOBODY)
    start(mounted, launcher, "--name", "/models")
    for words in (["truncate", "-s", "1", NAMES[0]], ["rm", "-f", NAMES[0]], ["touch", "new"], ["mkdir", "new"]):
        done = subprocess.run(words, cwd=launcher.path, capture_output=True, timeout=30, check=False)
        assert done.returncode != 0, words
    check_reads_at(launcher.path)
    launcher.unmount()
    eventually(lambda: not mounted.namespace.processes(), "no process is left")
    assert "no tierfs mounts" in mounted.tierfs("status").stdout


def test_a_given_mount_in_direct_mode(
    make_namespace: Callable[..., Namespace], launch: Callable[..., Launcher]
) -> None:
    launcher = launch()
    mounted = Mounted(make_namespace(device_mode="600"), user=NOBODY, options='mode = "direct"')
    start(mounted, launcher, "--name", "/models")
    launcher.hand_over()
    mounted.name = "/models"
    check_reads_at(launcher.path)
    assert mounted.status()["mode"] == "direct"
    assert any("whoever has mounted" in note for note in mounted.status()["kernel"]["notes"])
    mounted.unmount()
    assert ended(launcher.path)


def test_in_the_foreground_the_descriptor_is_the_channels(
    make_namespace: Callable[..., Namespace], launch: Callable[..., Launcher]
) -> None:
    launcher = launch()
    mounted = Mounted(make_namespace(device_mode="600"), user=NOBODY)
    tierfs = [sys.executable, "-m", "tierfs.cli.main", "mount", mounted.config, f"/dev/fd/{launcher.descriptor}"]
    command = mounted.namespace.command(*tierfs, "--foreground", "--name", "/models", user=NOBODY)
    with subprocess.Popen(
        command, env=mounted.namespace.environment, pass_fds=[launcher.descriptor], stderr=subprocess.PIPE, text=True
    ) as channel:
        launcher.hand_over()
        check_reads_at(launcher.path)
        mounted.name = "/models"
        assert mounted.status()["channel"]["pid"] == channel.pid
        assert opened_devices(channel.pid) == 1  # a container without /dev/fuse cannot clone it
        channel.terminate()  # as a container is ended
        channel.communicate(timeout=20)
        assert channel.returncode == 0
    assert ended(launcher.path)
    assert not mounted.namespace.processes()
    assert "no tierfs mounts" in mounted.tierfs("status").stdout


def test_a_daemon_that_cannot_start_on_a_given_mount_is_not_started_again(
    make_namespace: Callable[..., Namespace], launch: Callable[..., Launcher]
) -> None:
    launcher = launch()
    mounted = Mounted(make_namespace(), user=NOBODY)
    os.chown(mounted.namespace.work / "theirs", 0, 0)
    tierfs = [sys.executable, "-m", "tierfs.cli.main", "mount", mounted.config, f"/dev/fd/{launcher.descriptor}"]
    command = mounted.namespace.command(*tierfs, "--foreground", user=NOBODY)
    done = subprocess.run(
        command,
        env=mounted.namespace.environment,
        pass_fds=[launcher.descriptor],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1
    words = [line for line in done.stderr.splitlines() if line.startswith("tierfs: ")]
    assert len(words) == 1 and "state_dir" in words[0], done.stderr


# -- mount(8) ---------------------------------------------------------------------------------------------------------


def test_mount_and_umount_own_a_channel_as_the_commands_do(make_namespace: Callable[..., Namespace]) -> None:
    namespace = make_namespace()
    work = namespace.work
    for name in ("upper", "scratch"):
        (work / name).mkdir()
    shutil.copy(ROOT / "mount-helpers" / "mount.tierfs", work / "upper" / "mount.tierfs")
    layers = f"lowerdir=/sbin,upperdir={work}/upper,workdir={work}/scratch"
    namespace.run("mount", "-t", "overlay", "-o", layers, "sbin", "/sbin")
    mounted = Mounted(namespace, user=0, options='mode = "channel"')
    mount = ["mount", "-t", "tierfs", "-o", "ro,nofail,_netdev", mounted.config, mounted.path]
    if shutil.which("tierfs", path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin") is None:
        assert "link it into" in namespace.run(*mount, check=False).stderr
    tierfs = work / "tierfs"
    tierfs.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tierfs.cli.main "$@"\n')
    tierfs.chmod(0o755)
    namespace.run("cp", tierfs, "/sbin/tierfs")  # mount(8) looks in no other PATH
    namespace.run(*mount)
    assert mounted.status()["mode"] == "channel"
    mounted.check_reads(user=NOBODY)
    mounted.kill_daemon()
    mounted.check_reads(user=NOBODY)
    namespace.run("umount", mounted.path)
    eventually(lambda: not namespace.processes(), "no process is left")
    assert namespace.mounts() == []
