"""Eviction and watermarks: the rules, one table row each."""

import pytest

from tierfs.blocks.ids import ObjectKey
from tierfs.policy.eviction import SAME_LOAD_S, Candidate, Heat, HeatTable, choose_victims
from tierfs.policy.watermarks import Watermarks

HOUR_S = 3600.0
NOW_S = 1_000_000.0


def key(name: str) -> ObjectKey:
    return ObjectKey(name.encode().ljust(16, b"."))


def candidate(name: str, *, used: int = 10, last_use_s: float = NOW_S - 60, pinned: bool = False) -> Candidate:
    """An object called "model/shard"."""
    return Candidate(key(name), name.split("/")[0].encode(), used, last_use_s, pinned)


def heats(**models: tuple[float, float]) -> HeatTable:
    """Loads and age in seconds of the last one, per model."""
    table = HeatTable()
    for model, (loads, age_s) in models.items():
        table.restore(model.encode(), Heat(loads, NOW_S - age_s, NOW_S - age_s))
    return table


CASES = {
    "nothing known of the others: they are cold": (
        {}, [candidate("a/1"), candidate("b/1")], 10, 10, "new", ["a/1"]),
    "coldest model first": (
        {"a": (0.9, 60.0), "b": (0.5, 60.0), "new": (1.0, 0.0)}, [candidate("a/1"), candidate("b/1")], 10, 10, "new",
        ["b/1"]),
    "whole objects, until the wish is met": (
        {"new": (1.0, 0.0)}, [candidate(f"a/{i}", last_use_s=float(i)) for i in range(4)], 5, 25, "new",
        ["a/0", "a/1", "a/2"]),
    "a pinned object stays": (
        {"new": (1.0, 0.0)}, [candidate("a/1", pinned=True), candidate("a/2")], 10, 20, "new", ["a/2"]),
    "the incoming model never displaces its own": (
        {"new": (1.0, 0.0)}, [candidate("new/1"), candidate("new/2")], 10, 10, "new", []),
    "a hotter model stays": (
        {"a": (2.0, 60.0), "new": (1.0, 0.0)}, [candidate("a/1")], 10, 10, "new", []),
    "a model loaded repeatedly stays until the other is clearly hotter": (
        {"a": (1.6, 0.0), "new": (2.5, 0.0)}, [candidate("a/1")], 10, 10, "new", []),
    "a model loaded repeatedly goes when the other is clearly hotter": (
        {"a": (1.6, 0.0), "new": (2.7, 0.0)}, [candidate("a/1")], 10, 10, "new", ["a/1"]),
    "a model as hot as the incoming one stays": (
        {"a": (1.0, 0.0), "new": (1.0, 0.0)}, [candidate("a/1")], 10, 10, "new", []),
    "a hotter model not used for a half-life goes": (
        {"a": (8.0, HOUR_S + 1), "new": (1.0, 0.0)}, [candidate("a/1")], 10, 10, "new", ["a/1"]),
    "nothing goes in vain": (
        {"a": (0.5, 60.0), "b": (9.0, 60.0), "new": (1.0, 0.0)}, [candidate("a/1"), candidate("b/1")], 15, 20, "new",
        []),
    "what can be had is enough where the need is met": (
        {"a": (0.5, 60.0), "b": (9.0, 60.0), "new": (1.0, 0.0)}, [candidate("a/1"), candidate("b/1")], 10, 20, "new",
        ["a/1"]),
    "a prefetched model counts as being loaded now": (
        {"a": (0.9, 60.0), "b": (1.5, 60.0)}, [candidate("a/1"), candidate("b/1")], 10, 10, "never opened", ["a/1"]),
    "an object that takes nothing frees nothing": (
        {"new": (1.0, 0.0)}, [candidate("a/1", used=0), candidate("a/2")], 10, 10, "new", ["a/2"]),
    "over the mark by itself: whatever is not pinned, coldest first": (
        {"a": (9.0, 60.0), "b": (2.0, 60.0)}, [candidate("a/1"), candidate("a/2", pinned=True), candidate("b/1")], 1,
        100, None, ["b/1", "a/1"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_victims(case: tuple[dict[str, tuple[float, float]], list[Candidate], int, int, str | None, list[str]]) -> None:
    models, candidates, needed, wanted, incoming, expected = case
    for order in (candidates, candidates[::-1]):  # the answer does not depend on the order of the index
        victims = choose_victims(
            order,
            heats(**models),
            needed_bytes=needed,
            wanted_bytes=wanted,
            now_s=NOW_S,
            incoming=None if incoming is None else incoming.encode(),
        )
        assert [victim.key for victim in victims] == [key(name) for name in expected]


def test_for_what_an_operator_pinned_everything_gives_way_that_is_not_pinned() -> None:
    hot = heats(a=(9.0, 1.0), new=(0.1, 60.0))
    candidates = [candidate("a/1"), candidate("a/2", pinned=True), candidate("new/old", last_use_s=1.0)]
    found = choose_victims(candidates, hot, needed_bytes=20, wanted_bytes=20, now_s=NOW_S, incoming=b"new", urgent=True)
    assert [victim.key for victim in found] == [key("new/old"), key("a/1")]
    assert not choose_victims(
        candidates, hot, needed_bytes=21, wanted_bytes=21, now_s=NOW_S, incoming=b"new", urgent=True
    )


def test_heat_halves_every_half_life() -> None:
    heat = Heat(8.0, NOW_S, NOW_S)
    assert heat.at(NOW_S + 3 * HOUR_S, HOUR_S) == pytest.approx(1.0)
    assert heat.at(NOW_S - 50, HOUR_S) == 8.0  # a clock set back


def test_one_load_however_many_shards_handles_and_ranks() -> None:
    table = HeatTable()
    for shard in range(30):  # shards one after the other, slowly
        for handle in range(4):
            table.touch(b"m", key(f"s{shard}"), NOW_S + 20 * shard + handle * 0.5)
    end_s = NOW_S + 20 * 29 + 1.5
    assert table.heat(b"m", end_s) == pytest.approx(1.0, rel=0.2)
    assert table.last_use_s(b"m") == end_s


def test_opening_the_same_shard_again_later_is_another_load() -> None:
    table = HeatTable()
    now_s = NOW_S
    for _ in range(3):
        for shard in range(4):
            table.touch(b"m", key(f"s{shard}"), now_s)
        now_s += SAME_LOAD_S + 1
    assert table.heat(b"m", now_s) == pytest.approx(3.0, rel=0.01)


def test_heat_survives_a_restart_and_goes_on_counting() -> None:
    table = HeatTable()
    table.touch(b"m", key("a"), NOW_S)
    again = HeatTable()
    for model, heat in table.items():
        again.restore(model, heat)
    again.restore(b"m", Heat(99.0, NOW_S - 5, NOW_S - 5))  # an older record of another device
    again.touch(b"m", key("a"), NOW_S + 1)
    assert again.heat(b"m", NOW_S + 1) == pytest.approx(2.0, rel=0.01)


def test_cold_models_are_forgotten_unless_kept() -> None:
    table = heats(a=(1.0, 20 * HOUR_S), b=(1.0, 20 * HOUR_S), c=(1.0, HOUR_S))
    table.forget_cold(NOW_S, {b"b"})
    assert {model for model, _ in table.items()} == {b"b", b"c"}


def test_watermarks_say_when_and_how_much() -> None:
    marks = Watermarks(1000)
    assert (marks.high_bytes, marks.low_bytes) == (950, 900)
    assert marks.needed_bytes(900, 50) == 0
    assert (marks.needed_bytes(900, 60), marks.wanted_bytes(900, 60)) == (10, 60)
    assert (marks.needed_bytes(980), marks.wanted_bytes(980)) == (30, 80)


@pytest.mark.parametrize(("high", "low"), [(0.9, 0.95), (1.1, 0.9), (0.5, 0.0)])
def test_watermarks_out_of_order_are_refused(high: float, low: float) -> None:
    with pytest.raises(ValueError, match="watermarks"):
        Watermarks(1000, high, low)


def test_negative_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        Watermarks(-1)
