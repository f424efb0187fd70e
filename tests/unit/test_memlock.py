"""How much memory may be pinned: the daemon raises its own limit, and what is still too little is a reason."""

import multiprocessing
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierfs.blocks.errors import SourceUnavailable
from tierfs.testing.verbs import Fabric
from tierfs.transport.rdma import memlock
from tierfs.transport.rdma.pyverbs_device import PyVerbs

MIB = 1 << 20
IPC_LOCK = f"CapEff:\t{1 << 14:016x}"


def in_child(call: Callable[[], Any]) -> Any:
    """What it returns in a process that may have its limits lowered for good."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def run() -> None:
        theirs.send(call())

    child = fork.Process(target=run)
    child.start()
    assert ours.poll(20), "no answer"
    answer = ours.recv()
    child.join(20)
    return answer


def unprivileged(soft: int, hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    if os.geteuid() == 0:
        os.setuid(65534)


def test_the_soft_limit_becomes_the_hard_one_before_memory_is_registered() -> None:
    def asked() -> tuple[int | None, tuple[int, int]]:
        unprivileged(1 * MIB, 4 * MIB)
        return PyVerbs().lockable_bytes(), resource.getrlimit(resource.RLIMIT_MEMLOCK)

    assert in_child(asked) == (4 * MIB, (4 * MIB, 4 * MIB))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has the right that makes the limit not count")
def test_the_right_to_lock_counts_more_than_the_limit_unless_the_daemon_will_not_have_it(tmp_path: Path) -> None:
    process = tmp_path / "proc/self"
    process.mkdir(parents=True)
    (process / "status").write_text(f"Name:\tx\n{IPC_LOCK}\n")
    (process / "uid_map").write_text("         0          0 4294967295\n")

    def asked() -> tuple[int | None, int | None]:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (MIB, MIB))
        return memlock.lockable_bytes(tmp_path), memlock.lockable_bytes(tmp_path, keeps_rights=False)

    assert in_child(asked) == (None, MIB)
    (process / "uid_map").write_text("         0       1000          1\n")
    assert in_child(asked) == (MIB, MIB), "root of another user namespace has no such right"


@pytest.mark.parametrize("lockable", [None, 64 * MIB])
def test_enough_is_no_reason(lockable: int | None) -> None:
    memlock.check_limit(lockable, whole_bytes=64 * MIB, key="memory.limit")


def test_too_little_is_a_reason_with_the_key_and_what_raises_it() -> None:
    with pytest.raises(SourceUnavailable, match=r"64MiB of memory \(memory.limit\).*is 8MiB; raise.*LimitMEMLOCK"):
        memlock.check_limit(8 * MIB, whole_bytes=64 * MIB, key="memory.limit")


def test_the_fake_device_has_a_limit_too() -> None:
    assert Fabric(pin_limit_bytes=MIB).machine().lockable_bytes() == MIB
