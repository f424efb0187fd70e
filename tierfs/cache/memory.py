"""Blocks in memory: verified bytes in pool buffers, waiting to be read or written.

Which block goes when a buffer is needed: first those read to their end (the kernel's page cache has them now), then
the least recently used. A block that a writer still holds goes last, since dropping it frees nothing yet.

    newest                                             oldest
      unread/partly read blocks, in order of last use     |  read blocks, in order of completion  -> reclaimed first
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tierfs.blocks.ids import BlockDigest, ObjectKey
from tierfs.cache.buffers import Buffer

BlockKey = tuple[ObjectKey, int]

_READ_BLOCKS_KEPT = 4


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """One whole verified block in memory."""

    buffer: Buffer
    length_bytes: int
    digest: BlockDigest
    prefetched: bool  # brought by prefetch and not read yet
    served_bytes: int = 0

    @property
    def view(self) -> memoryview:
        """The block's bytes."""
        return self.buffer.view[: self.length_bytes]


class BlockMemory:
    """The blocks in memory, by key and number."""

    def __init__(self) -> None:
        self._partly: OrderedDict[BlockKey, MemoryBlock] = OrderedDict()
        self._read: OrderedDict[BlockKey, MemoryBlock] = OrderedDict()
        self.prefetched_unread = 0
        self.dropped_unread = 0  # prefetched blocks that went away before anyone read them
        self.on_wasted: Callable[[BlockKey], None] = lambda key: None  # told of each of those

    def __len__(self) -> int:
        return len(self._partly) + len(self._read)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._partly or key in self._read

    def get(self, key: BlockKey) -> MemoryBlock | None:
        """The block, without counting it as used."""
        return self._partly.get(key) or self._read.get(key)

    def add(self, key: BlockKey, block: MemoryBlock) -> None:
        """Take over a new block and its one hold on the buffer."""
        assert key not in self, "a block was loaded twice"
        self._partly[key] = block
        self.prefetched_unread += block.prefetched

    def served(self, key: BlockKey, block: MemoryBlock, length_bytes: int) -> None:
        """That many bytes of the block are being replied."""
        if self.get(key) is not block:
            return  # dropped, or replaced, while its reader was on the way
        if block.prefetched:
            block.prefetched = False
            self.prefetched_unread -= 1
        block.served_bytes += length_bytes
        if key not in self._partly:
            return
        if block.served_bytes >= block.length_bytes:
            del self._partly[key]
            self._read[key] = block
        else:
            self._partly.move_to_end(key)

    def reclaim(self) -> bool:
        """Drop the block that is worth least and whose buffer becomes free by it; False when there is none."""
        return self._drop_first(self._read) or self._drop_first(self._partly)

    def recycle(self) -> bool:
        """Drop a block read to its end, unless there are only a few: readers a little behind still want those."""
        return len(self._read) > _READ_BLOCKS_KEPT and self._drop_first(self._read)

    def _drop_first(self, blocks: OrderedDict[BlockKey, MemoryBlock]) -> bool:
        for key, block in blocks.items():
            if block.buffer.holders == 1:
                del blocks[key]
                self._forget(key, block)
                return True
        return False

    def drop(self, key: BlockKey) -> None:
        """Forget one block, if it is here."""
        block = self._partly.pop(key, None) or self._read.pop(key, None)
        if block is not None:
            self._forget(key, block)

    def rename(self, keys: Mapping[ObjectKey, ObjectKey]) -> None:
        """Blocks known by an old key are known by its new one from now on; where both have a block, the new one's
        stays. One pass over the blocks for any number of keys: a start learns of every file at once.
        """
        for blocks in (self._partly, self._read):
            for key in [key for key in blocks if key[0] in keys]:
                renamed = (keys[key[0]], key[1])
                if renamed in self:
                    self.drop(key)
                else:
                    blocks[renamed] = blocks.pop(key)

    def clear(self) -> None:
        """Forget all blocks."""
        for key, block in (*self._partly.items(), *self._read.items()):
            self._forget(key, block)
        self._partly.clear()
        self._read.clear()

    def _forget(self, key: BlockKey, block: MemoryBlock) -> None:
        if block.prefetched:
            block.prefetched = False
            self.prefetched_unread -= 1
            self.dropped_unread += 1
            self.on_wasted(key)
        block.buffer.release()
