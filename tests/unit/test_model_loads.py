"""When a load begins and ends, what is recorded of it, and that it stays small."""

import os
from pathlib import Path

import pytest
import trio

from tierfs.blocks.ids import VersionId
from tierfs.cache.block_cache import FileFacts
from tierfs.cache.model_loads import ModelLoads
from tierfs.catalog.load_store import KEPT_MAX, LoadRecord, LoadStore, encode, read_loads
from tierfs.control import report

KIB = 1 << 10


def file(name: str, size: int = 64 * KIB, *, model: str = "m", model_bytes: int = 128 * KIB) -> FileFacts:
    return FileFacts(
        VersionId(name.encode().ljust(16, b".")[:16]), size, f"{model}/{name}".encode(), model.encode(), model_bytes
    )


def read(loads: ModelLoads, one: FileFacts, offset: int, length: int, *, at_s: float, took_s: float = 0.01) -> None:
    load = loads.read_begins(one, at_s)
    loads.read_ends(load, one, offset, length, "memory", at_s, at_s + took_s)


def records(loads: ModelLoads, now_s: float = 0.0) -> list[LoadRecord]:
    return sorted(loads.newest(now_s), key=lambda record: record.number)


def test_a_load_ends_soon_once_all_was_read_and_else_after_a_longer_quiet(tmp_path: Path) -> None:
    loads = ModelLoads(LoadStore(tmp_path / "loads"))
    read(loads, file("a"), 0, 64 * KIB, at_s=100)
    loads.tick(109)
    assert [record.end for record in records(loads)] == [""]
    read(loads, file("b"), 0, 64 * KIB, at_s=109.5)
    loads.tick(111)
    loads.tick(112)
    (record,) = records(loads)
    assert (record.end, record.covered_bytes, record.reads, record.file_count) == ("complete", 128 * KIB, 2, 2)
    assert record.duration_s == pytest.approx(9.51)

    read(loads, file("a"), 0, 4 * KIB, at_s=200)
    loads.tick(209)
    assert len(list(loads.under_way())) == 1
    loads.tick(211)
    assert [record.end for record in records(loads)] == ["complete", "quiet"]


def test_a_read_that_waits_is_no_quiet(tmp_path: Path) -> None:
    loads = ModelLoads(LoadStore(tmp_path / "loads"))
    load = loads.read_begins(file("a"), 100)
    loads.tick(160)
    assert list(loads.under_way()) == [load]
    loads.read_failed(load, file("a"), 4096, 100, 161)
    loads.tick(172)
    (record,) = records(loads)
    assert (record.end, record.failed_reads, record.stalled_s) == ("quiet", 1, 61)
    assert [(stall.place, stall.seconds, stall.offset_bytes) for stall in record.stalls] == [("error", 61, 4096)]


def test_bytes_read_twice_are_not_progress() -> None:
    loads = ModelLoads()
    for _ in range(4):
        read(loads, file("a"), 0, 64 * KIB, at_s=1)
    (load,) = loads.under_way()
    assert (load.record.read_bytes, load.record.covered_bytes, load.complete) == (256 * KIB, 64 * KIB, False)


def test_opens_in_passthrough_belong_to_the_load_they_come_shortly_before_or_in(tmp_path: Path) -> None:
    loads = ModelLoads(LoadStore(tmp_path / "loads"))
    loads.handed_out(file("old"), 50)
    for at_s in (91, 95):
        loads.handed_out(file("a"), at_s)
    loads.handed_out(file("c", model="other"), 95)
    read(loads, file("b"), 0, 64 * KIB, at_s=100)
    loads.handed_out(file("a"), 101)
    assert [record.passthrough_opens for record in records(loads)] == [3]
    loads.tick(200)
    loads.handed_out(file("a"), 200)
    read(loads, file("b"), 0, 64 * KIB, at_s=211)
    assert [record.passthrough_opens for record in records(loads)] == [3, 0]
    for number in range(1000):
        loads.handed_out(file("a", model=str(number)), 300)
    assert len(loads._handed_out) <= 32


def test_what_is_brought_without_a_reader_is_followed_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 50.0)
    loads = ModelLoads(LoadStore(tmp_path / "loads"))
    loads.brought(file("a"), "warm", KIB)  # a promotion
    assert not list(loads.under_way())
    loads.brought(file("a"), "source", 8 * KIB)
    (load,) = loads.under_way()
    assert not load.reading and load.rate(52) == 4 * KIB
    loads.tick(61)
    assert not list(loads.under_way()) and not records(loads)

    loads.brought(file("a"), "source", 8 * KIB)
    read(loads, file("a"), 0, KIB, at_s=51)
    loads.brought(file("a"), "source", 2 * KIB)
    (load,) = loads.under_way()
    assert load.reading and load.record.source_bytes == 2 * KIB


def test_a_load_of_any_length_has_bounded_records() -> None:
    loads = ModelLoads()
    for number in range(20_000):
        read(loads, file(f"{number % 5000}", model_bytes=1 << 60), 0, KIB, at_s=number * 5.0, took_s=0.2)
    (load,) = loads.under_way()
    record = load.snapshot(100_000)
    assert len(record.slices) <= 256 and sum(one.read_bytes for one in record.slices) == 20_000 * KIB
    assert (record.stalled_reads, len(record.stalls), len(record.files)) == (20_000, 16, 64)
    assert record.read_sizes == {"1024": 20_000}
    assert len(encode(record)) < 40_000

    for number in range(40):
        read(loads, file("x", model=f"m{number}"), 0, KIB, at_s=100_000 + number)
    assert len(list(loads.under_way())) == 32


def test_the_newest_loads_are_kept_over_daemons_and_what_is_odd_is_left_out(tmp_path: Path) -> None:
    directory = tmp_path / "loads"

    async def daemon(model: str) -> None:
        loads = ModelLoads(LoadStore(directory), mountpoint="/m")
        async with trio.open_nursery() as nursery:
            await nursery.start(lambda task_status: loads.run(task_status=task_status))
            read(loads, file("a", model=model), 0, KIB, at_s=1)
            nursery.cancel_scope.cancel()

    trio.run(daemon, "first")
    trio.run(daemon, "second")
    assert [(one.number, one.path, one.end) for one in read_loads(directory)] == [
        (2, "second", "stopped"), (1, "first", "stopped"),
    ]  # fmt: skip

    store = LoadStore(directory)
    for number in range(3, KEPT_MAX + 10):
        store.replace(number, encode(LoadRecord(number=number, mountpoint="/m", path="p", bytes=1, started_s=number)))
    assert len(list(directory.iterdir())) == KEPT_MAX
    (directory / "100.json").write_text("{")
    (directory / "101.json").write_bytes(b"[" * 100_000)
    (directory / "102.json").symlink_to("/dev/zero")
    os.mkfifo(directory / "103.json")
    assert [one.number for one in read_loads(directory)][0] == KEPT_MAX + 9


def test_a_directory_that_cannot_be_written_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "loads").write_text("in the way")
    store = LoadStore(tmp_path / "loads")
    for number in range(3):
        store.replace(number, b"{}")
    assert [record.getMessage().split()[0] for record in caplog.records] == ["load_not_kept"]


def test_figures_of_a_report() -> None:
    loads = ModelLoads()
    read(loads, file("a"), 0, 64 * KIB, at_s=1, took_s=1)
    read(loads, file("b"), 0, 32 * KIB, at_s=2, took_s=2)
    (load,) = loads.under_way()
    load.brought("source", 192 * KIB, 4)
    killed = LoadRecord(number=0, mountpoint="", path="p", bytes=1, started_s=0)
    now, before = report.newest([killed], [load.snapshot(4)])
    assert (before["end"], before["amplification"], before["slowest_file"]) == ("killed", None, None)
    assert (now["end"], now["amplification"], now["bytes_per_s"]) == ("running", 2.0, 32 * KIB)
    assert now["slowest_file"]["path"] == "m/b" and now["fetched_bytes"] == 192 * KIB
