"""One transaction on a pool, as a context manager. Called by pool.py, and by its users through ``Pool.transaction``.

    with pool.transaction() as transaction:            WORK ──commit──► committed, durable
        transaction.write(0, b"...")                     └──any exception, a failed call──► every byte as before

What must hold:
- Whatever leaves the block by an exception, KeyboardInterrupt, SystemExit and trio.Cancelled included, rolls it back,
  and so does a call of the library that fails. A rolled back inner transaction rolls back the outer ones too, whether
  or not its exception is caught on the way: libpmemobj has one undo log for all of them.
- A transaction belongs to the thread that began it (libpmemobj keeps it in thread-local storage): every use in
  another thread is refused. There must be no await inside, since another task of the thread could begin its own.
- An interrupt (KeyboardInterrupt: main thread only) may strike before ``__exit__`` has done anything. What is left
  open then is rolled back by the next transaction of that thread, which is refused, by Pool.close, or by the recovery
  when the pool is opened again.
  An interrupt while the commit runs leaves all of it or nothing.

The stages are those of pmemobj_tx_begin(3). With no jump buffer, errors come back as return values, and the stage says
what became of the transaction; calling a function in a wrong stage would end the process, so the stage is asked first.
"""

import ctypes
import errno
import threading
from types import TracebackType
from typing import TYPE_CHECKING

from tierfs.tiers.pmem.library import Library, PmemError

if TYPE_CHECKING:
    from tierfs.tiers.pmem.pool import Pool

_STAGE_NONE, _STAGE_WORK, _STAGE_COMMITTED = 0, 1, 2
_NO_MORE_PARAMETERS = 0


class _ThisThread(threading.local):
    innermost: "Transaction | None" = None


_this_thread = _ThisThread()


class Transaction:
    """See the head of the file. Offsets are bytes from the start of the pool's root object."""

    __slots__ = ("_library", "_outer", "_pool", "_thread")

    def __init__(self, library: Library, pool: "Pool", outer: "Transaction | None" = None) -> None:
        self._library = library
        self._pool = pool
        self._outer = outer
        self._thread = 0

    def nested(self) -> "Transaction":
        """A transaction inside this one: it becomes durable when the outermost one does."""
        return Transaction(self._library, self._pool, self)

    def write(self, offset_bytes: int, data: bytes | bytearray) -> None:
        """Change bytes of the root object. Raises PmemError (ENOSPC: no room for the undo log), rolled back then."""
        self.add_range(offset_bytes, len(data))
        ctypes.memmove(self._pool.address(offset_bytes, len(data)), bytes(data), len(data))

    def add_range(self, offset_bytes: int, length_bytes: int) -> None:
        """Snapshot that range into the undo log, so that it may be changed: pmemobj_tx_add_range_direct(3).

        Raises PmemError (ENOSPC: no room for the undo log); the transaction is rolled back then.
        """
        self._check("a range is added")
        address = self._pool.address(offset_bytes, length_bytes)
        number = self._library.pmemobj_tx_add_range_direct(address, length_bytes)
        if number:
            raise self._library.pool_error("cannot snapshot", self._pool.name, number)

    def __enter__(self) -> "Transaction":
        if _this_thread.innermost is not self._outer:
            roll_back_this_thread(self._library)
            raise PmemError(
                errno.EBUSY, "another transaction was open in this thread and is rolled back", self._pool.name
            )
        handle = self._pool.handle
        try:
            self._thread = threading.get_ident()
            _this_thread.innermost = self
            number = self._library.pmemobj_tx_begin(handle, None, _NO_MORE_PARAMETERS)
            if number:
                raise self._library.pool_error("cannot begin a transaction", self._pool.name, number)
        except BaseException:
            self._roll_back()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            self._roll_back()

    def _commit(self) -> None:
        self._check("it is committed")
        self._library.pmemobj_tx_commit()
        if self._library.pmemobj_tx_stage() != _STAGE_COMMITTED:
            raise self._library.pool_error("the commit failed", self._pool.name)

    def _roll_back(self) -> None:
        """End it, and what an interrupt has left open inside it."""
        while self._is_open():
            assert _this_thread.innermost is not None
            _this_thread.innermost._end()

    def _is_open(self) -> bool:
        inner = _this_thread.innermost
        while inner is not None and inner is not self:
            inner = inner._outer
        return inner is self

    def _end(self) -> None:
        """End the innermost one, whatever its stage: one that is not committed is aborted."""
        stage = self._library.pmemobj_tx_stage()
        if stage == _STAGE_WORK:
            self._library.pmemobj_tx_abort(errno.ECANCELED)
        if stage != _STAGE_NONE:
            self._library.pmemobj_tx_end()
        _this_thread.innermost = self._outer

    def _check(self, what: str) -> None:
        if self._thread != threading.get_ident():
            raise PmemError(errno.EPERM, f"{what} in another thread than the transaction's", self._pool.name)
        if _this_thread.innermost is not self:
            raise PmemError(errno.EINVAL, f"{what} while this transaction is not the innermost one", self._pool.name)
        if self._library.pmemobj_tx_stage() != _STAGE_WORK:
            raise PmemError(errno.ECANCELED, f"{what} after the transaction was rolled back", self._pool.name)


def roll_back_this_thread(library: Library) -> None:
    """Roll back whatever is open in this thread: what an interrupt left behind."""
    while _this_thread.innermost is not None:
        _this_thread.innermost._end()
