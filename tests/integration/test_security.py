"""What SECURITY.md promises about files, sockets and the token, looked at on real mounts."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from tests.integration.processes import ENVIRONMENT, Mount, Serve, tierfs
from tierfs.app.launch import find_program
from tierfs.control import registry
from tierfs.control.socket import serve as serve_control

pytestmark = pytest.mark.fuse

TOKEN = "a-token-nobody-may-see-4711"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(ENVIRONMENT, "TIERFS_RUNTIME_DIR", str(tmp_path / "run" / "tierfs"))
    return tmp_path / "run" / "tierfs"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "model.bin").write_bytes(os.urandom(5 << 20))
    return tmp_path / "models"


@pytest.mark.parametrize("kind", ["direct", "channel"])
def test_sockets_objects_and_the_token_are_for_nobody_else(
    tmp_path: Path,
    runtime: Path,
    models: Path,
    serve: Callable[..., Serve],
    mount: Callable[..., Mount],
    kind: str,
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    warm = tmp_path / "warm"
    warm.mkdir(mode=0o755)  # as an administrator makes one
    previous = os.umask(0)
    try:
        server = serve(models, "--token-file", str(token), "--set", "log.level=debug")
        mounted = mount(
            server.url,
            warm=f'path = "{warm}"',
            token_file=str(token),
            mode=kind,
            extra='[log]\nlevel = "debug"\n',
        )
    finally:
        os.umask(previous)
    assert len((mounted.path / "model.bin").read_bytes()) == 5 << 20
    tierfs("warm", mounted.path / "model.bin")

    assert mode(runtime) == 0o700
    kinds = {path.suffix: mode(path) for path in runtime.iterdir()}
    assert kinds == {".sock": 0o600, ".json": 0o600, ".lock": 0o600}

    objects = [path for path in (warm / "objects").rglob("*") if path.is_file()]
    assert objects and {mode(path) for path in objects} == {0o600}
    assert mode(warm / "objects") == 0o700

    seen = mounted.log() + server.log.read_text() + "".join(path.read_text() for path in runtime.glob("*.json"))
    for pid in filter(None, (mounted.pid, mounted.channel_pid, server.process.pid)):
        seen += Path(f"/proc/{pid}/cmdline").read_text() + Path(f"/proc/{pid}/environ").read_text(errors="replace")
    assert "mount.toml" in seen and TOKEN not in seen
    assert TOKEN not in tierfs("status", mounted.path, "--json").stdout


def test_a_wrong_token_is_an_error_that_shows_neither(
    tmp_path: Path, models: Path, serve: Callable[..., Serve]
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "wrong").write_text("another-" + TOKEN)
    (tmp_path / "mnt").mkdir()
    server = serve(models, "--token-file", str(tmp_path / "token"))
    config = tmp_path / "mount.toml"
    config.write_text(
        f'state_dir = "{tmp_path}/state"\n[source]\nurl = "{server.url}"\n'
        f'token_file = "{tmp_path}/wrong"\ntimeout = "2s"\n'
    )
    refused = tierfs("mount", config, tmp_path / "mnt", check=False)
    logs = "".join(path.read_text() for path in (tmp_path / "state").rglob("*.log"))
    assert refused.returncode != 0 and "token" in refused.stderr
    assert TOKEN not in refused.stderr + logs + server.log.read_text()


def test_a_control_socket_is_for_nobody_else_from_its_first_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where neither the umask nor a chmod helps, only bind itself can have given it its mode."""

    def chmod(*_: object) -> None:
        raise AssertionError("between bind and chmod it is open to others")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_control, tmp_path / "control.sock", {})
            assert mode(tmp_path / "control.sock") == 0o600
            nursery.cancel_scope.cancel()

    monkeypatch.setattr(os, "chmod", chmod)
    before = os.umask(0)
    try:
        trio.run(main)
    finally:
        os.umask(before)


@pytest.mark.parametrize("bad", [0o777, 0o770])
def test_a_runtime_directory_that_others_can_write_is_refused(tmp_path: Path, runtime: Path, bad: int) -> None:
    runtime.mkdir(parents=True)
    runtime.chmod(bad)
    refused = tierfs("status", check=False)
    assert refused.returncode == 1 and "can be written by other users" in refused.stderr
    assert "chmod 700" in refused.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what belongs to another user")
def test_a_runtime_directory_of_somebody_else_is_refused_and_so_is_a_link(tmp_path: Path, runtime: Path) -> None:
    runtime.mkdir(parents=True)
    os.chown(runtime, 65534, 65534)
    assert "belongs to another user" in tierfs("status", check=False).stderr
    runtime.rmdir()
    (tmp_path / "mine").mkdir(mode=0o700)
    runtime.symlink_to(tmp_path / "mine")
    os.chown(runtime, 65534, 65534, follow_symlinks=False)
    assert "belongs to another user" in tierfs("status", check=False).stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's commands look at the records of other users")
def test_root_believes_no_record_that_names_a_process_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command ends what a record names: a daemon without rights must not choose."""
    monkeypatch.setattr(registry, "_ROOT", tmp_path / "root")
    monkeypatch.delenv(registry.ENVIRONMENT, raising=False)
    directory = registry.user_directory(65534, 65534)
    own = os.getpid()

    def written(**changes: object) -> list[registry.Record]:
        path = directory / registry.record_path("/models").name
        record = {
            "mountpoint": "/models",
            "pid": 0,
            "started": 1,
            "socket": str(path.with_suffix(".sock")),
            "config": "",
        }
        path.write_text(json.dumps({**record, **changes}))
        return registry.records()

    assert len(written()) == 1, "of a dead mount it may be believed"
    started = registry.process_start(own)
    assert written(pid=own, started=started) == []
    assert written(pid=own, started=started, daemon_pid=own, daemon_started=started) == []
    assert written(daemon_pid=own, daemon_started=started) == []
    assert written(socket="/run/other.sock") == []
    assert written(mountpoint="/elsewhere") == []


# A daemon that lends the channel what it must not take, and prints what it was answered.
_HOSTILE = """
import os, socket, struct, sys
tier, elsewhere = sys.argv[1:]
control = socket.socket(fileno=int(os.environ["TIERFS_CHANNEL"].split(",")[1]))
def ask(type, payload, fd=None):
    fds = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))]
    control.sendmsg([struct.pack("<II", type, 7) + payload], fds)
    while (answer := control.recv(65536))[:4] != struct.pack("<I", 100):
        pass
    return struct.unpack_from("<I", answer, 8)[0]
def lend(slot, path, flags, size=4096):
    return ask(4, struct.pack("<IIQ", slot, 1, size), os.open(path, flags))
assert ask(1, struct.pack("<I", 2)) == 0
whole = tier + "/object"
print(
    lend(0, whole, os.O_RDONLY),
    lend(1, whole, os.O_RDWR),
    lend(2, whole, os.O_WRONLY),
    lend(4, tier, os.O_RDONLY),
    lend(5, elsewhere, os.O_RDONLY),
    lend(6, tier + "/theirs", os.O_RDONLY),
    lend(7, whole, os.O_RDONLY, 8192),
    flush=True,
)
"""


@pytest.mark.skipif(find_program() is None, reason="tierfs-channel is not installed")
@pytest.mark.skipif(os.geteuid() != 0, reason="a file of another user is needed")
def test_the_channel_takes_only_read_only_files_of_its_daemon_on_a_tier(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    tier = tmp_path / "tier"
    tier.mkdir()
    for name in ("object", "theirs"):
        (tier / name).write_bytes(bytes(4096))
    os.chown(tier / "theirs", 65534, 65534)
    elsewhere = Path(f"/dev/shm/tierfs-test-{os.getpid()}")
    elsewhere.write_bytes(bytes(4096))
    try:
        assert elsewhere.stat().st_dev != tier.stat().st_dev, "this test wants another file system"
        program = str(find_program())
        line = [
            program,
            "--mountpoint",
            str(tmp_path / "mnt"),
            "--tier",
            str(tier),
            "--",
            sys.executable,
            "-c",
            _HOSTILE,
        ]
        done = subprocess.run([*line, str(tier), str(elsewhere)], capture_output=True, text=True, timeout=60)
    finally:
        elsewhere.unlink()
    assert done.stdout.split() == ["0"] + ["13"] * 6, done.stderr  # EACCES
