"""In the VM: what is killed while it promotes into real persistent memory leaves no wrong byte, and leaks no space."""

import os
import random
from pathlib import Path

import pytest
import trio

from tests import promotions
from tests.promotions import Place
from tests.vm.guest import NVME, PMEM

pytestmark = pytest.mark.vm

KILLS = int(os.environ.get("TIERFS_VM_KILLS", "1"))
DIRECTORIES_BYTES = 300 * 4096  # those of a tier, which stay


def free_bytes(path: Path) -> int:
    space = os.statvfs(path)
    return space.f_bfree * space.f_frsize


@pytest.mark.timeout(200 + 30 * KILLS)
def test_killed_while_promoting_into_persistent_memory() -> None:
    seed = int(os.environ.get("TIERFS_VM_SEED", "0")) or random.randrange(1, 1 << 30)
    print(f"TIERFS_VM_SEED={seed}")
    place = Place(PMEM / "kills" / "hot", NVME / "kills" / "warm", pretend=False)
    trio.run(promotions.prepare, place)
    before_bytes = free_bytes(PMEM)
    seen = promotions.kill_and_check(place, kills=KILLS, longest_s=2.0, seed=seed)
    print(f"{KILLS} kills: {seen}")
    assert seen.blocks > 0
    trio.run(promotions.empty, place)
    os.sync()
    assert before_bytes - free_bytes(PMEM) <= DIRECTORIES_BYTES, "space of the file system has leaked"
