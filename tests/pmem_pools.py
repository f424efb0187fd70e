"""What the tests of persistent memory share: where their files lie, and processes that die at a random point.

On a machine without persistent memory the same code runs over /dev/shm with PMEM_IS_PMEM_FORCE=1, which libpmem reads
when it is loaded: hence set here, before any test of such a module runs. TIERFS_TEST_DAX names a directory on a real
DAX file system.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierfs.tiers.pmem.library import unavailable

DAX = os.environ.get("TIERFS_TEST_DAX", "")
if not DAX:
    os.environ["PMEM_IS_PMEM_FORCE"] = "1"


def needs_library() -> None:
    """Skip where libpmemobj is not installed."""
    if unavailable():
        pytest.skip(unavailable())


def persistent_folder() -> Iterator[Path]:
    """An empty directory on persistent memory, or on what stands for it; the body of a fixture."""
    needs_library()
    folder = Path(tempfile.mkdtemp(prefix="tierfs-test-", dir=DAX or "/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def killed_at_a_random_point(script: str, arguments: list[str], random_point: random.Random, longest_s: float) -> bytes:
    """Run a script; kill -9 it at a random moment after its first byte of output. Everything it wrote."""
    child = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]
    )
    assert child.stdout is not None
    with child.stdout:
        first = os.read(child.stdout.fileno(), 1)
        assert first, "the child ended before it began"
        try:
            child.wait(random_point.random() * longest_s)
        except subprocess.TimeoutExpired:
            pass
        child.send_signal(signal.SIGKILL)
        written = first + child.stdout.read()
    assert child.wait() == -signal.SIGKILL, "the child ended by itself"
    return written
