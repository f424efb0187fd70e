"""A staging buffer is lent once at a time, comes back once, and is taken back when its lease is over."""

import pytest
import trio
import trio.testing

from tierfs.blocks.errors import SourceUnavailable
from tierfs.server.leases import Leases
from tierfs.transport.rdma.lending import StagingBuffer


def buffers(count: int) -> list[StagingBuffer]:
    return [StagingBuffer(memoryview(bytearray(8)), 8 * number, number) for number in range(count)]


def test_each_buffer_has_one_lease_and_comes_back_once() -> None:
    async def main() -> None:
        leases = Leases(buffers(2), lease_s=60)
        first, second = await leases.take(timeout_s=1), await leases.take(timeout_s=1)
        assert first is not second
        leases.grant(1, first)
        leases.grant(2, second)
        leases.give_back(1)
        leases.give_back(1)  # twice, and one that never was
        leases.give_back(99)
        assert await leases.take(timeout_s=1) is first
        with pytest.raises(SourceUnavailable):
            await leases.take(timeout_s=0.01)

    trio.run(main)


def test_one_who_waits_gets_the_buffer_that_is_returned() -> None:
    async def main() -> None:
        leases = Leases(buffers(1), lease_s=60)
        buffer = await leases.take(timeout_s=1)
        leases.grant(1, buffer)
        taken: list[StagingBuffer] = []

        async def wait() -> None:
            taken.append(await leases.take(timeout_s=5))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            assert not taken
            leases.give_back(1)
        assert taken == [buffer]

    trio.run(main)


def test_a_buffer_whose_lease_is_over_is_taken_back_only_when_it_is_needed() -> None:
    async def main() -> None:
        leases = Leases(buffers(2), lease_s=10)
        first, second = await leases.take(timeout_s=1), await leases.take(timeout_s=1)
        leases.grant(1, first)
        await trio.sleep(5)
        leases.grant(2, second)
        await trio.sleep(6)
        assert (leases.lent, leases.expired) == (2, 0)
        assert await leases.take(timeout_s=1) is first
        begun_s = trio.current_time()
        assert await leases.take(timeout_s=60) is second  # waits for the end of its lease
        assert 3 < trio.current_time() - begun_s < 5
        assert leases.expired == 2
        leases.give_back(1)
        leases.give_back(2)
        with pytest.raises(SourceUnavailable):
            await leases.take(timeout_s=1)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_nobody_waits_for_buffers_that_are_gone() -> None:
    async def main() -> None:
        leases = Leases(buffers(1), lease_s=60)
        buffer = await leases.take(timeout_s=1)

        async def wait() -> None:
            with pytest.raises(SourceUnavailable, match="gone"):
                await leases.take(timeout_s=60)

        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
                leases.close()
        leases.put(buffer)
        with pytest.raises(SourceUnavailable):
            await leases.take(timeout_s=1)

    trio.run(main)


def test_a_waiter_that_is_cancelled_leaves_the_buffer_to_the_next() -> None:
    async def main() -> None:
        leases = Leases(buffers(1), lease_s=60)
        buffer = await leases.take(timeout_s=1)
        with trio.move_on_after(0.01):
            await leases.take(timeout_s=10)
        leases.put(buffer)
        assert await leases.take(timeout_s=1) is buffer

    trio.run(main)
