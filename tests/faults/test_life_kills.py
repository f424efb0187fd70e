"""kill -9 of any process of a mount, at random, under readers: what follows is the right bytes, or one clean errno.

TIERFS_LIFE_KILLS sets how many (6 by default, 200 with --long), TIERFS_KILL_SEED the seed that is printed otherwise.
"""

import errno
import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from tests.faults.source_world import RIGHT, SourceWorld
from tests.integration.processes import eventually, runs

pytestmark = [pytest.mark.fuse, pytest.mark.slow, pytest.mark.timeout(1800)]

# What a reader may be told when the channel, and with it the mount, was killed: as of a file system that is gone.
GONE = {"ENOTCONN", "ECONNABORTED", "ENOENT", "ENODEV"}


def daemon_of(world: SourceWorld) -> int:
    """The daemon there is now."""
    channel = world.mounted.channel_pid
    pids: list[int] = []

    def found() -> bool:
        with open(f"/proc/{channel}/task/{channel}/children") as children:
            pids[:] = [int(pid) for pid in children.read().split() if runs(int(pid))]
        return len(pids) == 1

    eventually(found, "there is one daemon", 30)
    return pids[0]


@pytest.mark.parametrize("kills", [6, pytest.param(200, marks=pytest.mark.long)])
def test_any_process_may_be_killed(source_world: Callable[..., SourceWorld], kills: int) -> None:
    kills = int(os.environ.get("TIERFS_LIFE_KILLS", kills))
    seed = int(os.environ.get("TIERFS_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
    print(f"TIERFS_KILL_SEED={seed}")
    rng = random.Random(seed)
    world = source_world(timeout="30s")
    for number in range(kills):
        # Each of them at least once, however few there are.
        victim = ("server", "channel", "daemon", "reader")[number % 4 if number < 4 else rng.randrange(4)]
        readers = {model: world.start(model, rng.choice(("read", "map"))) for model in "abcd"}
        time.sleep(rng.uniform(0, 0.4))
        allowed = {RIGHT}
        if victim == "server":
            world.server.kill()
            time.sleep(rng.uniform(0, 1))
            world.server.start()
        elif victim == "daemon":
            os.kill(daemon_of(world), signal.SIGKILL)
        elif victim == "reader":
            with readers.pop(rng.choice("abcd")) as killed:
                killed.kill()
        else:
            channel = world.mounted.channel_pid
            os.kill(channel, signal.SIGKILL)
            eventually(lambda channel=channel: not runs(channel), "the channel is gone")
            allowed |= GONE
        for model, reader in readers.items():
            what = world.outcome(model, reader, within_s=60, sigbus=victim == "channel")
            assert what in allowed, f"kill {number}, of the {victim}: {model} is {what}"
        if victim == "channel":
            with pytest.raises(OSError) as refused:  # not stat: the kernel may still have the attributes
                os.listdir(world.mounted.path)
            assert refused.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
            world.mounted.mount()
    assert world.said("load_ended_by_bug", "read_ended_by_bug", "write_ended_by_bug") == 0
    world.others_are_fine()
