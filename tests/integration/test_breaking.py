"""A mount in channel mode whose surroundings break while it is used: what readers have must stay, and be right."""

import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.processes import Mount, eventually
from tests.integration.test_channel import new_daemon, use, warm

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed"),
]
MakeMount = Callable[..., Mount]


@pytest.fixture(autouse=True)
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(tmp_path, monkeypatch, "plain")


def test_a_daemon_that_follows_another_serves_without_a_tier_that_cannot_be_used(
    tmp_path: Path, mount: MakeMount
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    content = random.Random(3).randbytes((5 << 20) + 77)
    (source / "weights.bin").write_bytes(content)
    directory = tmp_path / "warm"
    mounted = mount(
        f"dir:{source}", warm=f'path = "{directory}"\ncapacity = "1GiB"', mode="channel",
        options='restart_grace = "20s"',
    )  # fmt: skip
    warm(mounted)
    away = tmp_path / "away"
    directory.rename(away)
    directory.write_text("no directory")
    os.kill(mounted.pid, signal.SIGKILL)
    new_daemon(mounted, mounted.pid)

    assert (mounted.path / "weights.bin").read_bytes() == content
    tier = mounted.status()["tiers"]["warm"]
    assert tier["state"] == "failed" and str(directory) in tier["reason"], tier

    directory.unlink()
    away.rename(directory)
    eventually(lambda: mounted.status()["tiers"]["warm"]["objects"] == 1, "the tier is used again", within_s=60)
    assert (mounted.path / "weights.bin").read_bytes() == content
