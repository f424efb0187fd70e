"""A source keeps its promises however its blocks travel: in memory, over TCP, and by RDMA READ (a fake device)."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from tests.integration.rdma_serving import Memory, rdma_pair
from tests.integration.serving import BLOCK_BYTES, file_of, pattern, run, running, serving
from tierfs.blocks.errors import NotFound, SourceRefused, StaleVersion
from tierfs.blocks.ids import VersionId, digest_block
from tierfs.blocks.spans import Span, block_count, whole_block
from tierfs.testing.sources import MemorySource
from tierfs.tiers.interface import Source
from tierfs.tiers.remote import RemoteSource

DATA = pattern(9 * BLOCK_BYTES + 4321)


@dataclass
class Subject:
    """One source that has DATA as ``file``."""

    source: Source
    memory: Memory
    version: VersionId


@asynccontextmanager
async def subject(transport: str, directory: Path) -> AsyncIterator[Subject]:
    (directory / "file").write_bytes(DATA)
    if transport == "memory":
        source = MemorySource({b"file": DATA}, block_bytes=BLOCK_BYTES)
        yield Subject(source, Memory(), file_of(await source.publication(), b"file")[0])
    elif transport == "tcp":
        async with serving(directory) as served, running(RemoteSource(served.url())) as remote:
            yield Subject(remote, Memory(), file_of(await remote.publication(), b"file")[0])
    else:
        async with rdma_pair(directory) as pair:
            await pair.ready()
            before = pair.source.statistics()
            yield Subject(pair.source, pair.memory, (await pair.file(b"file"))[0])
            after = pair.source.statistics()
            assert after.rdma_blocks - before.rdma_blocks == after.fetched_blocks - before.fetched_blocks
            assert after.rdma_failures == 0


transports = pytest.mark.parametrize("transport", ["memory", "tcp", "rdma"])


@transports
def test_every_block_arrives_whole_with_its_digest(tmp_path: Path, transport: str) -> None:
    async def main() -> None:
        async with subject(transport, tmp_path) as at:

            async def read(block: int) -> None:
                span = whole_block(len(DATA), BLOCK_BYTES, block)
                buffer = at.memory.slot(block, span.length_bytes)
                digest = await at.source.read_into(at.version, span, buffer)
                assert digest == digest_block(buffer)
                assert buffer == DATA[block * BLOCK_BYTES : block * BLOCK_BYTES + span.length_bytes]

            async with trio.open_nursery() as nursery:
                for block in range(block_count(len(DATA), BLOCK_BYTES)):
                    nursery.start_soon(read, block)

    run(main)


@transports
def test_a_part_of_a_block_fills_exactly_its_buffer(tmp_path: Path, transport: str) -> None:
    async def main() -> None:
        async with subject(transport, tmp_path) as at:
            around = at.memory.slot(0)
            around[:] = b"\xaa" * BLOCK_BYTES
            await at.source.read_into(at.version, Span(2, 1000, 5000), around[100:5100])
            start = 2 * BLOCK_BYTES + 1000
            assert around[100:5100] == DATA[start : start + 5000]
            assert bytes(around[:100]) == b"\xaa" * 100 and bytes(around[5100:5200]) == b"\xaa" * 100

    run(main)


@transports
def test_what_is_not_there_is_refused_and_the_next_block_arrives(tmp_path: Path, transport: str) -> None:
    async def main() -> None:
        async with subject(transport, tmp_path) as at:
            buffer = at.memory.slot(0)
            with pytest.raises(StaleVersion):
                await at.source.read_into(VersionId(bytes(16)), Span(0, 0, BLOCK_BYTES), buffer)
            with pytest.raises((NotFound, SourceRefused)):
                await at.source.read_into(at.version, Span(99, 0, BLOCK_BYTES), buffer)
            await at.source.read_into(at.version, Span(1, 0, BLOCK_BYTES), buffer)
            assert buffer == DATA[BLOCK_BYTES : 2 * BLOCK_BYTES]

    run(main)


@transports
def test_after_cancellation_the_buffer_is_left_alone(tmp_path: Path, transport: str) -> None:
    async def main() -> None:
        async with subject(transport, tmp_path) as at:
            for attempt in range(20):
                buffer = at.memory.slot(attempt)
                with trio.move_on_after(0.0005 * (attempt % 5)):
                    await at.source.read_into(at.version, Span(attempt % 9, 0, BLOCK_BYTES), buffer)
                buffer[:] = b"\x55" * BLOCK_BYTES
                await trio.sleep(0.002)
                assert bytes(buffer) == b"\x55" * BLOCK_BYTES, f"attempt {attempt}"
            buffer = at.memory.slot(0)
            await at.source.read_into(at.version, Span(3, 0, BLOCK_BYTES), buffer)
            assert buffer == DATA[3 * BLOCK_BYTES : 4 * BLOCK_BYTES]

    run(main)
