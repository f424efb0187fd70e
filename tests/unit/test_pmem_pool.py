"""libpmemobj by ctypes: a transaction that raises leaves nothing behind, a killed process leaves a whole pool, and what
is no pool of ours is refused without harm.
"""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.pmem_pools import killed_at_a_random_point, persistent_folder
from tierfs.tiers.pmem.checking import check
from tierfs.tiers.pmem.library import PmemError, load
from tierfs.tiers.pmem.pool import MIN_POOL_BYTES, Pool

LAYOUT = "test"
ROOT_BYTES = 64 << 10
POOL_BYTES = 16 << 20
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder() -> Iterator[Path]:
    yield from persistent_folder()


@pytest.fixture
def pool(folder: Path) -> Iterator[Pool]:
    pool = Pool.create(folder / "p", LAYOUT, pool_bytes=POOL_BYTES, root_bytes=ROOT_BYTES)
    yield pool
    pool.close()


def refused(error_number: int, match: str | None = None) -> "pytest.RaisesExc[PmemError]":
    return pytest.raises(PmemError, match=match, check=lambda error: error.errno == error_number)


def test_new_pool_is_zeros_and_what_is_committed_is_there_when_it_is_opened_again(folder: Path, pool: Pool) -> None:
    assert pool.read(0, ROOT_BYTES) == bytes(ROOT_BYTES)
    with pool.transaction() as transaction:
        transaction.write(100, b"one")
        transaction.write(ROOT_BYTES - 3, b"end")
    pool.write_persist(200, b"direct")
    pool.write_persist(300, b"cleared")
    pool.clear_persist(301, 6)
    pool.close()
    assert check(folder / "p", LAYOUT)
    again = Pool.open(folder / "p", LAYOUT)
    assert again.root_bytes == ROOT_BYTES
    for offset, expected in ((100, b"one"), (ROOT_BYTES - 3, b"end"), (200, b"direct"), (300, b"c" + bytes(6))):
        assert again.read(offset, len(expected)) == expected
    again.close()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_transaction_that_raises_leaves_nothing_behind(folder: Path, pool: Pool, kind: type[BaseException]) -> None:
    with pool.transaction() as transaction:
        transaction.write(0, b"before")
    with pytest.raises(kind), pool.transaction() as transaction:
        transaction.write(0, b"AFTER!")
        transaction.write(ROOT_BYTES - 6, b"AFTER!")
        assert pool.read(0, 6) == b"AFTER!"  # seen inside
        raise kind
    assert (pool.read(0, 6), pool.read(ROOT_BYTES - 6, 6)) == (b"before", bytes(6))
    with pool.transaction() as transaction:  # and the next one works
        transaction.write(10, b"next")
    pool.close()
    again = Pool.open(folder / "p", LAYOUT)
    assert again.read(0, 14) == b"before" + bytes(4) + b"next"
    again.close()


def test_cancelled_task_rolls_back(pool: Pool) -> None:
    async def main() -> None:
        with trio.CancelScope() as scope, pool.transaction() as transaction:
            transaction.write(0, b"half")
            scope.cancel()
            await trio.lowlevel.checkpoint()
        assert scope.cancelled_caught

    trio.run(main)
    assert pool.read(0, 4) == bytes(4)


def test_nested_transactions_become_durable_together_or_not_at_all(pool: Pool) -> None:
    with pool.transaction() as outer:
        outer.write(0, b"a")
        with outer.nested() as inner:
            inner.write(1, b"b")
            with inner.nested() as innermost:
                innermost.write(2, b"c")
        outer.write(3, b"d")
    assert pool.read(0, 4) == b"abcd"
    with pytest.raises(ValueError), pool.transaction() as outer:
        with outer.nested() as inner:
            inner.write(0, b"X")
        raise ValueError
    assert pool.read(0, 4) == b"abcd"


def test_swallowed_error_of_an_inner_transaction_does_not_let_the_outer_one_commit(pool: Pool) -> None:
    with refused(errno.ECANCELED), pool.transaction() as outer:
        outer.write(0, b"a")
        try:
            with outer.nested() as inner:
                inner.write(1, b"b")
                raise ValueError
        except ValueError:
            pass
        with refused(errno.ECANCELED):
            outer.write(2, b"c")
    assert pool.read(0, 3) == bytes(3)


def test_commit_that_cannot_be_made_is_an_error_and_leaves_nothing(pool: Pool) -> None:
    with refused(errno.ECANCELED), pool.transaction() as transaction:
        transaction.write(0, b"a")
        load().pmemobj_tx_abort(errno.ENOSPC)  # as when the library gives up by itself
    assert pool.read(0, 1) == bytes(1)


def test_undo_log_that_does_not_fit_rolls_back_and_says_so(folder: Path) -> None:
    root_bytes = 4 << 20  # of the 8 MiB, 3 are lanes: an undo log of 4 MiB has no room
    pool = Pool.create(folder / "p", LAYOUT, pool_bytes=MIN_POOL_BYTES, root_bytes=root_bytes)
    with refused(errno.ENOMEM), pool.transaction() as transaction:
        transaction.write(0, b"x")
        transaction.write(64, b"y" * (root_bytes - 64))
    assert pool.read(0, root_bytes) == bytes(root_bytes)
    with pool.transaction() as transaction:
        transaction.write(0, b"ok")
    assert pool.read(0, 2) == b"ok"
    pool.close()


def test_a_transaction_belongs_to_its_thread(pool: Pool) -> None:
    errors: list[int | None] = []

    def elsewhere() -> None:
        try:
            transaction.write(0, b"b")
        except PmemError as error:
            errors.append(error.errno)
        with pool.transaction() as mine:  # one of its own is fine
            mine.write(1, b"c")

    with pool.transaction() as transaction:
        transaction.write(0, b"a")
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert errors == [errno.EPERM]
    assert pool.read(0, 2) == b"ac"


def test_what_was_left_open_is_rolled_back_by_the_next_transaction_which_is_refused(pool: Pool) -> None:
    pool.transaction().__enter__().write(0, b"left")
    with refused(errno.EBUSY), pool.transaction():
        raise AssertionError("not reached")
    assert pool.read(0, 4) == bytes(4)
    with pool.transaction() as transaction:
        transaction.write(0, b"next")
    pool.transaction().__enter__().write(0, b"left")
    pool.close()
    again = Pool.open(Path(pool.name), LAYOUT)
    assert again.read(0, 4) == b"next"
    again.close()


def test_what_an_interrupt_left_open_inside_goes_with_the_outer_one(pool: Pool) -> None:
    with pytest.raises(KeyboardInterrupt), pool.transaction() as outer:
        outer.write(0, b"a")
        inner = outer.nested()
        inner.__enter__().write(1, b"b")
        raise KeyboardInterrupt  # where the inner one has not been left yet
    assert pool.read(0, 2) == bytes(2)
    with refused(errno.EINVAL), pool.transaction() as outer:
        outer.nested().__enter__().write(1, b"b")
    assert pool.read(0, 2) == bytes(2)
    with pool.transaction() as outer:
        outer.write(0, b"ok")
    assert pool.read(0, 2) == b"ok"


def test_transaction_that_is_over_or_not_the_innermost_one_is_refused(pool: Pool) -> None:
    with pool.transaction() as outer, outer.nested() as inner:
        inner.write(0, b"x")
        with refused(errno.EINVAL):
            outer.write(0, b"y")
    with refused(errno.EINVAL):
        outer.write(0, b"z")
    pool.close()
    with refused(errno.EBADF), pool.transaction():
        raise AssertionError("not reached")
    with refused(errno.EBADF):
        pool.read(0, 1)
    pool.close()


_INTERRUPTED = """
import random, signal, sys, time
from pathlib import Path
from tierfs.tiers.pmem.library import PmemError
from tierfs.tiers.pmem.pool import Pool

point = random.Random(int(sys.argv[2]))
pool = Pool.open(Path(sys.argv[1]), "test")

def change(data):
    with pool.transaction() as outer:
        for offset in range(0, 512, 64):
            outer.write(offset, data)
        with outer.nested() as inner:
            for offset in range(512, 1024, 64):
                inner.write(offset, data)

started_s = time.perf_counter()
for _ in range(100):
    change(bytes(4))
usual_s = (time.perf_counter() - started_s) / 100
counts = {"rolled back": 0, "committed": 0}
for number in range(1, 1500):
    data = number.to_bytes(4, "little")
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-6 + point.random() * 2 * usual_s)
        try:
            change(data)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (KeyboardInterrupt, PmemError) as error:
        if isinstance(error, PmemError):
            assert error.errno == 16, error
    try:
        with pool.transaction():
            pass
    except PmemError as error:
        assert error.errno == 16, error
    cells = {pool.read(offset, 4) for offset in range(0, 1024, 64)}
    assert len(cells) == 1, (number, cells)
    counts["committed" if cells == {data} else "rolled back"] += 1
print(counts)
assert all(counts.values()), counts
pool.close()
"""


def test_interrupts_at_random_points_leave_all_or_nothing(folder: Path, pool: Pool) -> None:
    pool.close()
    # The handler of SIGALRM raises as that of SIGINT does: anywhere in the main thread.
    script = _INTERRUPTED.replace("point =", "signal.signal(signal.SIGALRM, signal.default_int_handler)\npoint =", 1)
    seed = random.randrange(1 << 30)
    print("seed", seed)
    subprocess.run([sys.executable, "-c", script, str(folder / "p"), str(seed)], check=True, cwd=ROOT, timeout=100)
    assert check(folder / "p", LAYOUT)


def count_for_ever(path: Path, tell: Callable[[bytes], object]) -> None:
    pool = Pool.open(path, LAYOUT)
    number = int.from_bytes(pool.read(0, 4), "little")
    while True:
        number += 1
        data = number.to_bytes(4, "little")
        with pool.transaction() as transaction:
            for offset in range(0, 4096, 64):
                transaction.write(offset, data)
        tell(data)


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(400)])])
def test_kill_at_random_points_leaves_a_whole_pool(folder: Path, pool: Pool, kills: int) -> None:
    pool.close()
    seed = random.randrange(1 << 30)
    print("seed", seed)
    point = random.Random(seed)
    seen = 0
    for _ in range(kills):
        told = killed_at_a_random_point(partial(count_for_ever, folder / "p"), point, 0.01)
        told = told[: len(told) // 4 * 4]
        assert check(folder / "p", LAYOUT)
        again = Pool.open(folder / "p", LAYOUT)
        cells = {again.read(offset, 4) for offset in range(0, 4096, 64)}
        again.close()
        assert len(cells) == 1, "part of a transaction"
        number = int.from_bytes(cells.pop(), "little")
        committed = int.from_bytes(told[-4:], "little") if told else seen
        assert committed <= number <= committed + 1, "what was committed is there, and nothing else"
        seen = number
    assert seen >= kills


def test_pool_of_another_layout_is_refused(folder: Path, pool: Pool) -> None:
    pool.close()
    for call in (Pool.open, check):
        with refused(errno.EINVAL):
            call(folder / "p", "another")
    Pool.open(folder / "p", LAYOUT).close()


@pytest.mark.parametrize("left_bytes", [0, 100, 4096, 1 << 20, 3 << 20, 5 << 20, POOL_BYTES - 4096])
def test_truncated_pool_is_refused_and_this_process_lives(folder: Path, pool: Pool, left_bytes: int) -> None:
    pool.close()
    os.truncate(folder / "p", left_bytes)
    with refused(errno.EINVAL):
        Pool.open(folder / "p", LAYOUT)


@pytest.mark.parametrize("what", ["noise", "zeros", "header", "logs and heap"])
def test_damaged_pool_is_refused_and_this_process_lives(folder: Path, pool: Pool, what: str) -> None:
    pool.close()
    with (folder / "p").open("r+b") as file:
        file.seek({"noise": 0, "zeros": 0, "header": 24, "logs and heap": 8192}[what])
        length = 4096 if what == "header" else POOL_BYTES - file.tell()
        file.write(bytes(length) if what == "zeros" else random.Random(1).randbytes(length))
    with refused(errno.EINVAL):
        Pool.open(folder / "p", LAYOUT)


def test_pool_that_is_open_is_refused_here_and_in_another_process(folder: Path, pool: Pool) -> None:
    with refused(errno.EAGAIN, "open already"):
        Pool.open(folder / "p", LAYOUT)
    with refused(errno.EAGAIN):
        check(folder / "p", LAYOUT)
    script = (
        "import sys; from pathlib import Path; from tierfs.tiers.pmem.pool import Pool\n"
        "Pool.open(Path(sys.argv[1]), 'test')"
    )
    other = subprocess.run([sys.executable, "-c", script, folder / "p"], capture_output=True, text=True, cwd=ROOT)
    assert "it is open already, in another process" in other.stderr
    with pool.transaction() as transaction:  # this one is none the worse
        transaction.write(0, b"x")


def test_a_process_that_dies_leaves_the_pool_free(folder: Path, pool: Pool) -> None:
    pool.close()
    script = (
        "import os, sys; from pathlib import Path; from tierfs.tiers.pmem.pool import Pool\n"
        "t = Pool.open(Path(sys.argv[1]), 'test').transaction().__enter__(); t.write(0, b'half')\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script, folder / "p"], cwd=ROOT).returncode == -signal.SIGKILL
    again = Pool.open(folder / "p", LAYOUT)
    assert again.read(0, 4) == bytes(4)
    again.close()


def test_creating_says_what_is_wrong(folder: Path, pool: Pool) -> None:
    with refused(errno.EEXIST):
        Pool.create(folder / "p", LAYOUT, pool_bytes=MIN_POOL_BYTES, root_bytes=ROOT_BYTES)
    with refused(errno.EINVAL):
        Pool.create(folder / "q", LAYOUT, pool_bytes=1 << 20, root_bytes=ROOT_BYTES)
    with refused(errno.ENOMEM, "does not fit"):
        Pool.create(folder / "q", LAYOUT, pool_bytes=MIN_POOL_BYTES, root_bytes=64 << 20)
    with refused(errno.ENOENT):
        Pool.create(folder / "no" / "q", LAYOUT, pool_bytes=MIN_POOL_BYTES, root_bytes=ROOT_BYTES)
    with refused(errno.ENOENT):
        Pool.open(folder / "q", LAYOUT)
    assert sorted(path.name for path in folder.iterdir()) == ["p"]


def test_bytes_outside_the_root_object_are_never_touched(pool: Pool) -> None:
    for offset, length in ((-1, 1), (ROOT_BYTES, 1), (0, ROOT_BYTES + 1)):
        with pytest.raises(AssertionError):
            pool.read(offset, length)
        with pytest.raises(AssertionError), pool.transaction() as transaction:
            transaction.add_range(offset, length)


def test_a_library_that_cannot_be_loaded_is_a_clear_message(tmp_path: Path) -> None:
    (tmp_path / "libpmemobj.so.1").write_text("no library")
    script = (
        "from tierfs.blocks.errors import TierFailed\nfrom tierfs.tiers.pmem.library import load, unavailable\n"
        "print(unavailable())\ntry: load()\nexcept TierFailed as error: print(error)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
    )  # fmt: skip
    reason, raised = found.stdout.splitlines()
    assert reason == raised
    assert "cannot be loaded" in reason
    assert "install the packages libpmemobj1 libpmem1" in reason
