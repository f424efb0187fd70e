"""One change of a residency pool: slots are filled first, then one transaction sets and clears bits and rewrites
states. Called by pool_residency.py, in its thread.

What must hold: a slot is written only while its bit is clear; it is free again only after the transaction that cleared
its bit has committed; the copies of the bitmaps in memory and the free lists say what is in the pool, whatever fails.
"""

import heapq
from collections.abc import Iterable, Iterator
from types import TracebackType

from tierfs.tiers.pmem.pool import Pool
from tierfs.tiers.pool_layout import Table, runs

_LINE_BYTES = 64  # a bitmap is snapshotted in pieces of a cache line


class Bits:
    """The bitmap of a table, copied to ordinary memory, and the free slots of that table, lowest first.

    ``marks``: it only marks slots that another bitmap keeps, and knows no free ones.
    """

    def __init__(self, table: Table, pool: Pool, *, marks: bool = False) -> None:
        self.table = table
        self.marks = marks
        self.data = bytearray(pool.read(table.bits_offset, table.bits_bytes))
        used_bytes = len(self.data.rstrip(b"\0"))
        # A large table is mostly one free end: only the gaps before it are listed.
        self._end = min(table.count, used_bytes * 8)
        self._gaps = [] if marks else [number for number in range(self._end) if number not in self]

    @property
    def free(self) -> int:
        """How many slots are free."""
        return len(self._gaps) + self.table.count - self._end

    def pop(self) -> int | None:
        """The lowest free slot, which is not free from now on; None when there is none."""
        if self._gaps:
            return heapq.heappop(self._gaps)
        if self._end == self.table.count:
            return None
        self._end += 1
        return self._end - 1

    def push(self, number: int) -> None:
        """That slot is free again."""
        heapq.heappush(self._gaps, number)

    def __contains__(self, number: int) -> bool:
        return bool(self.data[number >> 3] >> (number & 7) & 1)

    def __iter__(self) -> Iterator[int]:
        """The numbers of the slots in use."""
        for place, byte in enumerate(self.data):
            while byte:
                low = byte & -byte
                yield place * 8 + low.bit_length() - 1
                byte ^= low


class Change:
    """Collects what shall change, as the body of a ``with`` statement, and does it at its end.

    Nothing has changed where the body or the transaction fails (PmemError).
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._filled: list[tuple[int, bytes]] = []
        self._writes: list[tuple[int, bytes]] = []
        self._bits: dict[Bits, dict[int, bool]] = {}
        self._taken: list[tuple[Bits, int]] = []

    def take(self, bits: Bits) -> int | None:
        """A free slot, in use from the end of this change on; None when there is none."""
        number = bits.pop()
        if number is not None:
            self._taken.append((bits, number))
            self._bits.setdefault(bits, {})[number] = True
        return number

    def fill(self, offset_bytes: int, data: bytes) -> None:
        """Write a slot that was taken: not undone by a failure, since nothing refers to it then."""
        self._filled.append((offset_bytes, data))

    def drop(self, bits: Bits, number: int) -> None:
        """That slot is free after this change, and not before."""
        self._bits.setdefault(bits, {})[number] = False

    def mark(self, bits: Bits, number: int, to: bool) -> None:
        """Set or clear a bit of a bitmap that only marks the slots of another one."""
        self._bits.setdefault(bits, {})[number] = to

    def write(self, offset_bytes: int, data: bytes) -> None:
        """Rewrite bytes of a slot in use."""
        self._writes.append((offset_bytes, data))

    def __enter__(self) -> "Change":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        done = False
        try:
            if kind is None:
                self._make()
                done = True
        finally:
            if not done:
                for bits, number in self._taken:
                    bits.push(number)

    def _make(self) -> None:
        for offset_bytes, data in _joined(self._filled):
            self._pool.write_persist(offset_bytes, data)
        lines = [(bits, _changed_lines(bits, numbers)) for bits, numbers in self._bits.items()]
        if not lines and not self._writes:
            return
        with self._pool.transaction() as transaction:
            for bits, changed in lines:
                for first, count in runs(sorted(changed)):
                    data = b"".join(changed[line] for line in range(first, first + count))
                    transaction.write(bits.table.bits_offset + first * _LINE_BYTES, data)
            for offset_bytes, data in self._writes:
                transaction.write(offset_bytes, data)
        for bits, changed in lines:
            for line, after in changed.items():
                bits.data[line * _LINE_BYTES : (line + 1) * _LINE_BYTES] = after
            for number, to in self._bits[bits].items():
                if not to and not bits.marks:
                    bits.push(number)


def _changed_lines(bits: Bits, numbers: dict[int, bool]) -> dict[int, bytes]:
    """The cache lines of the bitmap that differ afterwards, by their number."""
    lines: dict[int, bytearray] = {}
    for number, to in numbers.items():
        place, bit = divmod(number, 8)
        line, place = divmod(place, _LINE_BYTES)
        if line not in lines:
            lines[line] = bits.data[line * _LINE_BYTES : (line + 1) * _LINE_BYTES]
        if to:
            lines[line][place] |= 1 << bit
        else:
            lines[line][place] &= ~(1 << bit)
    return {line: bytes(data) for line, data in lines.items()}


def _joined(pieces: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Pieces that follow one another as one: each write waits for its own persistence."""
    start, parts, length = 0, list[bytes](), 0
    for offset, data in sorted(pieces):
        if parts and offset != start + length:
            yield start, b"".join(parts)
            parts, length = [], 0
        if not parts:
            start = offset
        parts.append(data)
        length += len(data)
    if parts:
        yield start, b"".join(parts)
