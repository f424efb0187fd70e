"""`tierfs restart` into a daemon that finds a directory of another cache format, under readers of every kind.

An older format is migrated with all that it holds; a newer one is refused before anything ends. A daemon that cannot
start costs readers nothing but time, as long as somebody puts it right within the grace, and says what is wrong.
"""

import fcntl
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.channel_load import MODELS, make_truth, readers
from tests.integration.processes import ENVIRONMENT, ROOT, Mount, Serve, eventually, runs, tierfs
from tests.integration.test_channel import channel_status, new_daemon, use
from tierfs.tiers.objects import FORMAT

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed"),
]
MakeMount = Callable[..., Mount]
SEED = 5
GRACE = 'restart_grace = "300s"'
BEFORE_FORMAT_2 = "c181ecf0a0"  # the last commit whose daemon writes format 1


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(autouse=True)
def plain(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(programs, monkeypatch, "plain")


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_truth(tmp_path_factory.mktemp("truth"))


def warm_table(directory: Path) -> str:
    return f'path = "{directory}"\ncapacity = "1GiB"'


def to_format_1(directory: Path) -> None:
    """What the daemons before format 2 left: no column handed_out, no folder of dying objects."""
    assert os.listdir(directory / "dying") == []
    (directory / "dying").rmdir()
    with closing(sqlite3.connect(directory / "residency.db")) as db, db:
        db.execute("ALTER TABLE objects DROP COLUMN handed_out")
    (directory / "format").write_text("1\n")


def directory_of_a_crashed_daemon(url: str, work: Path, source: Path) -> Path:
    """All models resident, in format 1, by the code at ``source``, whose daemon was killed."""
    work.mkdir()
    mounted = Mount(url, work, warm=warm_table(work / "warm"))
    mounted.config.write_text(mounted.config.read_text().replace('mode = "direct"\n', ""))  # a word of later

    def run(*arguments: object) -> str:
        command = [sys.executable, "-m", "tierfs.cli.main", *map(str, arguments)]
        environment = {**ENVIRONMENT, "PYTHONPATH": str(source), "TIERFS_CHANNEL_PROGRAM": "/nonexistent"}
        done = subprocess.run(command, env=environment, cwd=source, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("mount", mounted.config, mounted.path)
    try:
        mounted.pid = int(json.loads(run("status", mounted.path, "--json"))["daemon"]["pid"])
        run("warm", mounted.path)
        mounted.kill()
    finally:
        mounted.cleanup()
    if source == ROOT:
        to_format_1(work / "warm")
    assert (work / "warm" / "format").read_text() == "1\n"
    return work / "warm"


def old_source(work: Path) -> Path:
    """The code of then, from this repository's history."""
    work.mkdir()
    archive = work / "old.tar"
    command = ["git", "-C", str(ROOT), "archive", "-o", str(archive), BEFORE_FORMAT_2, "tierfs"]
    if shutil.which("git") is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this tree has no history")
    subprocess.run(["tar", "-xf", str(archive), "-C", str(work)], check=True)
    return work


@pytest.mark.parametrize("writer", ["this code, rewritten", "the code of then"])
def test_an_older_cache_format_is_migrated_under_load(
    truth: Path, tmp_path: Path, mount: MakeMount, serve: Callable[..., Serve], writer: str
) -> None:
    server = serve(truth)
    source = ROOT if writer == "this code, rewritten" else old_source(tmp_path / "source")
    old = directory_of_a_crashed_daemon(server.url, tmp_path / "old", source)
    mounted = mount(server.url, warm=warm_table(tmp_path / "warm"), mode="channel", timeout="60s", options=GRACE)
    tierfs("warm", mounted.path / "m1", timeout_s=60)
    with readers(mounted, truth, tmp_path, SEED, passthrough=True) as all_well:
        time.sleep(1.0)
        mounted.config.write_text(mounted.config.read_text().replace(f'"{tmp_path}/warm"', f'"{old}"'))
        tierfs("restart", mounted.path, timeout_s=90)
        status = mounted.status()
        mounted.pid = int(status["daemon"]["pid"])
        assert (old / "format").read_text() == f"{FORMAT}\n"
        assert "tier_format_upgraded" in mounted.log()
        resident = {one["path"]: one["resident_bytes"] for one in status["models"]}
        for number in range(MODELS):
            assert resident[f"m{number}"] == (truth / f"m{number}" / "weights.bin").stat().st_size
        time.sleep(2.0)
        all_well()
        largest = max(path.stat().st_size for path in truth.glob("m*/weights.bin"))
        assert mounted.status()["source"]["fetched_bytes"] < largest, "models were fetched again"
        os.kill(mounted.pid, signal.SIGKILL)  # and the migrated directory is taken over as any other
        new_daemon(mounted, mounted.pid)
        time.sleep(1.0)
    status = channel_status(mounted)
    assert status["bad_messages"] == 0
    mounted.unmount()
    eventually(lambda: not runs(mounted.pid), "the daemon has ended")
    with closing(sqlite3.connect(old / "residency.db")) as db:
        (handed_out,) = db.execute("SELECT sum(handed_out) FROM objects").fetchone()
    assert handed_out > 0, "what was opened in passthrough is remembered"


def test_a_newer_cache_format_is_refused_while_the_old_daemon_goes_on(
    truth: Path, tmp_path: Path, mount: MakeMount, serve: Callable[..., Serve]
) -> None:
    mounted = mount(serve(truth).url, warm=warm_table(tmp_path / "warm"), mode="channel", timeout="60s", options=GRACE)
    tierfs("warm", mounted.path / "m1", timeout_s=60)
    with readers(mounted, truth, tmp_path, SEED, passthrough=True):
        (tmp_path / "warm" / "format").write_text(f"{FORMAT + 1}\n")
        done = tierfs("restart", mounted.path, check=False)
        assert done.returncode == 1
        assert f"has format {FORMAT + 1}" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
        assert mounted.status()["daemon"]["pid"] == mounted.pid
        (tmp_path / "warm" / "format").write_text(f"{FORMAT}\n")
        tierfs("restart", mounted.path, timeout_s=90)
        before, mounted.pid = mounted.pid, int(mounted.status()["daemon"]["pid"])
        assert mounted.pid != before


def test_readers_wait_for_a_daemon_that_does_not_start_until_that_is_put_right(
    truth: Path, tmp_path: Path, mount: MakeMount, serve: Callable[..., Serve]
) -> None:
    mounted = mount(serve(truth).url, warm=warm_table(tmp_path / "warm"), mode="channel", timeout="60s", options=GRACE)
    tierfs("warm", mounted.path / "m1", timeout_s=60)
    before = mounted.pid
    other = tmp_path / "taken"
    other.mkdir()
    text = mounted.config.read_text()
    with readers(mounted, truth, tmp_path, SEED, passthrough=True) as all_well, (other / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # nothing that can be seen before the old daemon has ended
        mounted.config.write_text(text.replace(f'"{tmp_path}/warm"', f'"{other}"'))
        started = time.monotonic()
        done = tierfs("restart", mounted.path, check=False, timeout_s=90)
        assert time.monotonic() - started < 85, "the command waited for the grace"
        assert done.returncode == 1
        assert "does not start" in done.stderr and "is in use by process" in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert "daemon_ended reason=" in mounted.log() and "is in use by process" in mounted.log()
        done = tierfs("status", mounted.path, check=False)
        assert done.returncode == 1 and "is in use by process" in done.stderr, done.stderr
        all_well()
        mounted.config.write_text(text)
        tierfs("restart", mounted.path, timeout_s=90)
        mounted.pid = int(mounted.status()["daemon"]["pid"])
        assert mounted.pid != before
    assert channel_status(mounted)["bad_messages"] == 0
