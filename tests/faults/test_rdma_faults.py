"""Whatever goes wrong with RDMA, a block arrives another way, in time, and nothing is left open."""

from collections import Counter
from pathlib import Path

import pytest
import trio

from tests.integration.rdma_serving import BLOCK_BYTES, Memory, rdma_pair
from tests.integration.serving import eventually, file_of, pattern, run, running, serving
from tierfs.blocks.errors import SourceUnavailable
from tierfs.blocks.ids import VersionId, digest_block
from tierfs.blocks.spans import Span
from tierfs.server.rdma import RdmaService
from tierfs.testing.verbs import GENERAL, NO_ANSWER, REFUSED, Fabric, roce_port
from tierfs.tiers.remote import RemoteSource
from tierfs.tiers.remote_rdma import RdmaReader
from tierfs.wire import messages as m

DATA = pattern(12 * BLOCK_BYTES + 77)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(DATA)
    return tmp_path


@pytest.mark.parametrize("status", [REFUSED, NO_ANSWER, GENERAL])
def test_a_failed_read_comes_by_another_queue_pair_or_tcp(exported: Path, status: int) -> None:
    async def main() -> None:
        async with rdma_pair(exported) as pair:
            await pair.ready(2)
            pair.fabric.fail_next = [status]
            assert await pair.read(b"file") == DATA
            statistics = pair.source.statistics()
            assert statistics.rdma_failures >= 1
            assert not pair.fabric.fail_next
            await pair.ready(2)  # the queue pair is made again
            assert pair.source.statistics().rdma_failed_reads >= 1

    run(main)


def test_with_every_queue_pair_failing_the_blocks_come_by_tcp(exported: Path) -> None:
    async def main() -> None:
        async with rdma_pair(exported) as pair:
            await pair.ready(2)
            pair.fabric.fail_next = [NO_ANSWER] * 1000
            assert await pair.read(b"file") == DATA
            assert pair.source.statistics().rdma_blocks == 0
            await eventually(lambda: pair.source.statistics().device == "" or not pair.fabric.fail_next)

    run(main)


def test_a_peer_that_stops_answering_costs_one_deadline(exported: Path) -> None:
    async def main() -> None:
        async with rdma_pair(exported, timeout_s=0.5, connections=1) as pair:
            await pair.ready()
            pair.fabric.deaf = True
            begun_s = trio.current_time()
            digest, data = await pair.read_block(b"file")
            assert data == DATA[:BLOCK_BYTES] and digest == digest_block(data)
            assert 0.5 <= trio.current_time() - begun_s < 5
            assert pair.source.statistics().transport_reason or pair.source.statistics().device

    run(main)


def test_a_buffer_is_reused_only_when_the_queue_pair_of_its_cancelled_read_is_gone(exported: Path) -> None:
    async def main() -> None:
        async with rdma_pair(exported, connections=1) as pair:
            await pair.ready()
            pair.fabric.hold = pair.fabric.late = True
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(pair.read_block, b"file", 1)
                    await eventually(lambda: pair.fabric.held > 0)
                    scope.cancel()
            buffer = pair.memory.slot(0)
            buffer[:] = b"\x55" * BLOCK_BYTES
            pair.fabric.hold = False
            pair.fabric.release()  # late completions of a queue pair that is gone
            await trio.sleep(0.01)
            assert bytes(buffer) == b"\x55" * BLOCK_BYTES
            assert await pair.read(b"file") == DATA

    run(main)


def test_completions_in_any_order_between_queue_pairs_bring_the_right_blocks(exported: Path) -> None:
    async def main() -> None:
        async with rdma_pair(exported, connections=3, fabric=Fabric(seed=3)) as pair:
            await pair.ready(2)
            pair.fabric.hold = True

            async def release() -> None:
                while True:
                    await trio.sleep(0.003)
                    pair.fabric.release(shuffle=True)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(release)
                assert await pair.read(b"file") == DATA
                nursery.cancel_scope.cancel()
            assert pair.source.statistics().rdma_blocks == 13

    run(main)


def test_memory_that_may_not_be_pinned_is_a_reason_and_tcp_goes_on(exported: Path) -> None:
    async def main() -> None:
        async with rdma_pair(exported, fabric=Fabric(pin_limit_bytes=1 << 20)) as pair:
            await eventually(lambda: "registered" in pair.source.statistics().transport_reason)
            reason = pair.source.statistics().transport_reason
            assert "memory.limit" in reason and ("RLIMIT_MEMLOCK" in reason or "pinned" in reason)
            assert await pair.read(b"file") == DATA
            assert pair.source.statistics().transport == "tcp"

    run(main)


def test_a_server_that_may_pin_no_more_says_so(exported: Path) -> None:
    async def main() -> None:
        async with rdma_pair(exported, server_bytes=BLOCK_BYTES) as pair:
            await eventually(lambda: "server.rdma_memory" in pair.source.statistics().transport_reason)
            assert await pair.read(b"file") == DATA

    run(main)


def test_a_device_that_is_removed_in_mid_load_costs_no_block(exported: Path) -> None:
    async def main() -> None:
        async with rdma_pair(exported) as pair:
            await pair.ready(2)
            assert (await pair.read_block(b"file"))[1] == DATA[:BLOCK_BYTES]
            pair.fabric.removed = {"fake0"}
            assert await pair.read(b"file") == DATA
            await eventually(lambda: "no RDMA device" in pair.source.statistics().transport_reason)
            pair.fabric.removed = set()
            await pair.ready()
            assert await pair.read(b"file") == DATA

    run(main)


def test_a_lease_that_is_over_is_reused_and_the_digest_tells(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierfs.server.rdma.LEASE_S", 1)
    monkeypatch.setattr("tierfs.server.rdma.BUFFERS_MOST", 2)

    async def main() -> None:
        async with rdma_pair(exported, connections=1, timeout_s=8.0) as pair:
            await pair.ready()
            pair.fabric.hold = True
            results: list[bool] = []

            async def read(slot: int) -> None:
                digest, data = await pair.read_block(b"file", slot, slot)
                results.append(digest == digest_block(data))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read, 0)
                nursery.start_soon(read, 1)
                await eventually(lambda: pair.fabric.held >= 2)
                lending = pair.served.server  # the session's buffers are both lent; a third lease needs one of them
                assert lending.statistics().lent_blocks == 2
                assert lending.statistics().requests["lease"]["ok"] == 2 and lending.statistics().pinned_bytes > 0
                await trio.sleep(1.1)
                link = pair.source._links[0]  # a client that asks for more than its credits
                version, _ = await pair.file(b"file")
                for block in (5, 6):
                    await link.request(m.LeaseBlock(version, block, 0, BLOCK_BYTES, BLOCK_BYTES), m.Type.LEASED)
                pair.fabric.hold = False
                pair.fabric.release()
            assert results == [False, False]

    run(main)


def test_nothing_leaks_over_a_thousand_reconnects(exported: Path) -> None:
    async def main() -> None:
        fabric = Fabric()
        service = RdmaService(fabric.machine, memory_bytes=64 << 20)
        memory = Memory()
        async with serving(exported, rdma=service) as served:
            reader = RdmaReader(fabric.machine, source="test", timeout_s=5)
            async with running(RemoteSource(served.url(), connections=1, rdma=reader)) as source:
                publication = await source.publication()
                await source.use_memory(memory.whole, block_bytes=BLOCK_BYTES, key="memory.limit")
                version = file_of(publication, b"file")[0]
                await eventually(lambda: bool(reader.ports))
                steady = Counter(fabric.open)
                link = source._links[0]
                for number in range(1000):
                    async with reader._connected(link) as path:
                        block = number % 12
                        buffer = memory.slot(number)
                        if number % 3 == 0:
                            fabric.fail_next = [NO_ANSWER]
                            with pytest.raises(SourceUnavailable):
                                await path.fetch(_lease(version, block), buffer)
                        else:
                            await path.fetch(_lease(version, block), buffer)
                            assert buffer == DATA[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
                await eventually(lambda: fabric.open["queue_pair"] <= steady["queue_pair"])
                assert service.lent_bytes <= 64 << 20
                assert await source.read_into(version, Span(0, 0, BLOCK_BYTES), memory.slot(0))
        assert fabric.open == Counter(), fabric.open
        assert (service.lent_bytes, fabric.pinned_bytes) == (0, 0)

    run(main)


def _lease(version: VersionId, block: int) -> m.LeaseBlock:
    return m.LeaseBlock(version, block, 0, BLOCK_BYTES, BLOCK_BYTES)


def test_rdma_alone_refuses_with_what_is_missing(exported: Path) -> None:
    async def main() -> None:
        async with rdma_pair(exported, fabric=Fabric(removed={"fake0"}), rdma_only=True, offered=False) as pair:
            with pytest.raises(SourceUnavailable, match="no RDMA device here.*rdma link add"):
                await pair.source.use_memory(pair.memory.whole, block_bytes=BLOCK_BYTES, key="memory.limit")
        async with rdma_pair(exported, server_bytes=BLOCK_BYTES, rdma_only=True, offered=False) as pair:
            with pytest.raises(SourceUnavailable, match=r"server\.rdma_memory"):
                await pair.source.use_memory(pair.memory.whole, block_bytes=BLOCK_BYTES, key="memory.limit")

    run(main)


def test_rdma_alone_never_goes_over_tcp(exported: Path) -> None:
    async def main() -> None:
        async with rdma_pair(exported, rdma_only=True) as pair:
            assert (await pair.read_block(b"file"))[1] == DATA[:BLOCK_BYTES]
            pair.fabric.fail_next = [NO_ANSWER] * 10
            with pytest.raises(SourceUnavailable, match=r"source\.transport is rdma"):
                await pair.read_block(b"file", 1)
            pair.fabric.fail_next = []
            await pair.ready()
            assert await pair.read(b"file") == DATA
            statistics = pair.source.statistics()
            assert statistics.rdma_blocks == statistics.fetched_blocks

    run(main)


def test_a_server_that_knows_no_rdma_is_served_from_over_tcp(exported: Path) -> None:
    async def main() -> None:
        fabric = Fabric()
        memory = Memory()
        async with serving(exported) as served:
            reader = RdmaReader(fabric.machine, source="test", timeout_s=5)
            async with running(RemoteSource(served.url(), rdma=reader)) as source:
                publication = await source.publication()
                await source.use_memory(memory.whole, block_bytes=BLOCK_BYTES, key="memory.limit")
                await eventually(lambda: "server offers no RDMA" in source.statistics().transport_reason)
                version = file_of(publication, b"file")[0]
                buffer = memory.slot(0)
                await source.read_into(version, Span(0, 0, BLOCK_BYTES), buffer)
                assert buffer == DATA[:BLOCK_BYTES]
                assert source.statistics().transport == "tcp"
        assert fabric.open == Counter()

    run(main)


def test_addresses_without_a_device_are_named_in_the_reason(exported: Path) -> None:
    async def main() -> None:
        fabric = Fabric()
        service = RdmaService(fabric.machine, memory_bytes=64 << 20)
        async with serving(exported, rdma=service) as served:
            reader = RdmaReader(lambda: fabric.machine(roce_port(b"\x0a\x00\x00\x01")), source="test", timeout_s=5)
            async with running(RemoteSource(served.url(), rdma=reader)) as source:
                await source.publication()
                await source.use_memory(memoryview(bytearray(BLOCK_BYTES)), block_bytes=BLOCK_BYTES, key="memory.limit")
                await eventually(lambda: "127.0.0.1" in source.statistics().transport_reason)

    run(main)
