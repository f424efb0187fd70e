"""Scraping a real server while real mounts read from it, and while others break its rules."""

import os
import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.processes import Mount, Serve, eventually, tierfs
from tests.integration.scraper import Scraper
from tierfs.control.server_metrics import ALL

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(120)]

MIB = 1 << 20
SIZE = 8 * MIB
OPTIONS = ("--set", "exports..block_size=1MiB", "--set", "exports..rescan=100ms")


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    (tmp_path / "models" / "a").mkdir(parents=True)
    content = os.urandom(SIZE)
    (tmp_path / "models" / "a" / "model.bin").write_bytes(content)
    return content


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_a_server_counts_what_it_sends_and_whom_it_refuses(
    tmp_path: Path, data: bytes, serve: Callable[..., Serve], mount: Callable[..., Mount]
) -> None:
    scraper = Scraper(tmp_path / "metrics.sock")
    server = serve(tmp_path / "models", *OPTIONS, "--set", f"metrics.listen=unix:{scraper.path}")
    eventually(scraper.path.exists, "it listens")

    def is_(name: str, label: str, value: float) -> None:
        eventually(lambda: scraper.samples().get((name, label)) == value, f"{name} {label} is {value}")

    is_("tierfs_server_export_publications_total", "/", 1)
    is_("tierfs_server_export_digested_bytes", "/", SIZE)
    before = scraper.samples()
    assert before["tierfs_server_export_bytes", "/"] == SIZE
    assert before["tierfs_server_export_entries", "/"] == 3  # the root, a directory, a file
    assert before["tierfs_server_export_state", "/ connected"] == 1
    assert before["tierfs_server_connections", ""] == 0 == before["tierfs_server_sent_bytes_total", ""]

    mounted = mount(server.url)
    assert (mounted.path / "a" / "model.bin").read_bytes() == data
    is_("tierfs_server_sent_bytes_total", "", SIZE)
    after = scraper.samples()
    assert {name for name, _ in after} <= {
        figure.name + suffix for figure in ALL for suffix in ("", "_count", "_sum", "_created")
    }
    reads = after["tierfs_server_requests_total", "read ok"]
    assert reads == after["tierfs_server_sent_blocks_total", ""] == after["tierfs_server_request_seconds_count", "read"]
    assert reads >= SIZE // MIB and after["tierfs_server_request_seconds_sum", "read"] > 0
    assert after["tierfs_server_requests_total", "catalog ok"] >= 1
    assert after["tierfs_server_connections", ""] == mounted.status()["source"]["connections"] > 0
    assert after["tierfs_server_running_requests", ""] == 0 == after["tierfs_server_in_flight_bytes", ""]

    # another generation is published
    (tmp_path / "models" / "a" / "second.bin").write_bytes(b"x")
    is_("tierfs_server_export_publications_total", "/", 2)
    is_("tierfs_server_export_bytes", "/", SIZE + 1)
    assert scraper.samples()["tierfs_server_export_generation", "/"] > after["tierfs_server_export_generation", "/"]

    # whoever breaks a rule is counted, and a mount of what is not there
    host, _, port = server.url.removeprefix("tierfs://").rstrip("/").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while peer.recv(4096):
            pass
    is_("tierfs_server_malformed_peers_total", "", 1)
    (tmp_path / "elsewhere").mkdir()
    refused = tmp_path / "refused.toml"
    refused.write_text(f'state_dir = "{tmp_path}/refused"\n[source]\nurl = "{server.url}none"\ntimeout = "1s"\n')
    assert tierfs("mount", refused, tmp_path / "elsewhere", check=False).returncode != 0
    assert scraper.samples()["tierfs_server_refused_connections_total", "not-found"] >= 1
    mounted.unmount()
    is_("tierfs_server_connections", "", 0)
    watches = {("tierfs_server_requests_total", f"watch {outcome}") for outcome in ("cancelled", "lost")}
    eventually(lambda: bool(watches & scraper.samples().keys()), "its watch is over")


def test_a_server_answers_on_a_port_and_goes_on_where_it_has_none(
    tmp_path: Path, data: bytes, serve: Callable[..., Serve]
) -> None:
    port = free_port()
    address = f"metrics.listen=tcp://127.0.0.1:{port}"
    server = serve(tmp_path / "models", *OPTIONS, "--set", address)
    deadline = time.monotonic() + 20
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                page = answer.read().decode()
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert {family.name for family in text_string_to_metric_families(page)} == {
        figure.name.removesuffix("_total") for figure in ALL
    }
    second = serve(tmp_path / "models", *OPTIONS, "--set", address)
    eventually(lambda: "metrics_unavailable" in second.log.read_text(), "it says that the address is taken")
    assert second.process.poll() is None and server.process.poll() is None


def test_a_wrong_address_is_a_mistake_of_the_configuration(tmp_path: Path, data: bytes) -> None:
    refused = tierfs("serve", tmp_path / "models", "--set", "metrics.listen=tcp://127.0.0.1", check=False, timeout_s=20)
    assert refused.returncode == 1
    assert "metrics.listen" in refused.stderr and "unix:/path" in refused.stderr
