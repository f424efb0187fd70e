"""How far prefetch may run ahead of its readers: as little as keeps them from waiting.

A window says how far a stream may be planned. How much of that is fetched now decides where the bytes lie when their
reader comes: a block read soon after it arrived is still in the processor's cache, and a buffer used again soon needs
no fresh page. On a source as fast as its readers a run-ahead of 32 MiB reads half as fast again as one of 256 MiB; a
far source needs bandwidth × delay in flight. So the reader's waiting decides, like the congestion window of TCP the
other way round:

      a reader waits for a block on its way ──▶ × 2, at most once per run-ahead of blocks read (one round trip)
      4 × the run-ahead read without waiting ──▶ − 1/8
      floor and ceiling are the caller's
"""

_GROWTH = 2
_CALM_ROUNDS = 4
_DECAY = 8


class Pace:
    """The run-ahead in blocks, for all streams of the daemon together."""

    def __init__(self, *, floor_blocks: int, ceiling_blocks: int) -> None:
        assert 0 < floor_blocks <= ceiling_blocks
        self._floor = floor_blocks
        self._ceiling = ceiling_blocks
        self._read = floor_blocks  # blocks read since the run-ahead changed; the first wait counts at once
        self.blocks = floor_blocks

    def waited(self, *, idle: bool = False) -> None:
        """A reader had to wait for a block that prefetch should have had ready.

        ``idle``: none is on its way, as blocks nobody reads yet (of shards opened for their headers) take up all.
        """
        if idle or self._read >= self.blocks:
            self.blocks = min(self._ceiling, self.blocks * _GROWTH)
            self._read = 0

    def read(self) -> None:
        """A prefetched block was ready when its reader came."""
        self._read += 1
        if self._read >= _CALM_ROUNDS * self.blocks:
            self.blocks = max(self._floor, self.blocks - max(1, self.blocks // _DECAY))
            self._read = 0
