"""Channel mode with something broken on purpose: a daemon that errs, requests that kill it, media that fail.

The daemon is the real one, with one function of it changed by a `sitecustomize` on its path.
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.processes import ENVIRONMENT, ROOT, Serve, eventually, tierfs
from tests.integration.test_channel import (
    READER,
    MakeMount,
    channel_mount,
    channel_status,
    digest,
    new_daemon,
    open_in_passthrough,
    passthrough_or_skip,
)
from tests.integration.test_channel import every_build as every_build
from tests.integration.test_channel import models as models
from tests.integration.test_channel import plain as plain
from tests.integration.test_channel import programs as programs
from tests.media import Disk, can_break

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed"),
]

CHANGED_LOCATE = """
from tierfs.fs.file_view import FileView
locate = FileView.locate
async def changed(self, offset_bytes, length_bytes):
    {0}
    return await locate(self, offset_bytes, length_bytes)
FileView.locate = changed
"""


@pytest.fixture
def change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """change(lines): daemons mounted from now on run them before every read that is not passthrough."""

    def make(lines: str) -> None:
        folder = tmp_path / "change"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(CHANGED_LOCATE.format(lines.replace("\n", "\n    ")))
        monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", f"{folder}:{ROOT}")

    return make


def error_of_read(path: Path) -> int | None:
    try:
        path.read_bytes()
    except OSError as error:
        return error.errno
    return None


def test_a_reply_that_names_less_than_there_is_becomes_an_error_and_no_zeros(
    plain: None,
    models: Path,
    tmp_path: Path,
    mount: MakeMount,
    serve: Callable[..., Serve],
    change: Callable[[str], None],
) -> None:
    change("if self.facts.path == b'm1/weights.bin':\n    length_bytes //= 2")
    mounted = channel_mount(mount, serve, models, tmp_path)
    with (mounted.path / "m1" / "weights.bin").open("rb", buffering=0) as file:
        with pytest.raises(OSError) as failed:
            os.pread(file.fileno(), 1 << 20, 0)
        assert failed.value.errno == errno.EIO
    assert channel_status(mounted)["bad_messages"] > 0
    assert digest(mounted.path / "m2" / "weights.bin") == digest(models / "m2" / "weights.bin")


@pytest.mark.timeout(300)
def test_a_request_that_kills_each_daemon_is_given_up_and_others_are_served_meanwhile(
    every_build: None,
    models: Path,
    tmp_path: Path,
    mount: MakeMount,
    serve: Callable[..., Serve],
    change: Callable[[str], None],
) -> None:
    change("if self.facts.path == b'm1/weights.bin' and offset_bytes < 4096:\n    import os; os._exit(9)")
    mounted = channel_mount(mount, serve, models, tmp_path)
    others = ["m0", "m2", "m3"]
    commands = [
        [sys.executable, "-c", READER, str(mounted.path / name / "weights.bin"), digest(models / name / "weights.bin")]
        for name in others
    ]
    readers = [
        subprocess.Popen([*command, "8", "read"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for command in commands
    ]
    try:
        started = time.monotonic()
        assert error_of_read(mounted.path / "m1" / "weights.bin") == errno.EIO
        assert time.monotonic() - started < 120
        for reader in readers:
            out, err = reader.communicate(timeout=120)
            assert reader.returncode == 0, err.decode()
            assert int(out) > 0
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
    new_daemon(mounted, mounted.pid)
    status = channel_status(mounted)
    assert status["given_up_requests"] >= 1
    assert status["daemon_starts"] == 6
    assert error_of_read(mounted.path / "m1" / "weights.bin") == errno.EIO
    assert channel_status(mounted)["daemon_starts"] == 6, "what was given up a moment ago is not tried again"
    assert "given up: opcode 15" in mounted.log()
    eventually(lambda: channel_status(mounted)["pending"] == 0, "no request is lost")


def test_a_read_that_only_waits_outlives_any_number_of_killed_daemons(
    plain: None,
    models: Path,
    tmp_path: Path,
    mount: MakeMount,
    serve: Callable[..., Serve],
    change: Callable[[str], None],
) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    change(
        f"import os, trio\nwhile self.facts.path == b'm1/weights.bin' and os.path.exists('{hold}'):\n"
        "    await trio.sleep(0.05)"
    )
    mounted = channel_mount(mount, serve, models, tmp_path)
    path = mounted.path / "m1" / "weights.bin"
    command = [sys.executable, "-c", READER, str(path), digest(models / "m1" / "weights.bin"), "0.1", "read"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as reader:
        try:
            for _ in range(6):
                eventually(lambda: mounted.status()["oldest_request_s"] > 0, "the daemon has the read")
                os.kill(mounted.pid, signal.SIGKILL)
                new_daemon(mounted, mounted.pid)
            hold.unlink()
            out, err = reader.communicate(timeout=60)
            assert reader.returncode == 0, err.decode()
            assert int(out) > 0
        finally:
            reader.kill()
    status = channel_status(mounted)
    assert (status["given_up_requests"], status["daemon_starts"]) == (0, 7)


@pytest.mark.skipif(not can_break(), reason="needs root, losetup and mkfs.ext4")
@pytest.mark.timeout(300)
def test_a_medium_that_fails_under_a_passthrough_reader_costs_the_object_and_the_next_open_is_right(
    every_build: None, models: Path, tmp_path: Path, mount: MakeMount, serve: Callable[..., Serve]
) -> None:
    disk = Disk(tmp_path / "media", size_bytes=128 << 20)
    try:
        server = serve(models)
        mounted = mount(server.url, warm=f'path = "{disk.path}/warm"\ncapacity = "80MiB"', mode="channel")
        passthrough_or_skip(mounted)
        tierfs("warm", mounted.path / "m1", timeout_s=120)
        place = mounted.path / "m1" / "weights.bin"
        with open_in_passthrough(mounted, place) as file:
            (stored,) = (disk.path / "warm" / "objects").glob("*/*")
            disk.break_end(stored)
            with pytest.raises(OSError) as failed:
                while file.read(1 << 20):
                    pass
            assert failed.value.errno == errno.EIO
        eventually(lambda: mounted.status()["open_files"] == 0, "the handle is released")
        assert digest(place) == digest(models / "m1" / "weights.bin")
        assert mounted.status()["tiers"]["warm"]["media_errors"] == 1
        assert mounted.log().count("object_quarantined") == 1
        mounted.cleanup()
    finally:
        disk.close()
