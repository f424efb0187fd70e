"""When a device counts as stalled: calls that threads are in are counted in ticks, see tierfs/tiers/device.py."""

import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from tests.local_tiers import run, until
from tierfs.tiers.device import READ_TICKS, Device

WRITE_TICKS = 30


def in_service(path: Path) -> Device:
    device = Device(path, mapped=False, probe_s=1, block_bytes=4096, capacity_bytes=None)
    device.recovered()
    return device


@asynccontextmanager
async def in_a_call(how: Callable[..., Awaitable[object]]) -> AsyncIterator[threading.Event]:
    """A thread is in a call of that kind; it ends when the event is set, or with the block."""
    entered, answer = threading.Event(), threading.Event()

    def call() -> None:
        entered.set()
        answer.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(how, call)
        await until(entered.is_set)
        try:
            yield answer
        finally:
            answer.set()


def ticks(device: Device, count: int) -> list[bool]:
    return [device.tick() for _ in range(count)]


def test_a_read_without_an_answer_stalls_the_device_once(tmp_path: Path) -> None:
    async def test() -> None:
        device = in_service(tmp_path)
        waiter = trio.Event()
        async with in_a_call(device.reading), in_a_call(device.writing):
            with device.waiting(waiter):
                assert not any(ticks(device, READ_TICKS))
                assert device.readable and not waiter.is_set()
                assert device.tick()
            assert device.state == "stalled" and not device.readable and not device.writable and device.present
            assert waiter.is_set() and device.attention.is_set()
            assert not any(ticks(device, 2 * WRITE_TICKS))  # neither the read nor the write is news any more
            assert device.state == "stalled"

    run(test)


def test_a_write_may_take_longer_and_stops_writes_only(tmp_path: Path) -> None:
    async def test() -> None:
        device = in_service(tmp_path)
        async with in_a_call(device.writing):
            assert not any(ticks(device, WRITE_TICKS))
            assert device.tick()
            assert device.state == "degraded" and device.readable and not device.writable
            assert not any(ticks(device, WRITE_TICKS))
            async with in_a_call(device.reading):  # then reads stop, too
                assert ticks(device, READ_TICKS + 1) == [False] * READ_TICKS + [True]
            assert device.state == "stalled"

    run(test)


def test_calls_that_are_answered_never_add_up(tmp_path: Path) -> None:
    async def test() -> None:
        device = in_service(tmp_path)
        for _ in range(3 * READ_TICKS):
            async with in_a_call(device.reading) as answer:
                assert not any(ticks(device, READ_TICKS))
                answer.set()
        assert not any(ticks(device, 2 * READ_TICKS))  # nothing is left of them
        assert device.state == "ok"

    run(test)


def test_a_call_that_was_left_behind_is_late_too(tmp_path: Path) -> None:
    async def test() -> None:
        device = in_service(tmp_path)
        answer = threading.Event()
        with trio.move_on_after(0.05) as scope:
            await device.reading(answer.wait, abandon=True)
        assert scope.cancelled_caught
        try:
            assert ticks(device, READ_TICKS + 1) == [False] * READ_TICKS + [True]
        finally:
            answer.set()

    run(test)


def test_a_stalled_device_is_no_news_to_a_copy_that_is_late_too(tmp_path: Path) -> None:
    device = in_service(tmp_path)
    assert device.stall()
    assert not device.stall()
    device.answers(OSError(28, "No space left on device"))
    assert device.state == "degraded" and device.readable
    assert device.stall()


def test_what_is_lost_does_not_come_back_by_stalling(tmp_path: Path) -> None:
    device = in_service(tmp_path)
    device.fault(OSError(19, "No such device"), lost=True)
    assert not device.stall()
    assert device.state == "lost"
