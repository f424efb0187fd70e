"""Loads of models over a real mount: their progress in `status` and `top`, and what is kept of them over daemons."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import ENVIRONMENT, Mount, Serve, eventually, tierfs
from tierfs.control.registry import find
from tierfs.control.socket import ask

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(180)]

MIB = 1 << 20
SHARDS = {"a/1.bin": 6 * MIB, "a/2.bin": 10 * MIB}


@pytest.fixture
def mounted(tmp_path: Path, serve: Callable[..., Serve], mount: Callable[..., Mount]) -> Mount:
    (tmp_path / "models" / "a").mkdir(parents=True)
    for name, size in SHARDS.items():
        (tmp_path / "models" / name).write_bytes(os.urandom(size))
    server = serve(tmp_path / "models", "--set", "exports..block_size=1MiB")
    return mount(server.url, warm=f'path = "{tmp_path}/warm"\ncapacity = "64MiB"')


def kept(mounted: Mount) -> list[dict[str, Any]]:
    return list(ask(find(str(mounted.path)), "loads"))


def test_a_load_is_in_status_while_it_goes_on_and_is_kept_when_it_is_over(mounted: Mount, tmp_path: Path) -> None:
    assert mounted.status()["loads"] == []
    with (mounted.path / "a/1.bin").open("rb") as file:
        assert len(file.read()) == 6 * MIB
    (load,) = mounted.status()["loads"]
    assert (load["path"], load["kind"], load["bytes"]) == ("a", "reading", 16 * MIB)
    assert load["covered_bytes"] == 6 * MIB <= load["fetched_bytes"]
    assert load["eta_s"] is not None and load["eta_s"] > 0 and load["bytes_per_s"] > 0
    seen = json.loads(tierfs("top", mounted.path, "--json", "--count", "1", "--interval", "0.2s").stdout)
    assert [one["path"] for one in seen["loads"]] == ["a"]
    assert "reading a 37 %" in tierfs("top", mounted.path, "--count", "1", "--interval", "0.2s").stdout
    assert (mounted.path / "a/2.bin").read_bytes() == (tmp_path / "models/a/2.bin").read_bytes()
    (load,) = mounted.status()["loads"]
    assert (load["covered_bytes"], load["eta_s"]) == (16 * MIB, 0)
    eventually(lambda: mounted.status()["loads"] == [], "it is over", within_s=15)
    (record,) = kept(mounted)
    assert (record["path"], record["end"], record["read_bytes"]) == ("a", "complete", 16 * MIB)
    assert (record["fetched_bytes"], record["amplification"]) == (16 * MIB, 1)
    assert sum(one["source_bytes"] for one in record["slices"]) == 16 * MIB
    assert sum(one["read_bytes"] for one in record["slices"]) == 16 * MIB
    assert {one["path"] for one in record["files"]} == set(SHARDS)
    assert sum(record["read_sizes"].values()) == sum(record["places"].values()) == record["reads"] > 0

    # A daemon that is told to end keeps what goes on; the next one counts on.
    mounted.unmount()
    mounted.mount()
    assert len((mounted.path / "a/1.bin").read_bytes()) == 6 * MIB
    mounted.unmount()
    mounted.mount()
    assert [(one["number"], one["end"]) for one in kept(mounted)] == [(2, "stopped"), (1, "complete")]
    assert kept(mounted)[0]["fetched_bytes"] == 0 < kept(mounted)[0]["warm_bytes"]


def test_what_is_warmed_is_in_status_meanwhile_and_not_kept(mounted: Mount) -> None:
    tierfs("warm", mounted.path / "a")
    (load,) = mounted.status()["loads"]
    assert (load["kind"], load["resident_bytes"], load["tiers"], load["eta_s"]) == (
        "bringing", 16 * MIB, {"warm": 16 * MIB}, 0,
    )  # fmt: skip
    assert kept(mounted) == []


def test_of_a_killed_daemon_what_was_seen_is_kept(mounted: Mount) -> None:
    end_s = time.monotonic() + 60
    files = list((mounted.work / "state" / "mounts").glob("*/loads/*.json"))
    with (mounted.path / "a/1.bin").open("rb") as file:
        while not files:  # written while it goes on, every 10 s
            assert time.monotonic() < end_s
            file.read(64 << 10)
            time.sleep(0.5)
            files = list((mounted.work / "state" / "mounts").glob("*/loads/*.json"))
    mounted.kill()
    mounted.unmount()
    mounted.mount()
    assert [one["end"] for one in kept(mounted)] == ["killed"]


def test_a_report_as_table_json_picture_and_page_mounted_and_not(
    mounted: Mount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no load is known yet" in tierfs("report", mounted.path).stdout
    assert len((mounted.path / "a/2.bin").read_bytes()) == 10 * MIB
    now = json.loads(tierfs("report", mounted.path, "--json").stdout)
    assert [one["slowest_file"]["path"] for one in now] == ["a/2.bin"]
    assert now[0]["end"] in ("running", "quiet")  # the latter where the machine took more than 10 s for the command
    mounted.unmount()

    gone = ("report", mounted.path, "--state-dir", mounted.work / "state")
    (load,) = json.loads(tierfs(*gone, "--json").stdout)
    assert (load["read_bytes"], load["mountpoint"]) == (10 * MIB, str(mounted.path))
    assert load["end"] in ("stopped", "quiet")
    table = tierfs(*gone).stdout
    assert load["end"] in table and "10MiB" in table and "a/2.bin" in table
    tierfs(*gone, "--png", tmp_path / "p.png", "--html", tmp_path / "p.html")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "p.html").read_text()
    assert "data:image/png;base64," in page and "a/2.bin" in page and "http" not in page
    assert tierfs(*gone, "--load", "7", check=False).stderr == "tierfs: no such load is known\n"
    assert tierfs("report", tmp_path, "--state-dir", mounted.work / "state", "--json").stdout == "[]\n"

    (tmp_path / "without").mkdir()
    missing = "raise ModuleNotFoundError(\"No module named 'matplotlib'\")"
    (tmp_path / "without" / "matplotlib.py").write_text(missing)
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", f"{tmp_path / 'without'}:{ENVIRONMENT['PYTHONPATH']}")
    failed = tierfs(*gone, "--png", tmp_path / "q.png", check=False)
    assert (failed.returncode, failed.stderr) == (
        1, "tierfs: a picture needs matplotlib: pip install 'tierfs[report]'\n",
    )  # fmt: skip
    assert "a/2.bin" in tierfs(*gone).stdout
