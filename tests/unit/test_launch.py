"""Which mode a configuration gets, and the command line of the channel."""

import os
import pwd
import subprocess
import time
from pathlib import Path

import pytest

from tierfs.app import launch
from tierfs.blocks.errors import ConfigError, ControlError, MountFailed
from tierfs.config.load import load_mount_config
from tierfs.config.schema import MountConfig


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tierfs-channel"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.setenv(launch.ENVIRONMENT, str(path))
    return path


def config(tmp_path: Path, text: str = "") -> MountConfig:
    file = tmp_path / "mount.toml"
    file.write_text(f'state_dir = "{tmp_path}/state"\n[source]\nurl = "dir:{tmp_path}"\n[mount]\n{text}\n')
    return load_mount_config(file, {"warm.path": str(tmp_path / "warm"), "warm.capacity": "1GiB"})


def test_auto_takes_the_channel_where_it_is_and_says_why_not_elsewhere(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch.plan(config(tmp_path)).program == str(program)
    assert launch.plan(config(tmp_path, 'mode = "direct"')) == launch.Plan(None, 'mount.mode is "direct"')
    monkeypatch.setenv(launch.ENVIRONMENT, str(tmp_path / "nothing"))
    plan = launch.plan(config(tmp_path))
    assert (plan.program, "not installed" in plan.reason) == (None, True)
    with pytest.raises(ConfigError, match="mount.mode"):
        launch.plan(config(tmp_path, 'mode = "channel"'))


def test_the_program_is_found_beside_the_interpreter_and_in_path(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(launch.ENVIRONMENT)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "scripts"))
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    assert launch.find_program() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch.find_program() == str(program)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    assert launch.find_program() == str(program)


def test_the_command_line_carries_the_configuration(tmp_path: Path) -> None:
    settings = config(
        tmp_path, 'restart_grace = "1500ms"\nread_ahead = "1MiB"\nmax_background = 9\nallow_other = false'
    )
    line = launch.command("/bin/tierfs-channel", settings, "/mnt/x", ["python", "-m", "daemon"], keep_fd=7)
    assert line == [
        "/bin/tierfs-channel", "--mountpoint", "/mnt/x", "--read-ahead", "1048576", "--max-background", "9",
        "--restart-grace", "2", "--tier", f"{tmp_path}/warm", "--keep-fd", "7", "--", "python", "-m", "daemon",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('user = "root"', "without rights"),
        ('user = "nobody-of-that-name"', "the name of a user"),
        ('mode = "direct"\nuser = "nobody"', "needs the channel"),
        ('restart_grace = "0s"', "from 1s"),
        ('mode = "native"', "one of"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(tmp_path, text)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away: needs root")
def test_the_directories_of_a_user_become_the_users_but_nothing_beyond_them(tmp_path: Path) -> None:
    settings = config(tmp_path, 'user = "nobody"')
    outside = tmp_path / "outside"
    outside.write_text("root's")
    (tmp_path / "warm" / "deep").mkdir(parents=True)
    (tmp_path / "warm" / "deep" / "object").write_text("weights")
    (tmp_path / "warm" / "link").symlink_to(outside)
    os.link(outside, tmp_path / "warm" / "hard")
    launch.prepare(settings, "/mnt/x")
    user = (tmp_path / "warm").stat().st_uid
    assert user != 0
    assert (tmp_path / "warm" / "deep" / "object").stat().st_uid == user
    assert launch.state_directory(settings, "/mnt/x").stat().st_uid == user
    assert launch.log_path(settings, "/mnt/x").parent.stat().st_uid == user
    assert (outside.stat().st_uid, (tmp_path / "state").stat().st_uid) == (0, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")
def test_a_tier_that_is_somebody_elses_symlink_is_given_to_nobody(tmp_path: Path) -> None:
    user = pwd.getpwnam("nobody").pw_uid
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "warm").symlink_to(outside)
    os.chown(tmp_path / "warm", user, -1, follow_symlinks=False)
    settings = config(tmp_path, 'user = "nobody"')
    with pytest.raises(MountFailed, match="a symlink that root did not make"):
        launch.prepare(settings, "/mnt/x")
    assert outside.stat().st_uid == 0
    os.chown(tmp_path / "warm", 0, -1, follow_symlinks=False)
    launch.prepare(settings, "/mnt/x")
    assert outside.stat().st_uid == user


def test_what_a_running_channel_keeps_is_named(tmp_path: Path) -> None:
    line = launch.command("sleep", config(tmp_path), "/mnt", ["60"])
    # A process with that command line, as the channel is.
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait", *line], stdin=subprocess.DEVNULL) as process:
        try:
            deadline_s = time.monotonic() + 10
            while not Path(f"/proc/{process.pid}/cmdline").read_bytes():  # exec(2) has begun and not set it yet
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            assert launch.kept_options(config(tmp_path), "/mnt", process.pid) == []
            changed = config(tmp_path, 'allow_other = false\nread_ahead = "1MiB"\nrestart_grace = "5s"')
            kept = launch.kept_options(changed, "/mnt", process.pid)
            assert kept == ["mount.allow_other", "mount.read_ahead", "mount.restart_grace"]
        finally:
            subprocess.run(["pkill", "-P", str(process.pid)], check=False)
            process.kill()
    with pytest.raises(ControlError, match="cannot be looked at"):
        launch.kept_options(config(tmp_path), "/mnt", 2**22 + 1)
