"""What the tests of persistent memory share: where their files lie, and processes that die at a random point.

On a machine without persistent memory the same code runs over /dev/shm with PMEM_IS_PMEM_FORCE=1, which libpmem reads
when it is loaded: hence set here, before any test of such a module runs. TIERFS_TEST_DAX names a directory on a real
DAX file system.
"""

import functools
import os
import random
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
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


def killed_at_a_random_point(
    work: Callable[[Callable[[bytes], object]], None], random_point: random.Random, longest_s: float
) -> bytes:
    """Run ``work`` in a child process, which kill -9 ends at a random moment after it first told something.

    ``work`` gets a function to tell bytes by; all that was told is returned. No pool may be open here.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work(functools.partial(os.write, write_end))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(write_end)
    with open(read_end, "rb", buffering=0) as pipe:
        told = pipe.read(1)
        if told:
            end_s = time.monotonic() + random_point.random() * longest_s
            while (left_s := end_s - time.monotonic()) > 0 and select.select([pipe], [], [], left_s)[0]:
                told += pipe.read(1 << 16) or b""
        os.kill(child, signal.SIGKILL)
        told += pipe.readall() or b""
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status), "the child ended by itself"
    assert os.WTERMSIG(status) == signal.SIGKILL
    return told
