"""The prefetch budget: demand first, never more than the pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierfs.policy.budget import (
    BudgetConfig,
    RateBudget,
    Usage,
    prefetch_blocks,
    prefetch_fetches,
)

CONFIG = BudgetConfig(share_percent=75, reserve_percent=10)


def usage(pool: int, demand: int, unread: int) -> Usage:
    return Usage(pool_blocks=pool, demand_blocks=demand, unread_blocks=unread)


@pytest.mark.parametrize(
    ("pool", "demand", "unread", "may_take"),
    [
        (100, 0, 0, 75),  # its share
        (100, 10, 0, 75),  # demand fits beside it
        (100, 40, 0, 50),  # demand takes from it
        (100, 40, 30, 20),
        (100, 40, 50, 0),
        (100, 40, 60, 0),  # demand grew: give some back
        (100, 90, 0, 0),
        (100, 100, 5, 0),
        (100, 120, 5, 0),  # demand may be over the pool while it waits
        (1, 0, 0, 0),  # one block is demand's
        (2, 0, 0, 1),
        (4, 0, 0, 3),
        (4, 2, 0, 1),
        (0, 0, 0, 0),
    ],
)
def test_what_prefetch_may_take(pool: int, demand: int, unread: int, may_take: int) -> None:
    assert prefetch_blocks(CONFIG, usage(pool, demand, unread)) == may_take


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
    share=st.integers(0, 100),
    reserve=st.integers(0, 100),
)
def test_what_must_hold(pool: int, demand: int, unread: int, share: int, reserve: int) -> None:
    config = BudgetConfig(share_percent=share, reserve_percent=reserve)
    now = usage(pool, demand, unread)
    may_take = prefetch_blocks(config, now)
    assert may_take >= 0
    if may_take:
        assert demand + unread + may_take <= pool
        assert unread + may_take <= pool * share / 100
        assert pool - demand - unread - may_take >= pool * reserve / 100
    more_demand = usage(pool, demand + 1, unread)
    assert prefetch_blocks(config, more_demand) <= may_take


def test_prefetch_keeps_to_its_rate_and_may_spend_a_second_at_once() -> None:
    budget = RateBudget(100)
    started_s: list[float] = []
    now_s = 1000.0
    while len(started_s) < 21:
        wait_s = budget.wait_s(now_s)
        now_s += wait_s
        if not wait_s:
            started_s.append(now_s)
            budget.take(40)
    assert started_s[2] == 1000.0  # a second's worth, and one that was begun
    assert 6.5 <= started_s[-1] - started_s[0] <= 7.5  # 20 more of 40 bytes at 100 a second, less the first second


def test_idle_time_is_not_saved_up() -> None:
    budget = RateBudget(100)
    budget.wait_s(0.0)
    budget.take(100)
    assert budget.wait_s(1000.0) == 0
    budget.take(101)
    assert budget.wait_s(1000.0) > 0
