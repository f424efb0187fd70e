"""What SECURITY.md promises about files, sockets and the token, looked at on real mounts."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.processes import ENVIRONMENT, Mount, Serve, tierfs

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
