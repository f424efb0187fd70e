"""A discrete-event simulator of the read path: readers, a source, the pool, and the real readahead and budget policies.

Tests of readahead call it to assert what a policy does to whole workloads: time, stalls, bytes fetched for nothing.
Pure and deterministic: no clock, no trio; random patterns take a seeded `random.Random`. Times are simulated seconds.

    Reader ── request ──▶ Readahead.observe ── Plan ──▶ prefetch queue (bounded) ──┐ as the budget allows
      ▲                                                                            ▼
      └── all blocks of the request there ◀── pool ◀── Source: slots, latency, one shared pipe; demand first

What the model leaves out: hot and warm are one thing here (`keep`: a block that arrived once is never fetched again,
the pool only bounds what was prefetched and not read), and readers take no CPU from each other.
"""

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from tierfs.blocks.spans import block_count
from tierfs.policy.budget import BudgetConfig, Usage, prefetch_blocks, prefetch_fetches
from tierfs.policy.readahead import Readahead, ReadaheadConfig


class Request(NamedTuple):
    """A reader's request: which file (a place in ``Simulation.file_bytes``), and which bytes of it."""

    file: int
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Asks for its requests in order, ``depth`` of them at once, and takes each one's bytes at ``bytes_per_s``."""

    name: str
    requests: Sequence[Request]
    start_s: float = 0.0
    depth: int = 1
    bytes_per_s: float = 4e9


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where misses go: so many fetches at once, each waits ``latency_s`` and then for its turn in one pipe."""

    bytes_per_s: float = 1e9
    latency_s: float = 0.001
    slots: int = 16


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What is simulated. ``file_bytes`` are shards in the order a loader opens them."""

    file_bytes: Sequence[int]
    readers: Sequence[Reader]
    readahead: ReadaheadConfig | None  # None: no readahead at all
    source: Source = Source()
    block_bytes: int = 4 << 20
    pool_blocks: int = 256
    queue_blocks: int = 256
    keep: bool = True  # a warm tier keeps what arrived


@dataclass
class ReaderReport:
    """One reader: a stall is a request that had to wait for the source."""

    started_s: float = 0.0
    finished_s: float = 0.0
    read_bytes: int = 0
    stalls: int = 0
    stalled_s: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Its speed from its first request to its last byte."""
        return self.read_bytes / max(1e-9, self.finished_s - self.started_s)


@dataclass
class Report:
    """What happened. Needed blocks are those some request touched; bytes count whole blocks."""

    duration_s: float = 0.0
    fetched_bytes: int = 0
    needed_bytes: int = 0
    prefetched_blocks: int = 0
    unused_blocks: int = 0  # prefetched and never read
    dropped_blocks: int = 0  # planned, but the queue was full
    readers: dict[str, ReaderReport] = field(default_factory=dict)

    @property
    def amplification(self) -> float:
        """Fetched over needed bytes; 1.0 is perfect."""
        return self.fetched_bytes / max(1, self.needed_bytes)

    @property
    def stalls(self) -> int:
        """Of all readers."""
        return sum(reader.stalls for reader in self.readers.values())


class Block(NamedTuple):
    """One block of one file."""

    file: int
    block: int


@dataclass
class _Waiting:
    """A request under way: how many of its blocks have not arrived."""

    reader: int
    request: Request
    since_s: float
    missing: int = 0


@dataclass
class _ReaderState:
    reader: Reader
    report: ReaderReport
    next: int = 0
    active: int = 0


def simulate(simulation: Simulation) -> Report:
    """Run until every reader has all its bytes and nothing is on its way any more."""
    return _Run(simulation).run()


class _Run:
    def __init__(self, simulation: Simulation) -> None:
        self._sim = simulation
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._event_number = 0
        self._report = Report()
        self._readahead = [
            Readahead(simulation.readahead, size_bytes=size, block_bytes=simulation.block_bytes)
            if simulation.readahead
            else None
            for size in simulation.file_bytes
        ]
        self._readers = [_ReaderState(reader, ReaderReport()) for reader in simulation.readers]
        self._report.readers = {state.reader.name: state.report for state in self._readers}
        self._pool: OrderedDict[Block, None] = OrderedDict()  # least recently used first
        self._unread: set[Block] = set()  # in the pool, prefetched, nobody read them
        self._waiters: dict[Block, list[_Waiting]] = {}  # blocks asked for and not arrived
        self._demand: deque[Block] = deque()
        self._planned: deque[Block] = deque()
        self._fetching: dict[Block, bool] = {}  # whether demand started it
        self._pipe_free_s = 0.0
        self._needed: set[Block] = set()
        self._prefetched: set[Block] = set()

    def run(self) -> Report:
        for index, state in enumerate(self._readers):
            self._at(state.reader.start_s, partial(self._start, index))
        while self._events:
            self._now_s, _, event = heapq.heappop(self._events)
            event()
            self._fetch()
        assert all(state.next == len(state.reader.requests) and not state.active for state in self._readers)
        report = self._report
        report.duration_s = max((state.report.finished_s for state in self._readers), default=0.0)
        report.needed_bytes = sum(self._length(block) for block in self._needed)
        report.prefetched_blocks = len(self._prefetched)
        report.unused_blocks = len(self._prefetched - self._needed)
        return report

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        self._event_number += 1
        heapq.heappush(self._events, (time_s, self._event_number, event))

    def _length(self, block: Block) -> int:
        return min(self._sim.block_bytes, self._sim.file_bytes[block.file] - block.block * self._sim.block_bytes)

    # -- readers ---------------------------------------------------------------------------------------------------

    def _start(self, index: int) -> None:
        self._readers[index].report.started_s = self._now_s
        self._readers[index].report.finished_s = self._now_s
        for _ in range(self._readers[index].reader.depth):
            self._ask(index)

    def _ask(self, index: int) -> None:
        state = self._readers[index]
        if state.next == len(state.reader.requests):
            return
        request = state.reader.requests[state.next]
        state.next += 1
        state.active += 1
        self._plan(request)
        waiting = _Waiting(index, request, self._now_s)
        size = self._sim.block_bytes
        for number in range(
            request.offset_bytes // size, block_count(request.offset_bytes + request.length_bytes, size)
        ):
            block = Block(request.file, number)
            self._needed.add(block)
            self._unread.discard(block)
            if block in self._pool:
                self._pool.move_to_end(block)
                continue
            waiting.missing += 1
            if block not in self._waiters:
                self._waiters[block] = []
                if block not in self._fetching:
                    self._demand.append(block)
            self._waiters[block].append(waiting)
        if waiting.missing:
            state.report.stalls += 1
        else:
            self._serve(waiting)

    def _serve(self, waiting: _Waiting) -> None:
        state = self._readers[waiting.reader]
        state.report.stalled_s += self._now_s - waiting.since_s
        taken_s = waiting.request.length_bytes / state.reader.bytes_per_s

        def done() -> None:
            state.active -= 1
            state.report.read_bytes += waiting.request.length_bytes
            state.report.finished_s = self._now_s
            self._ask(waiting.reader)

        self._at(self._now_s + taken_s, done)

    # -- readahead -------------------------------------------------------------------------------------------------

    def _plan(self, request: Request) -> None:
        readahead = self._readahead[request.file]
        if readahead is None:
            return
        plan = readahead.observe(request.offset_bytes, request.length_bytes)
        file = request.file
        self._queue(file, plan.blocks)
        while plan.next_file_bytes and file + 1 < len(self._readahead):
            file += 1
            following = self._readahead[file]
            assert following is not None
            plan = following.expect(plan.next_file_bytes)
            self._queue(file, plan.blocks)

    def _queue(self, file: int, blocks: range) -> None:
        for number in blocks:
            block = Block(file, number)
            if block in self._pool or block in self._fetching:
                continue
            if len(self._planned) >= self._sim.queue_blocks:
                self._report.dropped_blocks += blocks.stop - number
                readahead = self._readahead[file]
                assert readahead is not None
                readahead.replan(number)
                return
            self._planned.append(block)

    # -- source and pool ---------------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        """Start what may start: every demand a slot can take, then prefetch as the budget allows."""
        slots = self._sim.source.slots
        while self._demand and len(self._fetching) < slots:
            self._start_fetch(self._demand.popleft(), demand=True)
        while self._planned:
            block = self._planned[0]
            if block in self._pool or block in self._fetching or block in self._waiters:
                self._planned.popleft()
                continue
            demand = len(self._demand) + sum(self._fetching.values())
            prefetches = len(self._fetching) - sum(self._fetching.values())
            usage = Usage(
                pool_blocks=self._sim.pool_blocks,
                demand_blocks=sum(self._fetching.values()),
                unread_blocks=len(self._unread) + prefetches,
            )
            if not prefetch_blocks(BudgetConfig(), usage):
                return
            if not prefetch_fetches(slots=slots, demand_fetches=demand, prefetch_fetches=prefetches):
                return
            self._planned.popleft()
            self._prefetched.add(block)
            self._start_fetch(block, demand=False)

    def _start_fetch(self, block: Block, *, demand: bool) -> None:
        length = self._length(block)
        source = self._sim.source
        self._fetching[block] = demand
        self._report.fetched_bytes += length
        self._pipe_free_s = max(self._now_s + source.latency_s, self._pipe_free_s) + length / source.bytes_per_s
        self._at(self._pipe_free_s, partial(self._arrived, block))

    def _arrived(self, block: Block) -> None:
        demanded = self._fetching.pop(block)
        self._pool[block] = None
        waiters = self._waiters.pop(block, [])
        if not demanded and not waiters:
            self._unread.add(block)
        if not self._sim.keep and len(self._pool) > self._sim.pool_blocks:
            dropped = next((one for one in self._pool if one not in self._unread), next(iter(self._pool)))
            del self._pool[dropped]
            if dropped in self._unread:
                self._unread.discard(dropped)
                readahead = self._readahead[dropped.file]
                assert readahead is not None
                readahead.wasted(range(dropped.block, dropped.block + 1))
        for waiting in waiters:
            waiting.missing -= 1
            if not waiting.missing:
                self._serve(waiting)


# -- patterns: what readers ask for, as lists of requests of one file ------------------------------------------------


def sequential(
    size_bytes: int, request_bytes: int, *, file: int = 0, start_bytes: int = 0, end_bytes: int | None = None
) -> list[Request]:
    """One reader from ``start_bytes`` to ``end_bytes`` (the end of the file unless given)."""
    end = size_bytes if end_bytes is None else min(end_bytes, size_bytes)
    return [
        Request(file, offset, min(request_bytes, end - offset)) for offset in range(start_bytes, end, request_bytes)
    ]


def out_of_order(requests: Sequence[Request], rng: random.Random, *, positions: int = 16) -> list[Request]:
    """The requests as the kernel's asynchronous readahead delivers them: none overtakes one ``positions`` before it."""
    order = sorted(range(len(requests)), key=lambda place: place + rng.uniform(0, positions))
    return [requests[place] for place in order]


def strided(size_bytes: int, *, slice_bytes: int, row_bytes: int, rank: int, file: int = 0) -> list[Request]:
    """One rank's slices of rows that all ranks share."""
    starts = range(rank * slice_bytes, size_bytes, row_bytes)
    return [Request(file, start, min(slice_bytes, size_bytes - start)) for start in starts]


def random_reads(
    size_bytes: int, request_bytes: int, count: int, rng: random.Random, *, file: int = 0
) -> list[Request]:
    """Reads at random page-aligned places."""
    places = max(1, (size_bytes - request_bytes) // 4096 + 1)
    return [Request(file, rng.randrange(places) * 4096, min(request_bytes, size_bytes)) for _ in range(count)]


def read_around(
    size_bytes: int, *, window_bytes: int, request_bytes: int, count: int, rng: random.Random, file: int = 0
) -> list[Request]:
    """Random page faults in a map, each of which makes the kernel read a window around it in several requests."""

    def windows() -> Iterator[Request]:
        for _ in range(count):
            start = rng.randrange(max(1, (size_bytes - window_bytes) // 4096 + 1)) * 4096
            yield from sequential(
                size_bytes, request_bytes, file=file, start_bytes=start, end_bytes=start + window_bytes
            )

    return list(windows())


def tensors_by_threads(
    size_bytes: int, *, threads: int, tensor_bytes: int, request_bytes: int, rng: random.Random, file: int = 0
) -> list[list[Request]]:
    """Threads that fault tensors, each from its start to its end, in any order; one list of requests a thread."""
    starts = list(range(0, size_bytes, tensor_bytes))
    rng.shuffle(starts)
    work: list[list[Request]] = [[] for _ in range(threads)]
    for turn, start in enumerate(starts):
        work[turn % threads] += sequential(
            size_bytes, request_bytes, file=file, start_bytes=start, end_bytes=start + tensor_bytes
        )
    return work
