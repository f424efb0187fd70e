"""Publishing over a model again and again while sixteen processes read and map it.

TIERFS_PUBLICATIONS sets how often (5 by default; 50, and in both modes, with --long).
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.processes import Mount, Serve
from tests.integration.version_reader import publish

READERS = 16
PAGES = 2560  # two and a half blocks
SEEN_WITHIN_S = 8.0  # rescan and metadata_ttl, and what they take on two busy cores
PROGRAM = Path(__file__).with_name("version_reader.py")

pytestmark = [pytest.mark.fuse, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("mode", "times"),
    [
        ("channel", 5),
        pytest.param("channel", 50, marks=pytest.mark.long),
        pytest.param("direct", 50, marks=pytest.mark.long),
    ],
)
def test_each_reader_gets_one_version_whole_or_estale(
    tmp_path: Path, serve: Callable[..., Serve], mount: Callable[..., Mount], mode: str, times: int
) -> None:
    times = int(os.environ.get("TIERFS_PUBLICATIONS", times))
    root = tmp_path / "models"
    root.mkdir()
    stop, news = tmp_path / "stop", tmp_path / "news"
    publish(root / "model.bin", 1, PAGES, news)
    server = serve(root, "--set", "exports..rescan=200ms")
    mounted = mount(
        server.url,
        warm=f'path = "{tmp_path}/warm"\ncapacity = "64MiB"',
        mode=mode,
        options='metadata_ttl = "500ms"\n',
    )
    path = mounted.path / "model.bin"
    readers: list[subprocess.Popen[str]] = []
    try:
        for number in range(READERS):
            command = [sys.executable, str(PROGRAM), "map" if number % 2 else "read", str(path), str(stop), str(news)]
            readers.append(
                subprocess.Popen(
                    [*command, str(SEEN_WITHIN_S)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        for version in range(2, times + 2):
            time.sleep(1.5)
            publish(root / "model.bin", version, PAGES, news)
        time.sleep(SEEN_WITHIN_S + 1)  # now every new open has to find the last one
        stop.touch()
        outcomes = []
        for reader in readers:
            printed, complaint = reader.communicate(timeout=60)
            assert reader.returncode == 0, complaint
            outcomes.append(json.loads(printed))
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()
    print(outcomes)
    assert min(outcome["rounds"] - outcome["stale"] for outcome in outcomes) >= 2
    assert max(outcome["longest_s"] for outcome in outcomes) < 30
    assert "_by_bug" not in mounted.log()
