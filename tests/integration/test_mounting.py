"""mount(8), fstab and umount(8) with mount-helpers/mount.tierfs; readiness told to systemd; propagation of a mount.

All in a mount namespace of its own, where /sbin has the helper. Needs root.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.namespaces import Namespace
from tests.integration.processes import ENVIRONMENT, ROOT, Serve, eventually, runs
from tierfs.config.load import load_mount_config

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace of its own needs root"),
]

# A /sbin that has the helper as well, for mount(8) looks nowhere else.
_SBIN = """
set -eu
mkdir "$1/real" "$1/sbin"
mount --bind "$(realpath /sbin)" "$1/real"
cp -s "$1"/real/* "$1/sbin/" 2>/dev/null || true
cp "$2" "$1/sbin/mount.tierfs"
cp "$1/tierfs" "$1/sbin/tierfs"
ln -s mount.tierfs "$1/sbin/mount.fuse.tierfs"
mount --bind "$1/sbin" "$(realpath /sbin)"
"""


class Place:
    """A namespace with the helper, a configuration, a mountpoint and a line of fstab."""

    def __init__(self, work: Path, *, mode: str = "auto") -> None:
        self.namespace = Namespace(work)
        self.path = work / "mnt"
        self.path.mkdir()
        (work / "models" / "m").mkdir(parents=True)
        (work / "models" / "m" / "model.bin").write_bytes(b"weights" * 1000)
        self.config = work / "mount.toml"
        self.config.write_text(
            f'state_dir = "{work}/state"\n[source]\nurl = "dir:{work}/models"\n[mount]\nmode = "{mode}"\n'
        )
        command = work / "tierfs"  # in /sbin as well: mount(8) hands its helpers no PATH
        command.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m tierfs.cli.main "$@"\n')
        command.chmod(0o755)
        self.namespace.run("sh", "-c", _SBIN, "sh", work, ROOT / "mount-helpers" / "mount.tierfs")
        self.fstab = work / "fstab"

    def table(self, options: str) -> None:
        """Make that the line of fstab."""
        self.fstab.write_text(f"{self.config} {self.path} tierfs {options} 0 0\n")

    def mount(self, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.namespace.run("mount", *words, check=check)

    def read(self) -> str:
        return self.namespace.run("head", "-c", "7", self.path / "m" / "model.bin").stdout

    def options(self) -> set[str]:
        return set(self.namespace.run("findmnt", "-n", "-o", "OPTIONS", self.path).stdout.strip().split(","))

    def close(self) -> None:
        self.namespace.run("umount", "-l", self.path, check=False)
        self.namespace.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.close()


def test_mount_returns_when_it_can_be_read_and_umount_ends_the_daemon(place: Place) -> None:
    place.mount("-t", "tierfs", place.config, place.path)
    assert place.read() == "weights"
    daemons = [pid for pid, command in place.namespace.processes().items() if "tierfs" in command]
    assert daemons
    place.namespace.run("umount", place.path)
    assert place.namespace.mounts() == []
    eventually(lambda: not any(runs(pid) for pid in daemons), "umount ended what served the mount")
    place.mount("-t", "tierfs", place.config, place.path)
    assert place.read() == "weights"


def test_the_usual_options_of_fstab(place: Place) -> None:
    place.table(
        "ro,nofail,_netdev,noauto,user,allow_other,noatime,x-systemd.requires=network-online.target,comment=models"
    )
    assert place.mount("-T", place.fstab, "-a").stderr == ""
    assert place.namespace.mounts() == [], "noauto is not for mount -a"
    place.mount("-T", place.fstab, place.path)
    assert place.read() == "weights"
    assert {"ro", "nosuid", "nodev", "noexec"} <= place.options()  # user implies noexec


def test_mount_all_twice_mounts_once_and_says_so(place: Place) -> None:
    place.table("defaults,nofail,_netdev")
    place.mount("-T", place.fstab, "-a")
    again = place.mount("-T", place.fstab, "-a")
    assert f"{place.config} is mounted at {place.path} already" in again.stderr
    assert len(place.namespace.mounts()) == 1
    assert "noexec" not in place.options()


def test_two_commands_at_once_mount_once(place: Place) -> None:
    command = place.namespace.command("mount", "-t", "tierfs", place.config, place.path)
    both = [subprocess.Popen(command, env=place.namespace.environment, stderr=subprocess.PIPE) for _ in range(2)]
    said = [process.communicate(timeout=60)[1].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert len(place.namespace.mounts()) == 1
    assert place.read() == "weights"


def test_another_configuration_at_the_same_place_is_refused(place: Place, tmp_path: Path) -> None:
    place.mount("-t", "tierfs", place.config, place.path)
    other = tmp_path / "other.toml"
    other.write_text(place.config.read_text())
    refused = place.mount("-t", "tierfs", other, place.path, check=False)
    assert refused.returncode != 0 and str(place.config) in refused.stderr and "unmount" in refused.stderr
    assert place.read() == "weights"


def test_remount_reads_the_configuration_again(place: Place) -> None:
    place.table("ro,nofail")
    place.mount("-T", place.fstab, place.path)
    place.mount("-o", "remount", place.path)
    place.config.write_text(place.config.read_text() + "metadata_ttl = 7\n")
    broken = place.mount("-o", "remount,ro", place.path, check=False)
    assert broken.returncode != 0 and "metadata_ttl" in broken.stderr
    assert place.read() == "weights" and len(place.namespace.mounts()) == 1


def test_what_is_not_known_is_refused_unless_sloppy(place: Place) -> None:
    words = ("-t", "tierfs", "-o", "ro,cache_size=7", place.config, place.path)
    refused = place.mount(*words, check=False)
    assert refused.returncode != 0 and "cache_size=7" in refused.stderr and str(place.config) in refused.stderr
    assert place.namespace.mounts() == []
    place.mount("-f", "-s", *words)
    assert place.namespace.mounts() == [], "-f mounts nothing"
    said = place.mount("-s", "-n", "-v", *words).stderr
    assert "cache_size=7" in said and "--unless-mounted" in said
    assert place.read() == "weights"


def test_a_mount_that_cannot_be_made_ends_with_the_reason(place: Place) -> None:
    place.config.write_text(place.config.read_text().replace("/models", "/nowhere"))
    place.table("nofail")
    refused = place.mount("-T", place.fstab, "-a", check=False)
    assert refused.returncode != 0 and "/nowhere is not there" in refused.stderr
    assert place.namespace.mounts() == []


def told(listening: socket.socket) -> str:
    listening.settimeout(60)
    return listening.recv(4096).decode()


@pytest.mark.parametrize("mode", ["direct", "channel"])
def test_a_mount_in_the_foreground_tells_systemd_that_it_is_ready(tmp_path: Path, mode: str) -> None:
    place = Place(tmp_path, mode=mode)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
            listening.bind(str(tmp_path / "notify"))
            command = place.namespace.command("tierfs", "mount", "--foreground", place.config, place.path)
            environment = {**place.namespace.environment, "NOTIFY_SOCKET": str(tmp_path / "notify")}
            with (tmp_path / "log").open("wb") as log:
                unit = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            assert told(listening) == f"READY=1\nSTATUS=mounted at {place.path}\n"
            assert place.read() == "weights"
            unit.send_signal(signal.SIGTERM)  # as KillMode=mixed does: to the main process alone
            assert unit.wait(30) == 0, (tmp_path / "log").read_text()
            assert place.namespace.mounts() == []
            eventually(
                lambda: not any("--foreground" in command for command in place.namespace.processes().values()),
                "the daemon ended with its channel",
            )
    finally:
        place.close()


def test_a_server_tells_systemd_that_it_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(b"\0tierfs-test-" + str(os.getpid()).encode())
        monkeypatch.setitem(ENVIRONMENT, "NOTIFY_SOCKET", f"@tierfs-test-{os.getpid()}")
        server = Serve(tmp_path / "models", tmp_path)
        try:
            assert told(listening).startswith("READY=1\nSTATUS=serving on 127.0.0.1:")
        finally:
            server.stop()


def test_a_shared_mount_appears_in_another_namespace_and_survives_its_daemon(place: Place, tmp_path: Path) -> None:
    """What the DaemonSet of examples/kubernetes does: Bidirectional there, HostToContainer in the consumer."""
    shared = tmp_path / "shared"
    (shared / "models").mkdir(parents=True)
    place.namespace.run("mount", "--bind", shared, shared)
    place.namespace.run("mount", "--make-rshared", shared)
    consumer = subprocess.Popen(
        place.namespace.command("unshare", "-m", "--propagation", "slave", "sh", "-c", "echo ready; read -r end"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

    def consume() -> str:
        inside = ["nsenter", f"--mount=/proc/{consumer.pid}/ns/mnt", "cat", str(shared / "models" / "m" / "model.bin")]
        return subprocess.run(inside, capture_output=True, text=True, timeout=60).stdout

    try:
        assert consumer.stdout is not None and consumer.stdout.readline() == "ready\n"
        assert consume() == ""
        provider = ("unshare", "-m", "--propagation", "unchanged", "tierfs")  # a peer, as a Bidirectional container is
        place.namespace.run(*provider, "mount", "--set", "mount.mode=channel", place.config, shared / "models")
        assert consume() == "weights" * 1000
        (daemon,) = [
            pid
            for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
            if (words := command_of(pid))
            and words[1:4] == ["-m", "tierfs.cli.main", "mount"]
            and str(shared) in " ".join(words)
        ]
        os.kill(daemon, signal.SIGKILL)
        assert consume() == "weights" * 1000
        place.namespace.run("tierfs", "unmount", shared / "models")
        assert consume() == ""
    finally:
        place.namespace.run("tierfs", "unmount", shared / "models", check=False)
        consumer.communicate("\n", timeout=10)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
@pytest.mark.parametrize("unit", ["tierfs@models.service", "tierfs-serve@models.service"])
def test_the_units_are_understood_by_systemd(place: Place, tmp_path: Path, unit: str) -> None:
    template = ROOT / "mount-helpers" / "systemd" / f"{unit.partition('@')[0]}@.service"
    (tmp_path / unit).write_bytes(template.read_bytes())
    verify = ("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", tmp_path / unit)
    done = place.namespace.run(*verify, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_of_a_mount_has_no_view_of_the_files_of_its_own() -> None:
    """With any of these the mount would be seen by nobody else: systemd.exec(5), MountFlags=."""
    keys = {
        line.partition("=")[0]
        for line in (ROOT / "mount-helpers" / "systemd" / "tierfs@.service").read_text().splitlines()
    }
    own_view = {"DynamicUser", "MountFlags", "ProcSubset", "ProtectControlGroups", "ProtectHome", "ProtectKernelLogs"}
    own_view |= {"ProtectKernelModules", "ProtectKernelTunables", "ProtectProc", "ProtectSystem", "TemporaryFileSystem"}
    own_view |= {"BindPaths", "InaccessiblePaths", "LoadCredential", "ReadOnlyPaths", "ReadWritePaths", "RootDirectory"}
    own_view |= {"PrivateDevices", "PrivateIPC", "PrivateMounts", "PrivateTmp", "PrivateUsers"}
    assert not keys & own_view


def test_the_kubernetes_files_fit_each_other_and_this_tierfs(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    directory = ROOT / "examples" / "kubernetes"
    files = {path.stem: yaml.safe_load(path.read_text()) for path in directory.glob("*.yaml")}
    kinds = {"configmap": ("v1", "ConfigMap"), "daemonset": ("apps/v1", "DaemonSet"), "consumer": ("v1", "Pod")}
    assert {name: (file["apiVersion"], file["kind"]) for name, file in files.items()} == kinds
    daemon_set = files["daemonset"]["spec"]
    labels = daemon_set["template"]["metadata"]["labels"]
    assert daemon_set["selector"]["matchLabels"] == labels
    pods = {"daemonset": daemon_set["template"]["spec"], "consumer": files["consumer"]["spec"]}
    for pod in pods.values():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert container["image"] and container["name"]
            assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
            assert all(mount["mountPath"].startswith("/") for mount in container["volumeMounts"])
    (provider,), (consumer,) = pods["daemonset"]["containers"], pods["consumer"]["containers"]
    shared = {mount["mountPropagation"]: mount["name"] for mount in provider["volumeMounts"] + consumer["volumeMounts"]
              if "mountPropagation" in mount}  # fmt: skip
    assert set(shared) == {"Bidirectional", "HostToContainer"}
    assert provider["securityContext"]["privileged"] is True
    host = [
        next(v["hostPath"]["path"] for v in pod["volumes"] if v["name"] in shared.values()) for pod in pods.values()
    ]
    assert host[0] == host[1]
    text = files["configmap"]["data"]["mount.toml"]
    token = tmp_path / "token"
    token.write_text("secret")
    config = tmp_path / "mount.toml"
    config.write_text(text.replace("/run/secrets/tierfs/token", str(token)).replace("/var/lib/tierfs", str(tmp_path)))
    load_mount_config(config, {})
    assert provider["readinessProbe"]["exec"]["command"][:3] == ["tierfs", "status", "--ready"]


def command_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []
