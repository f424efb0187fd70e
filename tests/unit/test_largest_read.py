"""What the kernel may ask for in one read has to fit the channel's replies and the memory."""

import pytest

from tierfs.app.parts import check_largest_read
from tierfs.blocks.errors import MountFailed

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("block_bytes", "memory_limit_bytes", "wrong"),
    [
        (4 * MIB, 64 * MIB, ""),
        (64 * KIB, 64 * MIB, ""),
        (64 * KIB, 1 * MIB, "memory.limit is 1MiB"),  # the least that the configuration allows for such blocks
        (256, 64 * MIB, "too small for the channel"),
    ],
)
def test_blocks_and_memory_must_hold_the_largest_read(block_bytes: int, memory_limit_bytes: int, wrong: str) -> None:
    if not wrong:
        check_largest_read(block_bytes, memory_limit_bytes=memory_limit_bytes)
        return
    with pytest.raises(MountFailed, match=wrong):
        check_largest_read(block_bytes, memory_limit_bytes=memory_limit_bytes)
