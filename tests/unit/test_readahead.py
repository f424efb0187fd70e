"""Readahead, request by request: what is planned, what is not, and what must hold whatever is asked."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierfs.policy.readahead import Plan, Readahead, ReadaheadConfig

KIB = 1 << 10
MIB = 1 << 20
BLOCK = 4 * MIB
SIZE = 64 << 30


def make(*, size_bytes: int = SIZE, window_max_bytes: int = 256 * MIB, streams_max: int = 64) -> Readahead:
    config = ReadaheadConfig(window_max_bytes=window_max_bytes, streams_max=streams_max)
    return Readahead(config, size_bytes=size_bytes, block_bytes=BLOCK)


# Each row: requests as (offset, length) in MiB, and the blocks planned at each; None: nothing, not in a stream.
NOTHING = range(0)
TABLES: dict[str, list[tuple[float, float, range | None]]] = {
    "from the start of the file the window doubles at each block": [
        (0, 1, range(1, 3)),
        (1, 1, NOTHING),
        (2, 2, NOTHING),
        (4, 1, range(3, 6)),
        (5, 3, NOTHING),
        (8, 1, range(6, 11)),
        (12, 1, range(11, 20)),
    ],
    "a single random read plans nothing, the second in a row one block": [
        (100, 1, None),
        (101, 1, range(26, 27)),
        (102, 1, NOTHING),
        (104, 1, range(27, 29)),
        (108, 1, range(29, 32)),
    ],
    "a request over several blocks plans only what lies behind it": [
        (0, 10, range(3, 5)),
        (10, 10, range(5, 9)),
    ],
    "requests that overtake each other are one stream": [
        (100, 1, None),
        (103, 1, range(26, 27)),
        (101, 1, NOTHING),
        (105, 1, range(27, 29)),
        (102, 1, NOTHING),
        (104, 1, NOTHING),
        (112, 1, range(29, 31)),
        (108, 1, NOTHING),
        (113, 1, NOTHING),
    ],
    "small gaps and back-steps stay in the stream": [
        (100, 1, None),
        (101.5, 1, range(26, 27)),
        (101, 1, NOTHING),
        (104.25, 1, range(27, 29)),
        (103, 1, NOTHING),
    ],
    "the same range again changes nothing": [
        (100, 1, None),
        (100, 1, None),
        (101, 1, range(26, 27)),
        (101, 1, NOTHING),
        (100, 1, NOTHING),
    ],
    "two streams do not disturb each other": [
        (0, 1, range(1, 3)),
        (4096, 1, None),
        (1, 4, range(3, 6)),
        (4097, 1, range(1025, 1026)),
        (5, 4, range(6, 11)),
        (4098, 3, range(1026, 1028)),
    ],
    "a far jump begins anew": [
        (0, 1, range(1, 3)),
        (4, 1, range(3, 6)),
        (400, 1, None),
        (401, 1, range(101, 102)),
    ],
    "reading backwards plans nothing": [(100 - step, 1, None) for step in range(60)],
}


@pytest.mark.parametrize("name", TABLES)
def test_table(name: str) -> None:
    readahead = make()
    for offset, length, planned in TABLES[name]:
        plan = readahead.observe(int(offset * MIB), int(length * MIB))
        expected = Plan() if planned is None else Plan(planned, sequential=True)
        assert (list(plan.blocks), plan.sequential) == (list(expected.blocks), expected.sequential), (offset, length)


def test_an_empty_request_and_one_beyond_the_end_plan_nothing() -> None:
    readahead = make(size_bytes=10 * MIB)
    assert readahead.observe(0, 0) == Plan()
    assert readahead.observe(10 * MIB, MIB) == Plan()
    assert readahead.observe(40 * MIB, MIB) == Plan()
    assert readahead.stream_count == 0
    assert make(size_bytes=0).observe(0, MIB) == Plan()


def test_an_empty_request_does_not_move_a_stream() -> None:
    readahead = make()
    readahead.observe(0, MIB)
    assert readahead.observe(MIB, 0) == Plan()
    assert readahead.observe(MIB, MIB).sequential


def test_the_window_stops_at_its_maximum_and_at_the_end_of_the_file() -> None:
    readahead = make(size_bytes=200 * MIB + 5, window_max_bytes=32 * MIB)
    planned: list[int] = []
    for offset in range(0, 200 * MIB, MIB):
        plan = readahead.observe(offset, MIB)
        assert readahead.window_bytes <= 32 * MIB
        assert not plan.blocks or plan.blocks.stop <= offset // BLOCK + 9
        planned += plan.blocks
    assert planned == list(range(1, 51))
    assert readahead.window_bytes == 32 * MIB


def test_a_window_maximum_below_one_block_plans_nothing_but_knows_streams() -> None:
    readahead = make(window_max_bytes=BLOCK - 1)
    plans = [readahead.observe(offset, MIB) for offset in range(0, 64 * MIB, MIB)]
    assert not any(plan.blocks for plan in plans)
    assert all(plan.sequential for plan in plans[1:])


def test_the_floor_of_a_stream_is_window_min() -> None:
    config = ReadaheadConfig(window_min_bytes=3 * BLOCK, window_max_bytes=64 * BLOCK)
    readahead = Readahead(config, size_bytes=SIZE, block_bytes=BLOCK)
    readahead.observe(100 * MIB, MIB)
    assert readahead.observe(101 * MIB, MIB).blocks == range(26, 29)


def test_ranks_that_read_slices_of_common_rows_are_one_stream() -> None:
    readahead = make(size_bytes=64 * MIB)
    planned: list[int] = []
    for row in range(0, 64 * MIB, 320 * KIB):
        for rank in (3, 0, 7, 1, 2, 6, 5, 4):
            planned += readahead.observe(row + rank * 40 * KIB, 40 * KIB).blocks
    assert readahead.stream_count == 1
    assert sorted(planned) == list(range(1, 16))


def test_one_rank_alone_is_a_stream_since_it_needs_every_block() -> None:
    readahead = make(size_bytes=64 * MIB)
    planned = [b for row in range(0, 64 * MIB, 320 * KIB) for b in readahead.observe(row + 80 * KIB, 40 * KIB).blocks]
    assert planned == list(range(1, 16))


@pytest.mark.parametrize("request_bytes", [128 * KIB, 256 * KIB, MIB])
def test_kernel_requests_out_of_order_by_16_positions_are_one_stream(request_bytes: int) -> None:
    rng = random.Random(request_bytes)
    count = 256 * MIB // request_bytes
    order = sorted(range(count), key=lambda place: place + rng.uniform(0, 16))
    readahead = make(size_bytes=256 * MIB)
    planned = [block for place in order for block in readahead.observe(place * request_bytes, request_bytes).blocks]
    assert readahead.stream_count == 1
    assert len(planned) == len(set(planned))
    assert set(planned) >= set(range(6, 64))


def test_many_streams_each_keep_their_readahead() -> None:
    readahead = make()
    for step in range(64):
        for stream in range(32):
            plan = readahead.observe(stream * (1 << 30) + step * MIB, MIB)
            if step >= 32:
                assert plan.sequential, (stream, step)
    assert readahead.established_count == 32


def test_random_reads_do_not_push_out_a_stream() -> None:
    rng = random.Random(1)
    readahead = make(streams_max=8)
    for offset in range(0, 512 * MIB, MIB):
        assert readahead.observe(offset, MIB).sequential
        for _ in range(20):
            assert not readahead.observe((1 << 30) + rng.randrange(SIZE - (2 << 30)), 4096).blocks
    assert readahead.stream_count == 8


def test_streams_nobody_reads_any_more_make_room_for_new_ones() -> None:
    readahead = make(streams_max=8)
    for stream in range(100):
        plans = [readahead.observe(stream * 512 * MIB + step * MIB, MIB) for step in range(24)]
        assert plans[-1].sequential, stream
        assert readahead.stream_count <= 8


def test_new_streams_are_not_kept_out_by_ones_nobody_reads_any_more() -> None:
    readahead = make(streams_max=8)
    for stream in range(8):
        for step in range(64):
            readahead.observe(stream * (1 << 30) + step * MIB, MIB)
    assert readahead.established_count == 8
    for step in range(32):
        plans = [readahead.observe(base * (1 << 30) + step * MIB, MIB) for base in (20, 30)]
    assert all(plan.sequential for plan in plans)


def test_a_request_belongs_to_the_nearest_stream() -> None:
    readahead = make()
    for step in range(8):
        for start in (100, 108):
            readahead.observe(start * MIB + step * 128 * KIB, 128 * KIB)
    assert readahead.established_count == 2
    readahead.observe(109 * MIB + 512 * KIB, MIB)  # near enough to both
    planned = [block for offset in range(101, 105) for block in readahead.observe(offset * MIB, MIB).blocks]
    assert planned == [27, 28]


def test_after_several_random_windows_nothing_is_prefetched() -> None:
    rng = random.Random(2)
    readahead = make(size_bytes=1 << 50)  # so large that no jump lands near an old stream
    planned = []
    for _ in range(200):
        start = rng.randrange(1 << 29) * MIB
        planned.append(sum(len(readahead.observe(start + step * MIB, MIB).blocks) for step in range(8)))
    assert sum(planned) <= 80
    assert not any(planned[12:])


def test_long_runs_bring_trust_back() -> None:
    rng = random.Random(3)
    readahead = make()
    for _ in range(200):
        readahead.observe(rng.randrange(SIZE // MIB) * MIB, 4096)
    plans = [readahead.observe((1 << 30) + step * MIB, MIB) for step in range(256)]
    assert not any(plan.blocks for plan in plans[:12])
    assert sum(len(plan.blocks) for plan in plans) >= 60
    readahead.observe(3 << 30, MIB)
    assert readahead.observe((3 << 30) + MIB, MIB).blocks


def test_in_doubt_a_window_is_no_longer_than_the_run() -> None:
    readahead = make()
    for jump in range(40):
        readahead.observe((jump + 8) << 30, 4096)
    for step in range(40):
        readahead.observe((1 << 30) + step * MIB, MIB)
    assert 4 * BLOCK <= readahead.window_bytes <= 10 * BLOCK


def test_the_first_window_shrinks_with_doubt_to_none() -> None:
    lengths = []
    for jumps in (0, 4, 8):
        readahead = make()
        for jump in range(jumps):
            readahead.observe((jump + 1) << 30, 4096)
        lengths.append(len(readahead.observe(0, MIB).blocks))
    assert lengths == [2, 1, 0]


def test_a_hole_halves_the_window_and_a_row_of_them_ends_it() -> None:
    readahead = make()
    for offset in range(0, 64 * MIB, MIB):
        readahead.observe(offset, MIB)
    before = readahead.window_bytes
    for offset in range(76 * MIB, 100 * MIB, MIB):  # three blocks were skipped
        readahead.observe(offset, MIB)
        if readahead.window_bytes < before:
            break
    assert readahead.window_bytes == before // 2
    for offset in range(100 * MIB, 400 * MIB, 8 * MIB):  # every other block
        readahead.observe(offset, MIB)
    assert readahead.established_count == 0


def test_a_stride_over_whole_blocks_stops_planning() -> None:
    readahead = make()
    planned = sum(len(readahead.observe(offset, MIB).blocks) for offset in range(0, 2048 * MIB, 8 * MIB))
    assert planned <= 8


def test_readers_that_meet_become_one_stream() -> None:
    readahead = make()
    for offset in range(0, 32 * MIB, MIB):
        readahead.observe(offset, MIB)
    for offset in range(0, 40 * MIB, MIB):
        readahead.observe(offset, MIB)
    assert readahead.stream_count == 1


def test_a_reader_that_catches_up_goes_on_with_the_plan_it_finds_there() -> None:
    readahead = make()
    for offset in range(0, 256 * MIB, MIB):
        readahead.observe(offset, MIB)
    assert readahead.window_bytes == 256 * MIB
    for offset in range(224 * MIB, 256 * MIB, MIB):
        readahead.observe(offset, MIB)
    assert readahead.stream_count == 1
    assert readahead.observe(256 * MIB, MIB).blocks == range(128, 129)


# -- plans that were not carried out ------------------------------------------------------------------------------


def test_a_dropped_tail_is_planned_again_a_quarter_of_a_block_later() -> None:
    readahead = make()
    assert readahead.observe(0, 512 * KIB).blocks == range(1, 3)
    readahead.replan(2)
    assert not readahead.observe(512 * KIB, 512 * KIB).blocks
    assert not readahead.observe(MIB, 512 * KIB).blocks
    assert readahead.observe(3 * MIB // 2, 512 * KIB).blocks == range(2, 3)
    assert not readahead.observe(2 * MIB, MIB).blocks


def test_what_lies_behind_the_front_is_not_planned_again() -> None:
    readahead = make()
    for offset in range(0, 16 * MIB, MIB):
        readahead.observe(offset, MIB)
    readahead.replan(2)
    assert not any(readahead.observe(offset, MIB).blocks for offset in range(13 * MIB, 16 * MIB, MIB))
    plan = readahead.observe(16 * MIB, MIB)
    assert plan.blocks.start == 20


def test_a_plan_dropped_every_time_comes_back_until_it_is_taken() -> None:
    readahead = make(size_bytes=64 * MIB)
    taken: set[int] = set()
    for number, offset in enumerate(range(0, 64 * MIB, MIB)):
        blocks = readahead.observe(offset, MIB).blocks
        if blocks and number % 2:
            readahead.replan(blocks.start)
        else:
            taken |= set(blocks)
    assert taken == set(range(1, 16))


def test_wasted_blocks_halve_the_window_and_are_planned_again() -> None:
    readahead = make()
    for offset in range(0, 33 * MIB, MIB):
        readahead.observe(offset, MIB)
    before = readahead.window_bytes
    readahead.wasted(range(12, 14))
    assert readahead.window_bytes == before // 2
    again = [block for offset in range(33 * MIB, 37 * MIB, MIB) for block in readahead.observe(offset, MIB).blocks]
    assert again[:2] == [12, 13]


def test_waste_down_to_nothing_makes_a_stream_prove_itself_again() -> None:
    readahead = make()
    readahead.observe(0, MIB)
    readahead.wasted(range(1, 3))
    assert readahead.observe(MIB, 2 * MIB).blocks == range(1, 2)
    readahead.wasted(range(1, 2))
    assert readahead.established_count == 0
    plans = [readahead.observe(offset, MIB) for offset in range(3 * MIB, 64 * MIB, MIB)]
    assert not any(plan.blocks for plan in plans[:12])
    assert any(plan.blocks for plan in plans)


def test_waste_nobody_waits_for_counts_as_doubt() -> None:
    readahead = make()
    readahead.wasted(range(100, 108))
    readahead.observe(100 * MIB, MIB)
    assert not readahead.observe(101 * MIB, MIB).sequential
    readahead.wasted(range(0))


# -- into the next shard ---------------------------------------------------------------------------------------------


def test_a_stream_near_the_end_reaches_into_the_next_file_a_little_more_each_time() -> None:
    readahead = make(size_bytes=40 * MIB, window_max_bytes=16 * MIB)
    said = [
        (offset // MIB, plan.next_file_bytes // MIB)
        for offset in range(0, 40 * MIB, MIB)
        if (plan := readahead.observe(offset, MIB)).next_file_bytes
    ]
    assert said == [(24, 1), (28, 5), (32, 9), (36, 13)]


def test_a_small_file_read_whole_reaches_beyond_at_once() -> None:
    plan = make(size_bytes=MIB).observe(0, MIB)
    assert plan == Plan(range(1, 1), True, 8 * MIB)


def test_the_next_file_goes_on_with_the_window_it_was_given() -> None:
    following = make()
    assert following.expect(9 * MIB) == Plan(range(2), sequential=True)
    assert following.expect(9 * MIB).blocks == range(0)
    assert following.expect(40 * MIB) == Plan(range(2, 10), sequential=True)
    assert following.observe(0, MIB) == Plan(range(10, 11), sequential=True)
    assert following.observe(MIB, 4 * MIB) == Plan(range(11, 12), sequential=True)


def test_a_window_longer_than_the_next_file_goes_on_to_the_one_after() -> None:
    following = make(size_bytes=10 * MIB)
    assert following.expect(24 * MIB) == Plan(range(3), True, 14 * MIB)
    assert following.expect(24 * MIB) == Plan(sequential=True)
    assert following.expect(25 * MIB).next_file_bytes == 0  # windows are whole blocks
    assert following.expect(28 * MIB).next_file_bytes == 18 * MIB
    assert make(size_bytes=0).expect(24 * MIB) == Plan(next_file_bytes=24 * MIB)


def test_a_dropped_part_of_the_next_file_is_planned_again() -> None:
    following = make()
    following.expect(16 * MIB)
    following.replan(1)
    assert following.expect(16 * MIB).blocks == range(1, 4)


# -- whatever is asked -----------------------------------------------------------------------------------------------

_PLACE = st.integers(0, 130)
_EVENT = st.one_of(
    st.tuples(st.just("observe"), _PLACE, st.integers(0, 40)),
    st.tuples(st.just("go on"), st.integers(0, 7), st.integers(1, 40)),
    st.tuples(st.just("replan"), _PLACE, st.just(0)),
    st.tuples(st.just("wasted"), _PLACE, st.integers(0, 9)),
    st.tuples(st.just("expect"), st.just(0), st.integers(0, 60)),
)


@settings(max_examples=300, deadline=None)
@given(
    events=st.lists(_EVENT, max_size=120),
    size=st.integers(0, 130 * 256 * KIB),
    window_blocks=st.integers(0, 20),
    streams_max=st.integers(1, 6),
)
def test_plans_are_bounded_whatever_is_asked(
    events: list[tuple[str, int, int]], size: int, window_blocks: int, streams_max: int
) -> None:
    unit = 256 * KIB
    block = 1 * MIB
    config = ReadaheadConfig(window_max_bytes=window_blocks * block, streams_max=streams_max, gap_bytes=4 * MIB)
    readahead = Readahead(config, size_bytes=size, block_bytes=block)
    ends = [0] * 8
    for number, (event, first, second) in enumerate(events):
        if event == "replan":
            readahead.replan(first)
        elif event == "wasted":
            readahead.wasted(range(first, first + second))
        elif event == "expect":
            plan = readahead.expect(second * unit)
            assert plan.blocks.stop <= min(-(-size // block), window_blocks)
        else:
            offset = ends[first] if event == "go on" else first * unit
            plan = readahead.observe(offset, second * unit)
            ends[number % 8] = offset + second * unit
            end = min(offset + second * unit, size)
            if plan.blocks:
                last = (end - 1) // block
                assert last < plan.blocks.start < plan.blocks.stop <= min(-(-size // block), last + 1 + window_blocks)
            assert plan.sequential or not (plan.blocks or plan.next_file_bytes)
            assert 0 <= plan.next_file_bytes <= max(0, end + window_blocks * block - size)
        assert 0 <= readahead.established_count <= readahead.stream_count <= streams_max
        assert readahead.window_bytes <= window_blocks * block


@settings(max_examples=100, deadline=None)
@given(start=st.integers(0, 40), lengths=st.lists(st.integers(1, 9 * MIB), min_size=2, max_size=80))
def test_a_stream_never_plans_a_block_twice_and_misses_none(start: int, lengths: list[int]) -> None:
    readahead = make()
    offset = start * MIB
    planned: list[int] = []
    demanded_first: set[int] = set()
    for length in lengths:
        touched = set(range(offset // BLOCK, (offset + length - 1) // BLOCK + 1))
        demanded_first |= touched - set(planned)
        planned += readahead.observe(offset, length).blocks
        offset += length
    assert len(planned) == len(set(planned))
    reached = set(range(start * MIB // BLOCK, (offset - 1) // BLOCK + 1))
    assert reached <= demanded_first | set(planned)
    # Contiguous: everything between the first and the last planned block was planned or read.
    assert set(range(min(planned), max(planned) + 1)) <= set(planned) | reached


@settings(max_examples=100, deadline=None)
@given(run=st.integers(2, 400), start=st.integers(0, 1000))
def test_a_wrong_guess_costs_at_most_four_times_the_run(run: int, start: int) -> None:
    readahead = make()
    planned = sum(len(readahead.observe((start + step) * MIB, MIB).blocks) for step in range(run))
    touched = (start + run - 1) * MIB // BLOCK - start * MIB // BLOCK + 1
    assert planned - (touched - 1) <= 4 * touched
