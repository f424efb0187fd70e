"""A job for the VM: where the time of a block by RDMA goes, beside ib_read_bw in the same guest.

    bash tests/vm/run.sh --run .venv/bin/python -m tests.vm.rdma_parts

The remote source of rdma_bench.py reads the model whole, with and without comparing digests; then each part of that
alone: the READs of a buffer that is lent already, leases of whole blocks (a message, the copy from the server's page
cache, a message), leases of 4 KiB (the messages), the digest. With one processor for everything the parts add up to the
whole. In turn, so that a busy host is equally unfair to all. Writes /share/rdma-parts.json and prints it.
"""

import json
import mmap
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from tests.vm.guest import BLOCK_BYTES, RDMA_HOST, SHARE, Server, write_model
from tests.vm.rdma_bench import AT_ONCE, MODEL_BYTES, busy_s, perftest, rate
from tierfs.blocks.ids import VersionId, digest_block
from tierfs.blocks.spans import whole_block
from tierfs.tiers.remote import RemoteSource
from tierfs.tiers.remote_rdma import RdmaPath, RdmaReader
from tierfs.transport.rdma.loading import load_pyverbs
from tierfs.transport.rdma.pyverbs_device import PyVerbs
from tierfs.transport.rdma.read_queue import PART_BYTES
from tierfs.wire import messages as m

ROUNDS = 5
BLOCKS = MODEL_BYTES // BLOCK_BYTES
LITTLE_BYTES = 4096
# As it comes; waiting for events as tierfs does, instead of taking the processor from the device; and with as many
# READs under way as tierfs has.
PERFTEST = ((), ("-e",), ("-o", "2"), ("-e", "-o", "2"))


def main() -> None:
    """Measure, and print medians in ns a byte."""
    load_pyverbs()
    directory = Path(tempfile.mkdtemp())
    write_model(directory / "exported" / "weights.bin", MODEL_BYTES, seed=21)
    with Server(directory / "exported", directory / "served", RDMA_HOST) as server:
        token = (directory / "token").read_bytes().strip()
        rounds = trio.run(measure, server.url, token)
    report = {
        name: {
            "median_ns_per_byte": round(statistics.median(one["seconds"] for one in found) / MODEL_BYTES * 1e9, 2),
            "rounds": found,
        }
        for name, found in rounds.items()
    }
    text = json.dumps(report, indent=1)
    (SHARE / "rdma-parts.json").write_text(text)
    print(text)


async def measure(url: str, token: bytes) -> dict[str, list[dict[str, float]]]:
    """Every part, ROUNDS times."""
    memory = memoryview(mmap.mmap(-1, AT_ONCE * BLOCK_BYTES))
    reader = RdmaReader(PyVerbs, source=url, timeout_s=10)
    source = RemoteSource(url, token=token, connections=1, rdma=reader, rdma_only=True)
    found: dict[str, list[dict[str, float]]] = {}
    async with trio.open_nursery() as nursery:
        await nursery.start(source.run)
        publication = await source.publication()
        await source.use_memory(memory, block_bytes=BLOCK_BYTES, key="memory.limit")
        while not reader.ports:  # noqa: ASYNC110 - nothing to wait for but a state
            await trio.sleep(0.05)
        version = VersionId(next(entry for entry in publication.catalog.entries if entry.version).version)
        parts = Parts(source, reader._paths[0], version, memory)
        for _ in range(ROUNDS):
            for options in PERFTEST:
                bandwidth = (await trio.to_thread.run_sync(perftest, PART_BYTES, *options))["mb_per_s"]
                name = " ".join(("ib_read_bw", *options))
                found.setdefault(name, []).append({"seconds": MODEL_BYTES / bandwidth / 1e6})
            for name, part in parts.named().items():
                before, begun_s = busy_s(), time.monotonic()
                await part()
                seconds = time.monotonic() - begun_s
                found.setdefault(name, []).append(rate(MODEL_BYTES, seconds, busy_s() - before))
        nursery.cancel_scope.cancel()
    return found


class Parts:
    """What one load is made of, each done for all blocks of the model."""

    def __init__(self, source: RemoteSource, path: RdmaPath, version: VersionId, memory: memoryview) -> None:
        self._source, self._path, self._version, self._memory = source, path, version, memory

    def named(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """In the order they are measured in."""
        return {
            "whole": lambda: self._each(self._compared),
            "without comparing": lambda: self._each(self._fetched),
            "READs": self._reads,
            "leases": lambda: self._each(lambda block, _: self._leased(block, BLOCK_BYTES)),
            "messages": lambda: self._each(lambda block, _: self._leased(block, LITTLE_BYTES)),
            "digests": lambda: self._each(self._digested),
        }

    async def _each(self, one: Callable[[int, memoryview], Awaitable[object]]) -> None:
        blocks = iter(range(BLOCKS))

        async def work(slot: int) -> None:
            for block in blocks:
                await one(block, self._slot(slot))

        async with trio.open_nursery() as workers:
            for slot in range(AT_ONCE):
                workers.start_soon(work, slot)

    async def _fetched(self, block: int, buffer: memoryview) -> bytes:
        return await self._source.read_into(self._version, whole_block(MODEL_BYTES, BLOCK_BYTES, block), buffer)

    async def _compared(self, block: int, buffer: memoryview) -> None:
        assert await self._fetched(block, buffer) == digest_block(buffer)

    async def _digested(self, block: int, buffer: memoryview) -> None:
        digest_block(buffer)
        await trio.lowlevel.checkpoint()

    async def _leased(self, block: int, length_bytes: int) -> None:
        leased = await self._lease(block, length_bytes)
        self._path._give_back(leased.lease)

    async def _lease(self, block: int, length_bytes: int) -> m.Leased:
        request = m.LeaseBlock(self._version, block, 0, length_bytes, BLOCK_BYTES)
        self._path._send_returned()
        reply = await self._path._link.request(request, m.Type.LEASED)
        assert isinstance(reply.message, m.Leased)
        return reply.message

    async def _reads(self) -> None:
        leased = await self._lease(0, BLOCK_BYTES)

        async def read(block: int, buffer: memoryview) -> None:
            local = self._path._device.local_key(buffer)
            assert local is not None
            await self._path.queue.read(
                address=local[0], local_key=local[1], remote_address=leased.address, remote_key=leased.remote_key,
                length_bytes=BLOCK_BYTES,
            )  # fmt: skip

        await self._each(read)
        self._path._give_back(leased.lease)

    def _slot(self, number: int) -> memoryview:
        return self._memory[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]


if __name__ == "__main__":
    main()
