"""Scraping a real mount while it is read: the figures move, and who scrapes badly holds no reader up."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.processes import ENVIRONMENT, Mount, Serve, drop_caches, eventually, tierfs
from tests.integration.scraper import Samples, Scraper
from tests.integration.test_channel import build
from tierfs.control.metrics import ALL

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(240)]

MIB = 1 << 20
SIZE = 16 * MIB


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    (tmp_path / "models" / "a").mkdir(parents=True)
    content = os.urandom(SIZE)
    (tmp_path / "models" / "a" / "model.bin").write_bytes(content)
    return content


@pytest.fixture
def make(
    tmp_path: Path, data: bytes, serve: Callable[..., Serve], mount: Callable[..., Mount]
) -> Callable[[str], Mount]:
    def made(mode: str) -> Mount:
        server = serve(tmp_path / "models", "--set", "exports..block_size=1MiB")
        listen = f'\n[metrics]\nlisten = "unix:{tmp_path}/metrics.sock"\n'
        return mount(server.url, warm=f'path = "{tmp_path}/warm"\ncapacity = "64MiB"', extra=listen, mode=mode)

    return made


@pytest.fixture
def mounted(make: Callable[[str], Mount]) -> Mount:
    return make("direct")


def test_figures_move_while_files_are_read(tmp_path: Path, mounted: Mount, data: bytes) -> None:
    scraper = Scraper(tmp_path / "metrics.sock")
    eventually(scraper.path.exists, "it listens")
    before = scraper.samples()
    assert before["tierfs_source_state", "connected"] == 1
    assert before["tierfs_reads_total", ""] == 0
    path = mounted.path / "a" / "model.bin"
    pages: list[Samples] = []
    over = threading.Event()

    def scrape() -> None:
        while not over.is_set():
            pages.append(scraper.samples())

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        assert path.read_bytes() == data
    finally:
        over.set()
        thread.join(60)
    assert pages

    def written() -> bool:
        return scraper.samples()["tierfs_tier_written_bytes_total", "warm"] == SIZE

    eventually(written, "all of it is warm", within_s=60)
    after = scraper.samples()
    assert {name for name, _ in after} <= {
        figure.name + suffix for figure in ALL for suffix in ("", "_count", "_sum", "_created")
    }
    reads = sum(after["tierfs_read_seconds_count", place] for place in ("memory", "hot", "warm", "source"))
    assert reads == after["tierfs_reads_total", ""] > 0
    assert after["tierfs_read_bytes_total", ""] == SIZE
    assert after["tierfs_read_seconds_count", "source"] > 0 == after["tierfs_read_seconds_count", "warm"]
    assert after["tierfs_source_fetched_bytes_total", ""] == SIZE
    status = mounted.status()
    assert after["tierfs_tier_used_bytes", "warm"] == status["tiers"]["warm"]["used_bytes"]

    # A new daemon has nothing in memory: now the disk answers.
    mounted.unmount()
    mounted.mount()
    drop_caches()
    eventually(scraper.path.exists, "the new one listens")
    with path.open("rb") as file:
        for start in range(SIZE - 4096, 0, -3 * MIB):
            file.seek(start)
            assert file.read(4096) == data[start : start + 4096]
    eventually(lambda: scraper.samples()["tierfs_read_seconds_count", "warm"] > 0, "reads from warm are counted")
    assert scraper.samples()["tierfs_read_seconds_count", "source"] == 0


def test_scrapers_that_hang_hold_no_reader_up(tmp_path: Path, mounted: Mount, data: bytes) -> None:
    scraper = Scraper(tmp_path / "metrics.sock")
    eventually(scraper.path.exists, "it listens")
    with ExitStack() as stack:
        for number in range(20):
            try:
                connection = stack.enter_context(scraper.connect())
                connection.sendall(b"GET /metrics HTTP/1.1\r\n" + b"\r\n" * (number % 2))
            except OSError:
                pass  # one too many
        began_s = time.monotonic()
        assert (mounted.path / "a" / "model.bin").read_bytes() == data
        assert time.monotonic() - began_s < 60
        assert mounted.status()["requests"]["failed"] == 0

    def again() -> bool:
        try:
            return scraper.samples()["tierfs_read_bytes_total", ""] == SIZE
        except (OSError, AssertionError):
            return False

    eventually(again, "there is room for a scraper again", within_s=60)
    mounted.unmount()
    assert not scraper.path.exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_under_a_channel_each_daemon_that_follows_answers(
    tmp_path: Path, make: Callable[[str], Mount], data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "TIERFS_CHANNEL_PROGRAM", str(build(tmp_path, "plain")))
    mounted = make("channel")
    scraper = Scraper(tmp_path / "metrics.sock")
    eventually(scraper.path.exists, "it listens")
    assert (mounted.path / "a" / "model.bin").read_bytes() == data
    first = scraper.samples()
    assert first["tierfs_channel_daemon_starts_total", ""] == 1
    assert first["tierfs_channel_requests_total", "read"] >= first["tierfs_read_seconds_count", "source"] > 0
    assert first["tierfs_read_bytes_total", ""] == SIZE

    def daemons() -> float:
        try:
            return scraper.samples()["tierfs_channel_daemon_starts_total", ""]
        except (OSError, AssertionError):
            return 0

    tierfs("restart", mounted.path)
    eventually(lambda: daemons() == 2, "the second daemon answers", within_s=60)
    os.kill(mounted.status()["daemon"]["pid"], signal.SIGKILL)
    eventually(lambda: daemons() == 3, "the third one answers, though the second left its socket", within_s=90)
