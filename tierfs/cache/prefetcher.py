"""The prefetcher: takes planned blocks from file views and loads them as far as the budget allows.

A file view puts plans in without waiting. Each file has a short queue; files take turns, so that one stream does not
starve another. How much may be prefetched and unread at a time is policy/pace within policy/budget. A full queue drops
the plan's tail, and says from where on, so that readahead plans it again.

    file views ─ plan() ─►  per-file queues  ─ budget ─►  BlockCache.prefetch ─►  loads (after all demand)
"""

import math
from collections import OrderedDict, deque

import trio

from tierfs.blocks.errors import SourceUnavailable
from tierfs.cache.block_cache import BlockCache, FileFacts
from tierfs.policy.budget import BudgetConfig, RateBudget, Usage, prefetch_blocks
from tierfs.policy.pace import Pace

_QUEUED_BLOCKS_PER_FILE = 256
_QUEUED_FILES = 1024
_RUN_AHEAD_BLOCKS = 4
_BUDGET = BudgetConfig(share_percent=50)  # of the pool; fetches and blocks being written need buffers, too


class Prefetcher:
    """One for the daemon."""

    def __init__(self, cache: BlockCache, *, bytes_per_s: int | None = None) -> None:
        self._cache = cache
        self._queues: OrderedDict[FileFacts, deque[int]] = OrderedDict()
        self._wake = trio.Event()
        self.dropped_blocks = 0
        self.set_rate(bytes_per_s)
        most = max(1, prefetch_blocks(_BUDGET, Usage(pool_blocks=cache.pool.slots, demand_blocks=0, unread_blocks=0)))
        self.pace = Pace(floor_blocks=min(_RUN_AHEAD_BLOCKS, most), ceiling_blocks=most)
        cache.on_room = self._signal
        cache.on_wait = self._waited
        cache.on_prefetched_read = self._read

    def set_rate(self, bytes_per_s: int | None) -> None:
        """Start no more than that from now on; None: no limit."""
        self._rate = RateBudget(bytes_per_s) if bytes_per_s else None

    def plan(self, file: FileFacts, blocks: range) -> int | None:
        """Prefetch these blocks, in this order. Never waits; returns the first block for which there was no room."""
        queue = self._queues.get(file)
        if queue is None and len(self._queues) < _QUEUED_FILES:
            queue = self._queues[file] = deque()
        room = 0 if queue is None else _QUEUED_BLOCKS_PER_FILE - len(queue)
        if queue is not None:
            queue.extend(blocks[:room])
            self._signal()
        dropped = blocks[room:]
        self.dropped_blocks += len(dropped)
        return dropped[0] if dropped else None

    def forget(self, file: FileFacts) -> None:
        """The file's last view is closed: what is still queued for it is not wanted any more."""
        self._queues.pop(file, None)

    @property
    def queued_blocks(self) -> int:
        """Blocks planned and not started."""
        return sum(len(queue) for queue in self._queues.values())

    async def run(self, *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Start planned loads while there is room."""
        task_status.started()
        while True:
            self._wake = trio.Event()
            wait_s = math.inf
            try:
                wait_s = self._start_what_fits()
            except SourceUnavailable:  # the cache is stopping
                self._queues.clear()
            with trio.move_on_after(wait_s):
                await self._wake.wait()

    def _start_what_fits(self) -> float:
        """Start loads; in how many seconds the rate allows more, if that is what is in the way."""
        cache = self._cache
        prefetching = cache.prefetching
        usage = Usage(
            pool_blocks=cache.pool.slots,
            demand_blocks=cache.loading - prefetching,
            unread_blocks=cache.memory.prefetched_unread + prefetching,
        )
        room = min(prefetch_blocks(_BUDGET, usage), self.pace.blocks - usage.unread_blocks)
        while room > 0 and self._queues:
            wait_s = self._rate.wait_s(trio.current_time()) if self._rate else 0.0
            if wait_s:
                return wait_s
            file, queue = self._queues.popitem(last=False)
            if queue and cache.prefetch(file, queue.popleft()):
                room -= 1
                if self._rate:
                    self._rate.take(cache.block_bytes)
            if queue:
                self._queues[file] = queue
        return math.inf

    def _waited(self) -> None:
        self.pace.waited(idle=self._cache.prefetching == 0 and bool(self._queues))
        self._signal()

    def _read(self) -> None:
        self.pace.read()
        self._signal()

    def _signal(self) -> None:
        self._wake.set()
