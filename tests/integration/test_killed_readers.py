"""A reader killed at the wrong moment must not freeze the daemon (see tierfs/fuse/session.py)."""

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.processes import ENVIRONMENT, ROOT

pytestmark = pytest.mark.fuse

KILLS = 1000
BURN_S = 0.01
FROZEN_S = 2.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_thousand_killed_readers_under_a_busy_loop_do_not_freeze_the_daemon(tmp_path: Path) -> None:
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    program = ROOT / "tests" / "integration" / "busy_daemon.py"
    daemon = subprocess.Popen(
        [sys.executable, str(program), str(mountpoint), str(BURN_S * 1000)], stdout=subprocess.PIPE, env=ENVIRONMENT
    )
    assert daemon.stdout is not None
    beats = daemon.stdout.fileno()

    def beat(count: int) -> None:
        """See the loop pass; nothing here touches the mount, since any request would end a freeze."""
        seen = 0
        while seen < count:
            ready, _, _ = select.select([beats], [], [], FROZEN_S)
            assert ready, f"the loop stood still for {FROZEN_S} s after a reader was killed"
            seen += len(os.read(beats, 4096))

    rng = random.Random(1)
    try:
        beat(20)
        while not os.path.ismount(mountpoint):
            beat(1)
        for _ in range(KILLS):
            reader = os.fork()
            if reader == 0:
                descriptor = os.open(mountpoint / "f", os.O_RDONLY)
                while True:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.pread(descriptor, 4096, rng.randrange(1000) * 4096)
            time.sleep(rng.uniform(0.5, 3) * BURN_S)
            os.kill(reader, signal.SIGKILL)
            os.waitpid(reader, 0)
            beat(3)
        assert (mountpoint / "f").stat().st_size == 4 << 20
    finally:
        subprocess.run(["umount", "-l", mountpoint], capture_output=True)
        daemon.terminate()
        daemon.communicate(timeout=10)
