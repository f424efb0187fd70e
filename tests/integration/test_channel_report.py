"""`tierfs report` over a channel: cold starts through the daemon, then opens that the kernel reads by itself."""

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import ENVIRONMENT, Mount, Serve, eventually, tierfs
from tests.integration.test_channel import build, channel_status, open_in_passthrough, passthrough_or_skip

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.timeout(180),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed"),
]

MIB = 1 << 20
SHARDS = {"a/1.bin": 6 * MIB, "a/2.bin": 10 * MIB, "b/1.bin": 4 * MIB, "b/2.bin": 8 * MIB}


@pytest.fixture
def mounted(
    tmp_path: Path, serve: Callable[..., Serve], mount: Callable[..., Mount], monkeypatch: pytest.MonkeyPatch
) -> Mount:
    monkeypatch.setitem(ENVIRONMENT, "TIERFS_CHANNEL_PROGRAM", str(build(tmp_path, "plain")))
    for name, size in SHARDS.items():
        path = tmp_path / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
    server = serve(tmp_path / "models", "--set", "exports..block_size=1MiB")
    made = mount(server.url, warm=f'path = "{tmp_path}/warm"\ncapacity = "64MiB"', mode="channel")
    passthrough_or_skip(made)
    return made


def reported(mounted: Mount, *options: object) -> dict[str, dict[str, Any]]:
    """The newest load of each model."""
    loads = json.loads(tierfs("report", mounted.path, "--json", *options).stdout)
    return {one["path"]: one for one in reversed(loads)}


def pixels(png: bytes) -> set[bytes]:
    """The different pixels of a picture: of an empty one there is one kind."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    position, data, depth, color = 8, b"", 0, 0
    while position < len(png):
        length, kind = struct.unpack_from(">I4s", png, position)
        body = png[position + 8 : position + 8 + length]
        assert zlib.crc32(kind + body) == struct.unpack_from(">I", png, position + 8 + length)[0]
        if kind == b"IHDR":
            _, _, depth, color = struct.unpack_from(">IIBB", body)
        data += body if kind == b"IDAT" else b""
        position += 12 + length
    assert depth == 8
    bytes_each = {2: 3, 6: 4}[color]
    plain = zlib.decompress(data)
    return {plain[at : at + bytes_each] for at in range(0, len(plain) - bytes_each, bytes_each)}


def test_cold_starts_and_opens_in_passthrough_are_told_apart(mounted: Mount, tmp_path: Path) -> None:
    source = tmp_path / "models"
    for name in ("a/1.bin", "a/2.bin"):
        assert (mounted.path / name).read_bytes() == (source / name).read_bytes()
    cold = reported(mounted)["a"]
    assert (cold["read_bytes"], cold["fetched_bytes"], cold["amplification"]) == (16 * MIB, 16 * MIB, 1)
    assert cold["passthrough_opens"] == 0 == channel_status(mounted)["passthrough_opens"]
    assert sum(cold["read_sizes"].values()) == sum(cold["places"].values()) == cold["reads"] > 0
    assert sum(one["read_bytes"] for one in cold["slices"]) == 16 * MIB
    eventually(lambda: reported(mounted)["a"]["end"] == "complete", "the load is over", within_s=20)

    # Of the next model one file is whole before its load, and opened before anything is read through the daemon.
    tierfs("warm", mounted.path / "b/1.bin")
    with ExitStack() as opened:
        opened.enter_context(open_in_passthrough(mounted, mounted.path / "b/1.bin"))
        second = opened.enter_context((mounted.path / "b/2.bin").open("rb"))
        assert second.read() == (source / "b/2.bin").read_bytes()
        assert (mounted.path / "b/1.bin").read_bytes() == (source / "b/1.bin").read_bytes()

        def held_back() -> int:
            # All of it is resident by now, or soon: but it is open through the daemon.
            (mounted.path / "b/2.bin").open("rb").close()
            return int(channel_status(mounted)["held_back_opens"])

        eventually(lambda: held_back() > 0, "an open is held back")
        load, channel = reported(mounted)["b"], channel_status(mounted)
        assert load["passthrough_opens"] == channel["passthrough_opens"] >= 2
        assert (load["read_bytes"], load["fetched_bytes"], load["end"]) == (8 * MIB, 8 * MIB, "running")
        assert [one["path"] for one in load["files"]] == ["b/2.bin"]
    assert f"{load['passthrough_opens']} opens in passthrough" in tierfs("report", mounted.path).stdout

    mounted.unmount()
    gone = ("report", mounted.path, "--state-dir", mounted.work / "state")
    tierfs(*gone, "--png", tmp_path / "p.png", "--html", tmp_path / "p.html")
    assert len(pixels((tmp_path / "p.png").read_bytes())) > 10
    page = (tmp_path / "p.html").read_text()
    assert page.count("data:image/png;base64,") == 2 and "b/2.bin" in page
    assert f"{load['passthrough_opens']} opens in passthrough" in page
