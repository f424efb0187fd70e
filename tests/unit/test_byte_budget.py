"""The byte budget of the server: never over its limit, served in order, no long waits for a slow holder."""

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from tierfs.server.budget import ByteBudget


def run(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def never() -> bool:
    return False


def test_waiters_are_served_in_order_and_the_limit_holds() -> None:
    budget = ByteBudget(10, patience_s=5)
    order: list[int] = []

    async def use(number: int, size_bytes: int) -> None:
        await trio.sleep(number / 100)
        async with budget.hold(size_bytes, never):
            order.append(number)
            assert budget.held_bytes <= 10
            await trio.sleep(1)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number, size_bytes in enumerate([6, 6, 5, 7, 10, 4]):
                nursery.start_soon(use, number, size_bytes)
        assert order == [0, 1, 2, 3, 4, 5], "a small one may not pass a large one for ever"
        assert budget.held_bytes == 0 and budget.most_held_bytes == 10

    run(main)


def test_what_is_larger_than_the_limit_gets_all_of_it() -> None:
    async def main() -> None:
        budget = ByteBudget(10, patience_s=5)
        async with budget.hold(1000, never):
            assert budget.held_bytes == 10

    run(main)


@pytest.mark.parametrize("when", ["waiting", "granted"])
def test_a_cancelled_waiter_leaves_nothing(when: str) -> None:
    async def main() -> None:
        budget = ByteBudget(10, patience_s=5)
        scope = trio.CancelScope()

        async def wait() -> None:
            with scope:
                async with budget.hold(5, never):
                    raise AssertionError("was not cancelled")

        async with trio.open_nursery() as nursery, budget.hold(10, never):
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
            if when == "waiting":  # else the budget is freed, and granted, before the waiter sees that it is cancelled
                await trio.testing.wait_all_tasks_blocked()
        assert budget.held_bytes == 0
        async with budget.hold(10, never):
            pass

    run(main)


def test_a_slow_holder_is_cut_off_only_when_others_wait() -> None:
    cut_at: list[float] = []

    async def main() -> None:
        budget = ByteBudget(10, patience_s=5)
        slow = trio.CancelScope()

        def cut_off() -> bool:
            cut_at.append(trio.current_time())
            slow.cancel()
            return True

        async def hold_on() -> None:
            with slow:
                async with budget.hold(10, cut_off):
                    await trio.sleep_forever()

        start_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold_on)
            await trio.sleep(100)
            assert not cut_at, "nobody waited"
            async with budget.hold(1, never):
                assert trio.current_time() - start_s == pytest.approx(105)
        assert len(cut_at) == 1 and budget.cut_offs == 1

    run(main)


def test_a_holder_whose_peer_is_not_to_blame_is_passed_over() -> None:
    async def main() -> None:
        budget = ByteBudget(10, patience_s=5)
        async with trio.open_nursery() as nursery:
            slow = trio.CancelScope()

            def cut_off() -> bool:
                slow.cancel()
                return True

            async def hold_on(scope: trio.CancelScope, cut: Callable[[], bool]) -> None:
                with scope:
                    async with budget.hold(5, cut):
                        await trio.sleep_forever()

            busy = trio.CancelScope()
            nursery.start_soon(hold_on, busy, never)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(hold_on, slow, cut_off)
            await trio.testing.wait_all_tasks_blocked()
            async with budget.hold(5, never):
                assert slow.cancel_called and not busy.cancel_called
            busy.cancel()

    run(main)
