"""What root's commands believe of a record that a daemon without rights wrote."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tierfs.control import registry

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root: the directories of other users are root's to read"
)

PLACE = "/srv/models"
CONFIG = "/etc/tierfs/mount.toml"


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[registry.Record]:
    """A record as an honest daemon of a channel writes it."""
    monkeypatch.delenv(registry.ENVIRONMENT, raising=False)
    monkeypatch.setattr(registry, "_ROOT", tmp_path)
    (tmp_path / "u1234").mkdir()
    daemon = ["python", "-m", "tierfs.cli.main", "mount", CONFIG, PLACE, "--foreground", "--set", "warm.capacity=1GiB"]
    waits = "print(flush=True); input()"
    command = [sys.executable, "-c", waits, "--mountpoint", PLACE, "--user", "1234:1234", "--", *daemon]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as channel:
        assert channel.stdout is not None
        channel.stdout.readline()
        name = registry.record_path(PLACE).name
        yield registry.Record(
            mountpoint=PLACE,
            pid=channel.pid,
            started=registry.process_start(channel.pid),
            socket=str((tmp_path / "u1234" / name).with_suffix(".sock")),
            config=CONFIG,
            daemon_pid=1 << 30,
            daemon_started=1,
            options=["warm.capacity=1GiB"],
        )
        channel.communicate(b"\n", timeout=10)


@contextlib.contextmanager
def ended_within(seconds: int) -> Iterator[None]:
    """Fail where something waits, instead of waiting for ever."""

    def late(*_: object) -> None:
        raise AssertionError(f"not within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def believed(record: registry.Record) -> list[registry.Record]:
    Path(record.socket).with_suffix(".json").write_text(json.dumps(asdict(record)))
    return registry.records()


def test_what_the_channels_command_line_says_is_believed(record: registry.Record) -> None:
    assert believed(record) == [record]


def test_no_other_configuration_is(record: registry.Record) -> None:
    assert believed(replace(record, config="/home/somebody/mount.toml")) == []
    assert believed(replace(record, options=["warm.path=/etc"])) == []
    assert believed(replace(record, options=[])) == []


def test_nonsense_is_passed_over(record: registry.Record) -> None:
    assert believed(replace(record, mountpoint=7)) == []  # type: ignore[arg-type]
    assert believed(replace(record, options=7)) == []  # type: ignore[arg-type]


def test_what_is_no_small_file_is_passed_over_at_once(record: registry.Record, tmp_path: Path) -> None:
    """A daemon taken over chooses what lies there: it must neither hold nor fill root's commands."""
    honest = json.dumps(asdict(record))
    path = Path(record.socket).with_suffix(".json")
    failure = path.with_suffix(".failed")
    (tmp_path / "elsewhere").write_text(honest)
    for make in (
        os.mkfifo,
        os.mkdir,
        lambda where: where.symlink_to(tmp_path / "elsewhere"),
        lambda where: where.symlink_to("/dev/zero"),
        lambda where: where.write_text(honest[:-1] + " " * (2 << 20) + "}"),
        lambda where: where.write_text("[" * 500_000),
        lambda where: where.write_text(honest.replace("}", ', "more": ' + "[" * 500_000 + "}")),
    ):
        for where in (path, failure):
            make(where)
        with ended_within(10):
            assert registry.records() == []
            assert len(registry.failure(record)) <= 2000
        for where in (path, failure):
            where.rmdir() if where.is_dir() else where.unlink()
    failure.write_bytes(b"\x1b]0;title\x07 no\xff")
    assert registry.failure(record).isprintable()
