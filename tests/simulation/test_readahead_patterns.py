"""Whole workloads through the simulator: what readahead gains where reading is sequential, and costs where it is not.

Every random pattern is seeded; the seed is in the name of the failing test.
"""

import random
from collections.abc import Sequence

import pytest

from tierfs.policy.readahead import ReadaheadConfig
from tierfs.testing.simulator import (
    Reader,
    Report,
    Request,
    Simulation,
    Source,
    out_of_order,
    random_reads,
    read_around,
    sequential,
    simulate,
    strided,
    tensors_by_threads,
)

KIB = 1 << 10
MIB = 1 << 20
FILE = 512 * MIB
HUGE = 100 << 30
READAHEAD = ReadaheadConfig(window_max_bytes=256 * MIB)
SLOW_READER = 0.5e9  # half of what the source gives, so that a stall is readahead's fault
SEEDS = pytest.mark.parametrize("seed", [1, 2, 3])


def run(
    work: Sequence[Sequence[Request]],
    *,
    files: Sequence[int] = (FILE,),
    readahead: ReadaheadConfig | None = READAHEAD,
    source: Source | None = None,
    depth: int = 1,
    stagger_s: float = 0.0,
    bytes_per_s: float = 4e9,
    pool_blocks: int = 256,
    queue_blocks: int = 256,
    keep: bool = True,
) -> Report:
    readers = [
        Reader(
            name=f"reader {number}",
            requests=requests,
            start_s=number * stagger_s,
            depth=depth,
            bytes_per_s=bytes_per_s,
        )
        for number, requests in enumerate(work)
    ]
    return simulate(
        Simulation(
            file_bytes=files,
            readers=readers,
            readahead=readahead,
            source=source or Source(),
            pool_blocks=pool_blocks,
            queue_blocks=queue_blocks,
            keep=keep,
        )
    )


# -- sequential ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_bytes", [128 * KIB, MIB, 4 * MIB, 6 * MIB])
def test_a_sequential_reader_stalls_only_at_the_start(request_bytes: int) -> None:
    report = run([sequential(FILE, request_bytes)], bytes_per_s=SLOW_READER)
    without = run([sequential(FILE, request_bytes)], bytes_per_s=SLOW_READER, readahead=None)
    assert report.stalls <= 2
    assert report.amplification <= 1.1
    assert report.unused_blocks == 0
    assert without.stalls >= 80  # the test can fail


def test_a_reader_faster_than_the_source_gets_all_the_source_has() -> None:
    report = run([sequential(FILE, MIB)])
    assert report.readers["reader 0"].bytes_per_s >= 0.95e9


def test_a_far_source_is_read_at_its_speed_after_a_few_round_trips() -> None:
    far = Source(latency_s=0.2, slots=256)
    report = run([sequential(4 * FILE, MIB)], files=(4 * FILE,), source=far, pool_blocks=512)
    assert report.duration_s <= 4 * FILE / far.bytes_per_s + 6 * far.latency_s


@SEEDS
@pytest.mark.parametrize("request_bytes", [128 * KIB, MIB])
def test_kernel_readahead_out_of_order_is_sequential(request_bytes: int, seed: int) -> None:
    work = out_of_order(sequential(FILE, request_bytes), random.Random(seed))
    # Sixteen requests at once share the reader's speed.
    report = run([work], depth=16, bytes_per_s=SLOW_READER / 16)
    without = run([work], depth=16, bytes_per_s=SLOW_READER / 16, readahead=None)
    assert report.amplification <= 1.1
    assert report.stalls <= 64
    assert report.stalls <= without.stalls / 2


def test_two_interleaved_streams_each_keep_their_readahead() -> None:
    halves = [sequential(FILE, MIB, end_bytes=FILE // 2), sequential(FILE, MIB, start_bytes=FILE // 2)]
    report = run(halves, bytes_per_s=SLOW_READER / 2)
    assert report.amplification <= 1.1
    assert all(reader.stalls <= 4 for reader in report.readers.values())


def test_four_staggered_readers_of_one_cold_file_fetch_it_once_and_keep_their_speed() -> None:
    solo = run([sequential(FILE, MIB)]).readers["reader 0"].bytes_per_s
    report = run([sequential(FILE, MIB)] * 4, stagger_s=0.1)
    assert report.fetched_bytes <= 1.2 * FILE
    assert all(reader.bytes_per_s >= 0.5 * solo for reader in report.readers.values())


def test_without_a_warm_tier_staggered_readers_near_each_other_still_share() -> None:
    report = run([sequential(FILE, MIB)] * 4, stagger_s=0.05, pool_blocks=128, keep=False)
    assert report.fetched_bytes <= 1.2 * FILE


def test_eight_ranks_reading_slices_of_common_rows_are_sequential() -> None:
    size = FILE // 4
    work = [strided(size, slice_bytes=40 * KIB, row_bytes=320 * KIB, rank=rank) for rank in range(8)]
    report = run(work, files=(size,), bytes_per_s=SLOW_READER / 8)
    assert report.amplification <= 1.1
    # All eight wait for the first blocks together.
    assert report.stalls <= 3 * 8


def test_a_reader_with_small_gaps_is_sequential() -> None:
    work = [request for request in sequential(FILE, MIB) if request.offset_bytes // MIB % 5]
    report = run([work], bytes_per_s=SLOW_READER)
    assert report.stalls <= 2
    assert report.amplification <= 1.1


def test_shards_are_one_long_stream() -> None:
    files = [64 * MIB + 12345] * 6
    work = [request for file, size in enumerate(files) for request in sequential(size, MIB, file=file)]
    report = run([work], files=files, bytes_per_s=SLOW_READER)
    assert report.stalls <= 2
    assert report.amplification == 1.0


def test_small_shards_are_one_long_stream_too() -> None:
    files = [3 * MIB] * 64
    work = [request for file, size in enumerate(files) for request in sequential(size, MIB, file=file)]
    far = Source(latency_s=0.02, slots=64)
    report = run([work], files=files, source=far, bytes_per_s=0.1e9)
    assert report.stalls <= 4
    assert report.amplification == 1.0


# -- many threads ----------------------------------------------------------------------------------------------------


@SEEDS
@pytest.mark.parametrize("threads", [4, 32])
@pytest.mark.parametrize("tensor_mib", [1, 8, 64])
def test_threads_that_fault_tensors_in_any_order_are_as_fast_as_one_reader(
    threads: int, tensor_mib: int, seed: int
) -> None:
    rng = random.Random(seed)
    size = 4 * FILE
    work = tensors_by_threads(size, threads=threads, tensor_bytes=tensor_mib * MIB, request_bytes=512 * KIB, rng=rng)
    report = run(work, files=(size,))
    plain = run([sequential(size, MIB)], files=(size,))
    assert report.amplification == 1.0
    assert report.duration_s <= 1.2 * plain.duration_s


@SEEDS
def test_threads_on_a_far_source_keep_readahead_on_long_tensors(seed: int) -> None:
    far = Source(latency_s=0.05, slots=64)
    work = tensors_by_threads(
        4 * FILE, threads=4, tensor_bytes=64 * MIB, request_bytes=512 * KIB, rng=random.Random(seed)
    )
    report = run(work, files=(4 * FILE,), source=far)
    without = run(work, files=(4 * FILE,), source=far, readahead=None)
    assert report.duration_s <= without.duration_s / 2


# -- random: the bounds the head of policy/readahead.py promises -------------------------------------------------------


@SEEDS
@pytest.mark.parametrize("size_bytes", [92 * MIB, 4 * FILE, HUGE])
def test_random_small_reads_fetch_their_own_blocks_only(size_bytes: int, seed: int) -> None:
    report = run([random_reads(size_bytes, 4096, 400, random.Random(seed))], files=(size_bytes,))
    assert report.prefetched_blocks <= 4
    assert report.amplification <= 1.02


@SEEDS
@pytest.mark.parametrize("request_kib", [128, 1024])
@pytest.mark.parametrize("window_mib", [1, 2, 4, 8])
def test_random_faults_with_read_around_are_hardly_amplified(window_mib: int, request_kib: int, seed: int) -> None:
    work = read_around(
        HUGE,
        window_bytes=window_mib * MIB,
        request_bytes=request_kib * KIB,
        count=200,
        rng=random.Random(seed),
    )
    report = run([work], files=(HUGE,))
    assert report.unused_blocks <= 40  # all of them in the first jumps
    assert report.amplification <= 1.1


@SEEDS
def test_random_faults_of_many_threads_are_hardly_amplified(seed: int) -> None:
    work = [
        read_around(HUGE, window_bytes=4 * MIB, request_bytes=MIB, count=20, rng=random.Random(seed * 100 + thread))
        for thread in range(32)
    ]
    report = run(work, files=(HUGE,))
    assert report.amplification <= 1.1


def test_a_stride_over_whole_blocks_is_hardly_amplified() -> None:
    report = run([strided(FILE, slice_bytes=MIB, row_bytes=8 * MIB, rank=0)])
    assert report.amplification <= 1.1


@SEEDS
def test_a_random_reader_does_not_stall_a_sequential_one(seed: int) -> None:
    work = [sequential(FILE, MIB), random_reads(HUGE, 4096, 100, random.Random(seed), file=0)]
    report = run(work, files=(HUGE,), bytes_per_s=SLOW_READER)
    assert report.readers["reader 0"].stalls <= 4
    assert report.unused_blocks <= 64 + 4  # the window ahead of where the sequential reader stops


# -- scarce memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool_blocks", [4, 16, 64])
def test_a_small_pool_fetches_nothing_twice(pool_blocks: int) -> None:
    report = run([sequential(FILE, MIB)], pool_blocks=pool_blocks, keep=False)
    assert report.amplification <= 1.1
    assert report.readers["reader 0"].bytes_per_s >= 0.6e9


def test_plans_dropped_by_a_short_queue_are_planned_again() -> None:
    report = run([sequential(FILE, MIB)], queue_blocks=2, bytes_per_s=SLOW_READER)
    assert report.dropped_blocks > 0
    assert report.stalls <= 4
    assert report.amplification == 1.0


def test_the_same_simulation_gives_the_same_report() -> None:
    work = tensors_by_threads(FILE, threads=8, tensor_bytes=8 * MIB, request_bytes=MIB, rng=random.Random(5))
    assert run(work) == run(work)
