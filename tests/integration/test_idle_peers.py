"""Peers that take places and do nothing with them: real servers and daemons serve the others, and hold no more of them
than they may."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.authority import Authority
from tests.integration.processes import ENVIRONMENT, Mount, Serve, descriptors, eventually, process_status, tierfs
from tierfs.wire import messages as m

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(240)]

TOKEN = "t" * 40
BYTES = 3 << 20
PLACES = 32  # of the server, a quarter of them for each address
HELLO = m.encode(m.Hello("", bytes(32), "slow", ()), request_id=0)
FIRST_WORDS = [b"", b"TFS1", HELLO[:-1], HELLO, b"\x16\x03\x01\x02\x00\x01"]  # the last begins a TLS handshake


@contextmanager
def besieged(connect: Callable[[int], socket.socket], *, at_once: int, words: list[bytes]) -> Iterator[list[float]]:
    """So many connections that say a few words and no more; each is made anew soon after it was closed. Yields how
    long each of them was left open, s."""
    over = threading.Event()
    lives: list[float] = []

    def one(number: int) -> None:
        while not over.is_set():
            began_s = time.monotonic()
            try:
                with connect(number) as peer:
                    peer.settimeout(0.1)
                    peer.sendall(words[number % len(words)])
                    while not over.is_set():
                        try:
                            if not peer.recv(4096):
                                break
                        except TimeoutError:
                            pass
                    else:
                        return
            except OSError:
                pass
            lives.append(time.monotonic() - began_s)
            over.wait(0.2)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(at_once)]
    for thread in threads:
        thread.start()
    try:
        yield lives
    finally:
        over.set()
        for thread in threads:
            thread.join(30)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "model.bin").write_bytes(os.urandom(BYTES))
    return tmp_path / "models"


@pytest.mark.parametrize("encrypted", [pytest.param(False, marks=pytest.mark.long), True], ids=["plain", "tls"])
def test_a_server_full_of_half_handshakes_serves_who_knows_the_token(
    tmp_path: Path, models: Path, serve: Callable[..., Serve], mount: Callable[..., Mount], encrypted: bool
) -> None:
    """From the address of the good client, too, which then has no place of its own left."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    options = ["--token-file", str(token), "--set", f"server.max_connections={PLACES}"]
    source = ""
    if encrypted:
        authority = Authority(tmp_path / "authority")
        options += authority.issue().options
        source = f'tls = true\ntls_ca_file = "{authority.ca}"\n'
    server = serve(models, *options)
    host, _, port = server.url.removeprefix("tierfs://").rstrip("/").partition(":")

    def connect(number: int) -> socket.socket:
        where = f"127.0.0.{1 + number % 6}"
        return socket.create_connection((host, int(port)), timeout=5, source_address=(where, 0))

    def connections() -> int:
        return sum(name.startswith("socket:") for name in descriptors(server.process.pid))

    before = connections()
    with besieged(connect, at_once=2 * PLACES, words=FIRST_WORDS if encrypted else FIRST_WORDS[:4]) as lives:
        eventually(lambda: connections() >= before + PLACES // 2, "the places are taken")
        time.sleep(1)
        mounted = mount(server.url, token_file=str(token), source=source, timeout="30s")
        began_s = time.monotonic()
        assert (mounted.path / "model.bin").read_bytes() == (models / "model.bin").read_bytes()
        assert time.monotonic() - began_s < 20
        for _ in range(20):
            # Those who are told that there is no room are connections, too, for a moment.
            assert connections() - before <= PLACES + 40
            time.sleep(0.05)
        eventually(lambda: len(lives) > 10, "they lose their places")
        assert mounted.status()["source"]["state"] == "connected", "who has shaken hands keeps its place"
        assert max(lives) < 25
    eventually(lambda: connections() <= before + 8, "the places are free again")
    assert process_status(server.process.pid)["RssAnon"] < 300 << 10
    assert len(server.log.read_text().splitlines()) < 100


def test_idle_scrapers_and_idle_commands_keep_nobody_from_the_figures_and_from_status(
    tmp_path: Path, models: Path, mount: Callable[..., Mount], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "run"
    monkeypatch.setitem(ENVIRONMENT, "TIERFS_RUNTIME_DIR", str(runtime))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mounted = mount(f"dir:{models}", extra=f'\n[metrics]\nlisten = "tcp://127.0.0.1:{port}"\n')
    control = next(runtime.glob("*.sock"))

    def to_metrics(_: int) -> socket.socket:
        return socket.create_connection(("127.0.0.1", port), timeout=5)

    def to_control(_: int) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(5)
        try:
            peer.connect(str(control))
        except OSError:
            peer.close()
            raise
        return peer

    def scraped() -> bytes:
        with to_metrics(0) as peer:
            peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            page = b""
            while piece := peer.recv(65536):
                page += piece
        return page

    def sockets() -> int:
        return sum(name.startswith("socket:") for name in descriptors(mounted.pid))

    before = sockets()
    with (
        besieged(to_metrics, at_once=20, words=[b"", b"GET /metrics HTTP/1.1\r\n"]) as scrapers,
        besieged(to_control, at_once=90, words=[b"", b'{"command": "sta']) as commands,
    ):
        eventually(lambda: sockets() - before > 60, "the places are taken")
        for _ in range(3):
            assert scraped().startswith(b"HTTP/1.1 200 OK\r\n")
            assert tierfs("status", mounted.path, "--json").returncode == 0
            assert sockets() - before <= 8 + 64 + 10
        assert (mounted.path / "model.bin").read_bytes() == (models / "model.bin").read_bytes()
        eventually(lambda: bool(scrapers) and bool(commands), "who does nothing loses its place")
    eventually(lambda: sockets() <= before + 1, "the places are free again")
    assert process_status(mounted.pid)["RssAnon"] < 300 << 10
