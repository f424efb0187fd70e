"""A mount whose trio loop is busy: every pass burns some milliseconds. Prints a byte for each pass.

Usage: busy_daemon.py MOUNTPOINT BURN_MS. Serves one file, f, of 4 MiB from memory, over the real session.
"""

import sys
import time

import trio

from tierfs.cache.block_cache import BlockCache
from tierfs.cache.buffers import BufferPool
from tierfs.cache.prefetcher import Prefetcher
from tierfs.fs.filesystem import Filesystem
from tierfs.fs.inodes import Inodes
from tierfs.fs.tree import Tree
from tierfs.fuse.operations import Operations, Presentation
from tierfs.fuse.session import Session
from tierfs.policy.readahead import ReadaheadConfig
from tierfs.testing.sources import MemorySource

BLOCK = 1 << 20


async def main(mountpoint: str, burn_s: float) -> None:
    source = MemorySource({b"f": bytes(range(256)) * (4 * BLOCK // 256)}, block_bytes=BLOCK)
    pool = BufferPool(limit_bytes=16 * BLOCK, block_bytes=BLOCK)
    cache = BlockCache(source=source, tiers=[], pool=pool, block_bytes=BLOCK, source_timeout_s=5)
    inodes = Inodes(None)
    filesystem = Filesystem(
        Tree((await source.publication()).catalog, inodes),
        inodes=inodes,
        cache=cache,
        prefetcher=Prefetcher(cache),
        readahead=ReadaheadConfig(window_max_bytes=BLOCK),
        request_timeout_s=10,
    )
    operations = Operations(filesystem, Presentation(uid=0, gid=0, metadata_ttl_s=60))

    async def burn() -> None:
        while True:
            end = time.perf_counter() + burn_s
            while time.perf_counter() < end:
                pass
            sys.stdout.buffer.write(b".")
            sys.stdout.buffer.flush()
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: cache.run(task_status=task_status))
        with Session(operations, mountpoint, allow_other=False) as session:
            nursery.start_soon(burn)
            await session.serve()
        nursery.cancel_scope.cancel()


trio.run(main, sys.argv[1], float(sys.argv[2]) / 1000)
