"""A reader killed at the wrong moment must not freeze the daemon (see tierfs/fuse/session.py)."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.processes import Mount, Serve

pytestmark = pytest.mark.fuse

READER = (
    "import os, random, sys\n"
    "descriptor = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)\n"
    "import mmap\n"
    "buffer = mmap.mmap(-1, 1 << 20)\n"
    "while True:\n"
    "    os.preadv(descriptor, [buffer], random.randrange(24) << 20)\n"
)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_thousand_killed_readers_under_a_busy_loop_do_not_freeze_the_daemon(
    tmp_path: Path, serve: Callable[..., Serve], mount: Callable[..., Mount]
) -> None:
    root = tmp_path / "models"
    root.mkdir()
    (root / "model.bin").write_bytes(random.Random(1).randbytes(24 << 20))
    mounted = mount(serve(root).url, warm=f'path = "{tmp_path}/warm"\ncapacity = "1GiB"')
    path = mounted.path / "model.bin"
    assert path.read_bytes() == (root / "model.bin").read_bytes()
    stop = threading.Event()
    longest_s = 0.0

    def keep_busy() -> None:
        # Keeps the loop passing all the time, so that requests vanish between readiness and read.
        while not stop.is_set():
            os.listdir(mounted.path)

    def watch() -> None:
        nonlocal longest_s
        while not stop.is_set():
            start = time.monotonic()
            os.statvfs(mounted.path)
            longest_s = max(longest_s, time.monotonic() - start)

    threads = [threading.Thread(target=keep_busy), threading.Thread(target=watch)]
    for thread in threads:
        thread.start()
    # Forked from one small process that has everything loaded: a thousand interpreters would measure only start-up.
    program = (
        "import os, random, signal, sys, time\n"
        "rng = random.Random(3)\n"
        "for number in range(1000):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        f"        exec({READER!r})\n"
        "    time.sleep(rng.uniform(0.001, 0.02))\n"
        "    os.kill(pid, signal.SIGKILL)\n"
        "    os.waitpid(pid, 0)\n"
    )
    try:
        killer = subprocess.run([sys.executable, "-c", program, str(path)], timeout=300, capture_output=True, text=True)
        assert killer.returncode == 0, killer.stderr
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert longest_s < 5, f"the daemon stood still for {longest_s:.1f} s"
    assert mounted.status()["requests"]["running"] == 0
    assert path.read_bytes() == (root / "model.bin").read_bytes()
    os.kill(mounted.pid, signal.SIGTERM)
