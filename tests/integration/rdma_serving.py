"""A server and a source with fake RDMA devices between them, and real sockets for the messages."""

import mmap
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from tests.integration.serving import BLOCK_BYTES, Served, eventually, file_of, running, serving
from tierfs.blocks.ids import BlockDigest, VersionId, digest_block
from tierfs.blocks.spans import block_count, whole_block
from tierfs.server.rdma import RdmaService
from tierfs.testing.verbs import Fabric
from tierfs.tiers.remote import RemoteSource
from tierfs.tiers.remote_rdma import RdmaReader

SLOTS = 16
SERVER_BYTES = 64 << 20


class Memory:
    """A pool's memory, and slots of it."""

    def __init__(self, slots: int = SLOTS) -> None:
        self.whole = memoryview(mmap.mmap(-1, slots * BLOCK_BYTES))

    def slot(self, number: int, length_bytes: int = BLOCK_BYTES) -> memoryview:
        """The beginning of one slot."""
        start = number % SLOTS * BLOCK_BYTES
        return self.whole[start : start + length_bytes]


@dataclass
class Pair:
    """Both ends."""

    fabric: Fabric
    served: Served
    service: RdmaService
    source: RemoteSource
    memory: Memory

    async def ready(self, paths: int = 1) -> None:
        """Wait until blocks come by RDMA, through so many queue pairs."""
        await eventually(lambda: self.fabric.open["queue_pair"] >= 2 * paths and self.source.statistics().device != "")

    async def read(self, name: bytes) -> bytes:
        """The whole file, a few blocks at once, each compared with its digest."""
        publication = await self.source.publication()
        version, size_bytes = file_of(publication, name)
        pieces: dict[int, bytes] = {}
        slots = trio.CapacityLimiter(SLOTS)
        free = list(range(SLOTS))

        async def read_one(block: int) -> None:
            span = whole_block(size_bytes, BLOCK_BYTES, block)
            async with slots:
                slot = free.pop()
                buffer = self.memory.slot(slot, span.length_bytes)
                digest = await self.source.read_into(version, span, buffer)
                assert digest == digest_block(buffer), f"block {block}"
                pieces[block] = bytes(buffer)
                free.append(slot)

        async with trio.open_nursery() as nursery:
            for block in range(block_count(size_bytes, BLOCK_BYTES)):
                nursery.start_soon(read_one, block)
        return b"".join(pieces[block] for block in sorted(pieces))

    async def read_block(self, name: bytes, block: int = 0, slot: int = 0) -> tuple[BlockDigest, bytes]:
        """One block: the digest that was claimed, and what came."""
        version, size_bytes = await self.file(name)
        span = whole_block(size_bytes, BLOCK_BYTES, block)
        buffer = self.memory.slot(slot, span.length_bytes)
        digest = await self.source.read_into(version, span, buffer)
        return digest, bytes(buffer)

    async def file(self, name: bytes) -> tuple[VersionId, int]:
        """Version and size."""
        return file_of(await self.source.publication(), name)


@asynccontextmanager
async def rdma_pair(
    directory: Path,
    *,
    fabric: Fabric | None = None,
    connections: int = 2,
    timeout_s: float = 5.0,
    server_bytes: int = SERVER_BYTES,
    rdma_only: bool = False,
    offered: bool = True,
    request_timeout_s: float = 15.0,
) -> AsyncIterator[Pair]:
    """A running server of that directory, and a running source; ``offered``: the source has its memory."""
    fabric = fabric or Fabric()
    service = RdmaService(fabric.machine, memory_bytes=server_bytes)
    memory = Memory()
    async with serving(directory, rdma=service) as served:
        reader = RdmaReader(fabric.machine, source="test", timeout_s=timeout_s)
        source = RemoteSource(
            served.url(),
            connections=connections,
            rdma=reader,
            rdma_only=rdma_only,
            request_timeout_s=request_timeout_s,
            jitter=random.Random(1),
        )
        async with running(source):
            await source.publication()
            if offered:
                await source.use_memory(memory.whole, block_bytes=BLOCK_BYTES, key="memory.limit")
            yield Pair(fabric, served, service, source, memory)
