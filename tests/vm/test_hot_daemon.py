"""In the VM: a real daemon with its hot tier on persistent memory, killed while it brings models there."""

import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from tests.local_tiers import object_files
from tests.vm.guest import Mounted, eventually, write_model
from tierfs.blocks.errors import TierfsError

pytestmark = pytest.mark.vm

KILLS = int(os.environ.get("TIERFS_VM_DAEMON_KILLS", "1"))
MODELS = 4
SIZE_BYTES = (6 << 20) + 77
CAPACITY = "14MiB"  # two of them


def put_into_hot(mounted: Mounted, model: str, ended: list[str]) -> None:
    """Bring a model in, until it is there or the daemon is dead."""
    try:
        mounted.ask("warm", paths=[model], tier="hot")
        ended.append("done")
    except (TierfsError, OSError) as error:
        ended.append(str(error))


@pytest.mark.timeout(200 + 60 * KILLS)
def test_a_daemon_killed_while_it_brings_models_into_hot_is_followed_by_one_that_finds_only_right_bytes(
    tmp_path: Path,
) -> None:
    source = tmp_path / "source"
    contents = [write_model(source / f"m{n}" / "weights.bin", SIZE_BYTES, seed=n) for n in range(MODELS)]
    seed = int(os.environ.get("TIERFS_VM_SEED", "0")) or random.randrange(1, 1 << 30)
    print(f"TIERFS_VM_SEED={seed}")
    point = random.Random(seed)
    cut_off = 0
    tables = {"hot": f'capacity = "{CAPACITY}"', "source": 'block_size = "256KiB"'}
    with Mounted(f"dir:{source}", tmp_path, "killed", **tables) as mounted:
        mounted.ask("warm", paths=[f"m{n}" for n in range(MODELS)], tier="warm")
        started_s = time.monotonic()
        mounted.ask("warm", paths=["m3"], tier="hot")
        usual_s = time.monotonic() - started_s
        for number in range(KILLS):
            daemon = mounted.status()["daemon"]["pid"]
            ended: list[str] = []
            thread = threading.Thread(target=put_into_hot, args=(mounted, f"m{number % MODELS}", ended))
            thread.start()
            time.sleep(point.uniform(0, usual_s))
            os.kill(daemon, signal.SIGKILL)
            thread.join(120)
            cut_off += ended != ["done"]
            eventually(partial(new_daemon, mounted, daemon), "another daemon answers")
            status = mounted.status()["tiers"]["hot"]
            assert (status["residency"], status["state"]) == ("libpmemobj pool", "ok")
            for n, content in enumerate(contents):
                assert (mounted.path / f"m{n}" / "weights.bin").read_bytes() == content
            status = mounted.status()["tiers"]["hot"]
            assert (status["corrupt_blocks"], status["failed_reads"]) == (0, 0)
            eventually(lambda: used_bytes(mounted) == allocated_bytes(mounted), "used is what its files take")
        print(f"{KILLS} kills, {cut_off} in the middle")


def used_bytes(mounted: Mounted) -> int:
    """What the hot tier says."""
    return int(mounted.status()["tiers"]["hot"]["used_bytes"])


def allocated_bytes(mounted: Mounted) -> int:
    """What its files take."""
    return sum(file.stat().st_blocks * 512 for file in object_files(mounted.hot))


def new_daemon(mounted: Mounted, before: int) -> bool:
    """Whether another daemon answers."""
    try:
        return bool(mounted.status()["daemon"]["pid"] != before)
    except (TierfsError, OSError):
        return False
