"""Blocks and spans: how a byte range of a file becomes parts of blocks."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Part of one block: ``length_bytes`` bytes from ``start_bytes``, counted from the start of the block."""

    block: int
    start_bytes: int
    length_bytes: int


def block_count(size_bytes: int, block_bytes: int) -> int:
    """How many blocks a file of this size has; an empty file has none."""
    return -(-size_bytes // block_bytes)


def block_length(size_bytes: int, block_bytes: int, block: int) -> int:
    """The length of one block: ``block_bytes``, or less for the last one."""
    return min(block_bytes, size_bytes - block * block_bytes)


def whole_block(size_bytes: int, block_bytes: int, block: int) -> Span:
    """The span that is all of one block."""
    return Span(block, 0, block_length(size_bytes, block_bytes, block))


def spans(offset_bytes: int, length_bytes: int, block_bytes: int) -> Iterator[Span]:
    """Cut a byte range, already clamped to the file, at block borders."""
    end = offset_bytes + length_bytes
    while offset_bytes < end:
        block, start = divmod(offset_bytes, block_bytes)
        length = min(block_bytes - start, end - offset_bytes)
        yield Span(block, start, length)
        offset_bytes += length
