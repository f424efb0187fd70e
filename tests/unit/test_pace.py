"""The run-ahead follows what readers meet."""

from hypothesis import given
from hypothesis import strategies as st

from tierfs.policy.pace import Pace


def test_a_far_source_gets_its_bandwidth_times_delay_within_a_few_round_trips() -> None:
    pace = Pace(floor_blocks=8, ceiling_blocks=64)
    seen = []
    for _ in range(4):
        pace.waited()
        seen.append(pace.blocks)
        for _ in range(pace.blocks):
            pace.read()
    assert seen == [16, 32, 64, 64]


def test_waiting_many_times_in_one_round_trip_counts_once() -> None:
    pace = Pace(floor_blocks=8, ceiling_blocks=64)
    for _ in range(50):
        pace.waited()
    assert pace.blocks == 16


def test_readers_that_never_wait_bring_it_down_to_the_floor() -> None:
    pace = Pace(floor_blocks=8, ceiling_blocks=64)
    for _ in range(3):
        pace.waited()
        for _ in range(64):
            pace.read()
    assert pace.blocks > 8
    for _ in range(10_000):
        pace.read()
    assert pace.blocks == 8


@given(st.lists(st.booleans(), max_size=500), st.integers(1, 20), st.integers(0, 100))
def test_it_stays_between_floor_and_ceiling(events: list[bool], floor: int, more: int) -> None:
    pace = Pace(floor_blocks=floor, ceiling_blocks=floor + more)
    for waited in events:
        pace.waited() if waited else pace.read()
        assert floor <= pace.blocks <= floor + more


def test_blocks_of_shards_opened_for_their_headers_do_not_hold_it_down() -> None:
    pace = Pace(floor_blocks=4, ceiling_blocks=64)
    pace.waited()
    for _ in range(3):
        pace.waited(idle=True)
    assert pace.blocks == 64
