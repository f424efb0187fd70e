"""Readahead: from what readers asked of one content, which blocks to prefetch next.

The file view keeps one `Readahead` per content and calls `observe` for every read, in the order the requests arrive, on
the trio thread. Nothing here waits, looks at a clock or touches a byte.

**Theory.** A stream is known by where it reads, not by who reads: ranks share descriptors, frameworks hop between
threads, and the kernel's asynchronous requests overtake each other. So a request belongs to the stream whose *front*
(the furthest byte read so far) is nearest, if it is near enough: up to 16 requests of its own size ahead or behind,
never more than ``gap_bytes``. Several ranks reading slices of common rows thus make one stream, and two loaders at two
places make two. Evidence is counted in blocks, since a block is what a fetch costs: a reader of 40 KiB in every 320 KiB
needs every block just as one who reads it all.

                low: all touched below      front
                 │   (holes only above)      │
      ───████████┼──██──────████████████████─┼──▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒┼·················┼──────────▶ block
         touched │   └ holes: overtaken      │   planned before  │  planned now    │
                 │     requests, at most     │                   │                 │
                 │     gap_bytes long        └─────────── window ─────────────────▶│ planned_end

**States of a stream.**

      nowhere near any stream           a request that moves the front
      ───────────────────▶ candidate ─────────────────────────────────▶ established   window: one block (the floor)
                              ▲  │ in doubt: only after a run of       │  ▲   a block further, without a hole: × 2,
                              │  │ several blocks (`_proof_blocks`)    │  │   up to window_max and to 4 × its run
                              │  └──▶ forgotten, oldest first          │  │   (1 × in doubt)
                              └────────────────────────────────────────┘  │
                               a hole, or wasted blocks: window ÷ 2;      └── the first read at offset 0, or `expect`
                               below one block it must prove itself again

- A candidate plans nothing: a random read costs its own blocks and no more.
- Offset 0 starts established with two blocks: sequential is the likely case for weights. In doubt that halves, to none.
- **Doubt** belongs to the content and counts blocks: a jump (a new candidate) adds 1, an established stream that was
  left adds what it had planned ahead in vain, a planned block that is then read takes 1 away. Random page faults come
  as windows of up to several MiB (the kernel's read-around), which look like short streams; once 8 blocks of doubt are
  reached, a stream must first be longer than such a window.
- **What a wrong guess costs**: a stream that stops after n blocks without a hole has planned at most 4 n blocks beyond
  them, in doubt at most n, after more than 8 MiB. (`expect` hands on the window that the shard before had earned.)

**A plan that was not carried out.** Each block is planned once per stream. A caller that drops the tail of a plan
(queue full, no budget) calls `replan(first block dropped)`: that part is in the plan of the stream's next request that
is a quarter of a block further on, so a full queue is not asked again at every read. Blocks that had been fetched and
were dropped unread are told by `wasted`, which also makes the window smaller.

Cost: a request that continues a stream inside a block is a dictionary lookup; any other is one pass over the fronts.
At most ``streams_max`` streams are kept, whatever is asked.
"""

from dataclasses import dataclass
from operator import attrgetter

from tierfs.blocks.spans import block_count

# The kernel's requests overtake each other by up to this many positions.
_REORDER_REQUESTS = 16
# Small requests (a fault of one page, a slice of a row) may leave gaps larger than 16 times their own size.
_GAP_FLOOR_BYTES = 128 << 10
# The first window of a reader that starts at offset 0, in blocks.
_FIRST_WINDOW_BLOCKS = 2
# Doubt, in blocks: from here on a stream must prove itself. It is bounded, so that trust can return.
_DOUBT_HIGH_BLOCKS = 8
_DOUBT_MAX_BLOCKS = 32
# In doubt, a run must be longer than the largest read-around a kernel is usually set to.
_PROOF_BYTES = 8 << 20
# A window is at most this many times what the stream has read without a hole.
_REACH_RUNS = 4
# So many blocks without a hole forgive one hole by halving the window; otherwise the stream must prove itself again.
_FORGIVEN_RUN_BLOCKS = 4
# When somebody jumps, an established stream not seen for so many requests, and two more for each stream there is,
# counts as left by its reader. It may come back; one mistake adds no more doubt than makes others prove themselves.
_LEFT_AFTER_REQUESTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadaheadConfig:
    """Limits of readahead for one content.

    ``window_min_bytes`` is the floor of an established stream, None for one block. ``window_max_bytes`` is rounded down
    to whole blocks; below one block nothing is ever planned (streams are recognised all the same). ``gap_bytes`` bounds
    the tolerance forward and back.
    """

    window_max_bytes: int
    window_min_bytes: int | None = None
    streams_max: int = 64
    gap_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        assert self.window_max_bytes >= 0 and self.gap_bytes >= 0
        assert self.window_min_bytes is None or self.window_min_bytes > 0
        assert self.streams_max >= 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do beside serving one request.

    ``blocks`` are to be prefetched now, in order; all lie beyond the front of the stream and inside the file, and none
    was planned before for that stream (except after `replan` and `wasted`). The blocks of the request itself are not
    among them: the reader demands those. ``sequential``: the request belongs to an established stream.
    ``next_file_bytes``: so many bytes of the window lie beyond the end of this file; 0 when there are none, or no more
    than the stream's earlier plans said.
    """

    blocks: range = range(0)
    sequential: bool = False
    next_file_bytes: int = 0


_RANDOM = Plan()
_SEQUENTIAL = Plan(sequential=True)


class _Stream:
    """One place where somebody reads. Offsets in bytes, everything else in blocks."""

    __slots__ = (
        "beyond_bytes", "doubtful", "established", "front", "holes_ahead", "left", "low", "mark", "planned_end",
        "run", "used", "window",
    )  # fmt: skip

    def __init__(self, front: int, low: int, used: int) -> None:
        self.front = front  # bytes: the end of the furthest request
        self.mark = 0  # bytes: requests that end here or before change nothing but the front
        self.low = low  # every block below, from where the stream began, was touched or given up as a hole
        self.holes_ahead = 0  # bit i: block low + i was touched; bit 0 is never set between two calls
        self.planned_end = low  # blocks below were planned, or needed no plan
        self.run = 0  # blocks touched since the last hole
        self.window = 0
        self.beyond_bytes = 0  # what the last plan said of the next file
        self.established = False
        self.doubtful = False  # lost its window once: must prove itself whatever the others do
        self.left = False  # counted as left by its reader
        self.used = used  # the number of the last request that belonged to it


_is_established = attrgetter("established")


class Readahead:
    """The readahead state of one content."""

    def __init__(self, config: ReadaheadConfig, *, size_bytes: int, block_bytes: int) -> None:
        assert size_bytes >= 0 and block_bytes > 0
        self._size_bytes = size_bytes
        self._block_bytes = block_bytes
        self._blocks = block_count(size_bytes, block_bytes)
        self._window_max = config.window_max_bytes // block_bytes
        self._window_min = min(self._window_max, max(1, (config.window_min_bytes or 0) // block_bytes))
        self._gap_bytes = config.gap_bytes
        # One block more: a gap of whole blocks seldom starts at a block border.
        self._gap_blocks = block_count(config.gap_bytes, block_bytes) + 1
        self._streams_max = config.streams_max
        self._candidates_kept = max(1, config.streams_max // 4)
        self._proof_blocks = 2 + _PROOF_BYTES // block_bytes  # an unaligned read-around touches one less
        # By front: two streams at one front are one stream. A front that moves goes to the end of the order.
        self._streams: dict[int, _Stream] = {}
        self._requests = 0
        self._doubt = 0

    @property
    def stream_count(self) -> int:
        """Streams remembered, at most ``streams_max``."""
        return len(self._streams)

    @property
    def established_count(self) -> int:
        """Streams that plan ahead; what a budget shares between."""
        return sum(map(_is_established, self._streams.values()))

    @property
    def window_bytes(self) -> int:
        """The widest window of any stream, 0 without one."""
        return max((stream.window for stream in self._streams.values()), default=0) * self._block_bytes

    def observe(self, offset_bytes: int, length_bytes: int) -> Plan:
        """A reader asked for this range; what to prefetch for it. A range beyond the end is clamped."""
        self._requests += 1
        end = offset_bytes + length_bytes
        streams = self._streams
        stream = streams.get(offset_bytes)
        if stream is not None and end <= stream.mark and end not in streams:
            # By far the most frequent case: the next request of an established stream, inside a block it already
            # touched. (An empty request ends at a front, so it does not come here.)
            del streams[offset_bytes]
            streams[end] = stream
            stream.front = end
            stream.used = self._requests
            return _SEQUENTIAL
        end = min(end, self._size_bytes)
        if end <= offset_bytes:
            return _RANDOM
        if stream is None:
            stream = self._nearest(offset_bytes, end)
        if stream is None:
            return self._begin(offset_bytes, end)
        stream.used = self._requests
        stream.left = False
        advanced = end > stream.front
        if advanced:
            self._move(stream, end)
        self._touch(stream, offset_bytes, end)
        if advanced and not stream.established and self._proved(stream):
            self._establish(stream, self._window_min)
        if not stream.established:
            return _RANDOM
        return self._plan(stream) if advanced and end > stream.mark else _SEQUENTIAL

    def expect(self, window_bytes: int) -> Plan:
        """The shard before this file is read to its end: ``window_bytes`` of this one will be wanted from offset 0.

        Called again as the number grows; each plan has only what is new. The reader that then begins at offset 0 goes
        on with that window. ``next_file_bytes`` says what reaches beyond this file too.
        """
        self._requests += 1
        stream = self._streams.get(0)
        if stream is None:
            if self._blocks == 0 or self._window_max == 0:
                return Plan(next_file_bytes=max(0, window_bytes - self._size_bytes))
            stream = self._add(_Stream(0, 0, self._requests))
        self._establish(stream, max(stream.window, min(self._window_max, window_bytes // self._block_bytes)))
        stream.used = self._requests
        return self._plan(stream)

    def replan(self, from_block: int) -> None:
        """Planned blocks from this one on were not prefetched: plan them again, a quarter of a block later."""
        for stream in self._streams.values():
            if stream.established and self._front_block(stream) < from_block < stream.planned_end:
                stream.planned_end = from_block
                stream.beyond_bytes = 0
                stream.mark = min(stream.mark, stream.front + self._block_bytes // 4)

    def wasted(self, blocks: range) -> None:
        """These prefetched blocks were dropped unread: the streams that were to read them get half their window."""
        if not blocks:
            return
        waiting = False
        for stream in self._streams.values():
            ahead = self._front_block(stream) + 1
            if stream.established and blocks.stop > ahead and blocks.start < stream.planned_end:
                waiting = True
                stream.planned_end = max(ahead, blocks.start)
                stream.beyond_bytes = 0
                stream.mark = min(stream.mark, stream.front + self._block_bytes // 4)
                self._shrink(stream)
        if not waiting:
            self._doubt = min(_DOUBT_MAX_BLOCKS, self._doubt + len(blocks))

    def _front_block(self, stream: _Stream) -> int:
        """The block that holds the last byte before the front; -1 at offset 0."""
        return (stream.front - 1) // self._block_bytes

    def _nearest(self, offset: int, end: int) -> _Stream | None:
        near = min(max(_REORDER_REQUESTS * (end - offset), _GAP_FLOOR_BYTES), self._gap_bytes)
        lowest, highest = offset - near, end + near
        best = -1
        for front in self._streams:
            if lowest <= front <= highest:
                distance = offset - front if front < offset else front - end if front > end else 0
                if distance < near or best < 0:
                    best, near = front, distance
        return self._streams[best] if best >= 0 else None

    def _begin(self, offset: int, end: int) -> Plan:
        """A request far from every stream: a jump, or the first one at offset 0."""
        first = offset // self._block_bytes
        stream = _Stream(end, first, self._requests)
        window = 0
        if offset == 0:
            window = min(self._window_max, _FIRST_WINDOW_BLOCKS * self._window_min) >> self._doubt // 4
        else:
            self._doubt = min(_DOUBT_MAX_BLOCKS, self._doubt + 1)
        self._add(stream)
        self._touch(stream, offset, end)
        if window:
            self._establish(stream, window)
            return self._plan(stream)
        return _RANDOM

    def _add(self, stream: _Stream) -> _Stream:
        """Make room and remember the stream; whoever was left by its reader is counted on the way."""
        streams = self._streams
        left_before = self._requests - _LEFT_AFTER_REQUESTS - 2 * len(streams)
        full = len(streams) >= self._streams_max
        # A flood of random reads pushes out its own candidates, not the streams; but a quarter of the places is the
        # candidates', or else streams nobody reads any more would keep new ones out.
        from_established = full and len(streams) - self.established_count < self._candidates_kept
        victim: _Stream | None = None
        for other in streams.values():  # the one whose front stood still longest comes first
            fits = other.established == from_established
            if full and (victim is None or (fits and victim.established != from_established)):
                victim = other
            if other.used >= left_before:
                if not full or (victim is not None and victim.established == from_established):
                    break
            elif other.established and not other.left:
                other.left = True
                vain = max(0, other.planned_end - self._front_block(other) - 1)
                self._doubt = min(_DOUBT_MAX_BLOCKS, self._doubt + min(vain, _DOUBT_HIGH_BLOCKS))
        if victim is not None:
            del streams[victim.front]
        streams[stream.front] = stream
        return stream

    def _move(self, stream: _Stream, end: int) -> None:
        """Bring the front to ``end``; a stream that already stands there is the same stream from now on."""
        del self._streams[stream.front]
        stream.front = end
        other = self._streams.get(end)
        if other is not None and other.established:
            if not stream.established or other.window > stream.window:
                stream.window, stream.established = other.window, True
            stream.planned_end = max(stream.planned_end, other.planned_end)
            stream.beyond_bytes = max(stream.beyond_bytes, other.beyond_bytes)
            stream.run = max(stream.run, other.run)
        self._streams[end] = stream

    def _touch(self, stream: _Stream, offset: int, end: int) -> None:
        """Note the blocks of a request: a run grows the window, a hole that stays shrinks it."""
        low = stream.low
        first = offset // self._block_bytes
        last = (end - 1) // self._block_bytes
        if last < low:
            return
        first = max(first, low)
        touched = stream.holes_ahead | ((1 << (last - first + 1)) - 1) << (first - low)
        run = _trailing_ones(touched)
        touched >>= run
        low += run
        if run:
            self._doubt = max(0, self._doubt - max(0, min(low, stream.planned_end) - stream.low))
            stream.run += run
            if stream.established:
                self._grow(stream)
        front_block = self._front_block(stream)
        while front_block - low > self._gap_blocks:
            # Bit 0 is a hole nobody will fill any more, and the block of the front is touched: hole, run, and so on.
            hole = (touched & -touched).bit_length() - 1
            after = _trailing_ones(touched >> hole)
            touched >>= hole + after
            low += hole + after
            if stream.run < _FORGIVEN_RUN_BLOCKS:
                stream.window = 0
            stream.run = after
            if stream.established:
                self._shrink(stream)
        stream.low = low
        stream.holes_ahead = touched

    def _grow(self, stream: _Stream) -> None:
        reach = stream.run * (1 if self._doubt >= _DOUBT_HIGH_BLOCKS else _REACH_RUNS)
        widest = min(stream.window * 2, reach, self._window_max)
        stream.window = max(stream.window, widest)

    def _shrink(self, stream: _Stream) -> None:
        """Half the window; below the floor the stream is a candidate again, and one in doubt."""
        stream.window //= 2
        if stream.window < self._window_min:
            stream.window = 0
            stream.established = False
            stream.doubtful = True
            stream.run = 0
            stream.mark = 0

    def _proved(self, stream: _Stream) -> bool:
        """Whether a candidate whose front just moved is a stream."""
        if stream.doubtful or self._doubt >= _DOUBT_HIGH_BLOCKS:
            return stream.run >= self._proof_blocks
        return True

    def _establish(self, stream: _Stream, window: int) -> None:
        stream.established = True
        stream.doubtful = False
        stream.left = False
        stream.window = max(window, self._window_min)

    def _plan(self, stream: _Stream) -> Plan:
        """The part of the window that was not planned yet; until the front leaves its block there is no more."""
        front_block = self._front_block(stream)
        stream.mark = min((front_block + 1) * self._block_bytes, self._size_bytes)
        window_end = front_block + 1 + stream.window
        start = max(stream.planned_end, front_block + 1)
        end = min(window_end, self._blocks)
        stream.planned_end = max(stream.planned_end, end)
        beyond = stream.front + stream.window * self._block_bytes - self._size_bytes
        if beyond <= stream.beyond_bytes:
            beyond = 0
        else:
            stream.beyond_bytes = beyond
        if end <= start and not beyond:
            return _SEQUENTIAL
        return Plan(range(start, max(start, end)), True, beyond)


def _trailing_ones(bits: int) -> int:
    return (~bits & (bits + 1)).bit_length() - 1
