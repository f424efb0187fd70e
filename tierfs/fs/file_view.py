"""An open file: one version, however many handles and maps the kernel has on it.

Turns a byte range into spans for the block cache, and tells readahead what was asked. All handles of a version share
one view, since ranks share descriptors and the kernel's requests do not say whose they are.
"""

from collections.abc import Callable

import trio

from tierfs.blocks.spans import Span, spans
from tierfs.cache.block_cache import BlockCache, FileFacts
from tierfs.cache.prefetcher import Prefetcher
from tierfs.catalog.schema import Entry
from tierfs.policy.readahead import Plan, Readahead
from tierfs.tiers.interface import Part


class FileView:
    """See the head of this file. ``go_on`` is told how much of the window reaches beyond the end of the file."""

    def __init__(
        self,
        facts: FileFacts,
        entry: Entry,
        *,
        cache: BlockCache,
        prefetcher: Prefetcher,
        readahead: Readahead,
        request_timeout_s: float,
        go_on: Callable[[int], None],
    ) -> None:
        self.facts = facts
        self.entry = entry
        self.opens = 0
        self._cache = cache
        self._prefetcher = prefetcher
        self.readahead = readahead
        self.request_timeout_s = request_timeout_s
        self._go_on = go_on

    async def read(self, offset_bytes: int, length_bytes: int) -> memoryview | bytes | bytearray:
        """Exactly the bytes asked for, clamped at the end of the file: never short, never padded.

        The result is valid until the next checkpoint. Raises what BlockCache.read raises, and trio.TooSlowError after
        the request timeout; cancellation leaves loads running for others.
        """
        facts = self.facts
        length_bytes = min(length_bytes, facts.size_bytes - offset_bytes)
        if length_bytes <= 0:
            return b""
        plan = self._observe(offset_bytes, length_bytes)
        first, *rest = spans(offset_bytes, length_bytes, self._cache.block_bytes)
        if not rest:
            data = self._cache.read_nowait(facts, first)
            if data is None and not plan.sequential:
                data = await self._cache.read_soon(facts, first)
            if data is not None:
                return data
        with trio.fail_after(self.request_timeout_s):
            if not rest:
                return await self._cache.read(facts, first, sequential=plan.sequential)
            return await self._read_parts([first, *rest], length_bytes, sequential=plan.sequential)

    async def locate(self, offset_bytes: int, length_bytes: int) -> list[Part]:
        """As read, but where the bytes lie; none at or after the end. The caller releases each part's hold once.

        Raises as read does; then, and when cancelled, no hold is left.
        """
        length_bytes = min(length_bytes, self.facts.size_bytes - offset_bytes)
        if length_bytes <= 0:
            return []
        plan = self._observe(offset_bytes, length_bytes)
        first, *rest = spans(offset_bytes, length_bytes, self._cache.block_bytes)
        if not rest:
            part = self._cache.locate_nowait(self.facts, first, sequential=plan.sequential)
            if part is not None:
                return [part]
        with trio.fail_after(self.request_timeout_s):
            if not rest:
                return [await self._cache.locate(self.facts, first, sequential=plan.sequential)]
            return await self._locate_parts([first, *rest], sequential=plan.sequential)

    async def _locate_parts(self, spans: list[Span], *, sequential: bool) -> list[Part]:
        """A request that crosses a block border: a part of each block, in the end all held at once.

        Nothing is held while the blocks are on their way: readers of a source that is away must not keep buffers, or
        the budget, from those of resident files.
        """
        for span in spans[1:]:
            self._cache.prefetch(self.facts, span.block)
        for span in spans:
            await self._cache.bring(self.facts, span, sequential=sequential)
        parts: list[Part] = []
        try:
            async with self._cache.gathering.hold(len(spans)):
                for span in spans:
                    parts.append(await self._cache.locate(self.facts, span, sequential=sequential))
        except BaseException:
            for part in parts:
                part.hold.release()
            raise
        return parts

    def _observe(self, offset_bytes: int, length_bytes: int) -> Plan:
        """Tell readahead of a request, and start what it plans."""
        plan = self.readahead.observe(offset_bytes, length_bytes)
        if plan.blocks:
            dropped = self._prefetcher.plan(self.facts, plan.blocks)
            if dropped is not None:
                self.readahead.replan(dropped)
        if plan.next_file_bytes:
            self._go_on(plan.next_file_bytes)
        return plan

    async def _read_parts(self, parts: list[Span], length_bytes: int, *, sequential: bool) -> bytearray:
        """A request that crosses a block border. The parts are copied: they lie in different buffers, and each is
        valid only until the next checkpoint.
        """
        for part in parts[1:]:
            self._cache.prefetch(self.facts, part.block)
        result = bytearray(length_bytes)
        filled = 0
        for part in parts:
            data = await self._cache.read(self.facts, part, sequential=sequential)
            result[filled : filled + part.length_bytes] = data
            filled += part.length_bytes
        assert filled == length_bytes
        return result
