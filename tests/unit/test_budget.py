"""The prefetch budget: demand first, fair between streams, never more than the pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierfs.policy.budget import (
    BudgetConfig,
    Usage,
    excess_blocks,
    prefetch_blocks,
    prefetch_fetches,
    stream_blocks,
)

CONFIG = BudgetConfig(share_percent=75, reserve_percent=10)


def usage(pool: int, demand: int, unread: int, streams: int = 1) -> Usage:
    return Usage(pool_blocks=pool, demand_blocks=demand, unread_blocks=unread, streams_active=streams)


@pytest.mark.parametrize(
    ("pool", "demand", "unread", "may_take", "excess"),
    [
        (100, 0, 0, 75, 0),  # its share
        (100, 10, 0, 75, 0),  # demand fits beside it
        (100, 40, 0, 50, 0),  # demand takes from it
        (100, 40, 30, 20, 0),
        (100, 40, 50, 0, 0),
        (100, 40, 60, 0, 10),  # demand grew: give some back
        (100, 90, 0, 0, 0),
        (100, 100, 5, 0, 5),
        (100, 120, 5, 0, 5),  # demand may be over the pool while it waits
        (1, 0, 0, 0, 0),  # one block is demand's
        (2, 0, 0, 1, 0),
        (4, 0, 0, 3, 0),
        (4, 2, 0, 1, 0),
        (0, 0, 0, 0, 0),
    ],
)
def test_what_prefetch_may_take(pool: int, demand: int, unread: int, may_take: int, excess: int) -> None:
    assert prefetch_blocks(CONFIG, usage(pool, demand, unread)) == may_take
    assert excess_blocks(CONFIG, usage(pool, demand, unread)) == excess


@pytest.mark.parametrize(
    ("streams", "unread", "held", "may_take"),
    [
        (1, 0, 0, 75),
        (3, 0, 0, 25),
        (3, 20, 20, 5),
        (3, 25, 25, 0),  # the others have not begun: their part stays theirs
        (3, 70, 10, 5),  # its part is 25, but only 5 are left
        (200, 0, 0, 1),  # at least one each as long as there is any
        (200, 74, 0, 1),
        (200, 75, 0, 0),
        (0, 0, 0, 75),
    ],
)
def test_streams_share(streams: int, unread: int, held: int, may_take: int) -> None:
    assert stream_blocks(CONFIG, usage(100, 0, unread, streams), held_blocks=held) == may_take


@pytest.mark.parametrize(
    ("slots", "demand", "prefetch", "may_start"),
    [(16, 0, 0, 15), (16, 4, 3, 8), (16, 15, 0, 0), (16, 40, 0, 0), (16, 0, 15, 0), (1, 0, 0, 1), (1, 1, 0, 0)],
)
def test_one_slot_of_the_source_stays_free_for_demand(slots: int, demand: int, prefetch: int, may_start: int) -> None:
    assert prefetch_fetches(slots=slots, demand_fetches=demand, prefetch_fetches=prefetch) == may_start


@given(
    pool=st.integers(0, 1000),
    demand=st.integers(0, 1200),
    unread=st.integers(0, 1200),
    streams=st.integers(0, 100),
    held=st.integers(0, 1200),
    share=st.integers(0, 100),
    reserve=st.integers(0, 100),
)
def test_what_must_hold(
    pool: int, demand: int, unread: int, streams: int, held: int, share: int, reserve: int
) -> None:
    config = BudgetConfig(share_percent=share, reserve_percent=reserve)
    now = usage(pool, demand, unread, streams)
    may_take = prefetch_blocks(config, now)
    assert may_take >= 0
    if may_take:
        assert demand + unread + may_take <= pool
        assert unread + may_take <= pool * share / 100
        assert pool - demand - unread - may_take >= pool * reserve / 100
    assert 0 <= stream_blocks(config, now, held_blocks=held) <= may_take
    assert not (may_take and excess_blocks(config, now))
    more_demand = usage(pool, demand + 1, unread, streams)
    assert prefetch_blocks(config, more_demand) <= may_take


@given(pool=st.integers(2, 500), demand=st.integers(0, 500), streams=st.integers(1, 64))
def test_streams_that_start_together_all_get_a_part(pool: int, demand: int, streams: int) -> None:
    held = [0] * streams
    for _ in range(pool):
        for stream in range(streams):
            now = usage(pool, demand, sum(held), streams)
            held[stream] += min(1, stream_blocks(CONFIG, now, held_blocks=held[stream]))
    room = prefetch_blocks(CONFIG, usage(pool, demand, 0, streams))
    assert max(held) - min(held) <= 1
    assert sum(held) <= room
    assert sum(held) >= min(room, room // streams * streams)
