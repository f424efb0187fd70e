"""Units: what is accepted, what is refused, and that printing and parsing agree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierfs.blocks.errors import ConfigError
from tierfs.blocks.units import (
    format_bytes,
    format_duration,
    parse_bytes,
    parse_duration,
    parse_rate,
    parse_share,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0B", 0),
        ("64MiB", 64 << 20),
        (" 1.5 GiB ", 3 << 29),
        ("2TB", 2 * 10**12),
        ("4kb", 4000),
        ("0.1GB", 10**8),
        ("4PiB", 4 << 50),
    ],
)
def test_sizes_are_exact(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "64", "MiB", "-1MiB", "64M", "1e3B", "64MiB/s", "1MiBs", "64Mbit", "٣MiB", "9999999PiB"]
)
def test_unclear_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("500ms", 0.5),
        ("1h30m", 5400),
        ("2min", 120),
        ("1.5 s", 1.5),
        ("0s", 0),
        ("1d", 86400),
        ("10us", 1e-5),
    ],
)
def test_durations_are_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "s", "-1s", "1h30", "3 weeks", "1sx", "1s 2s!"])
def test_unclear_durations_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "rate"), [("20Gbit/s", 2_500_000_000), ("500MiB/s", 500 << 20), ("8bit/s", 1), ("1.5 GB/s", 1_500_000_000)]
)
def test_rates_are_bytes_per_second(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["20Gb/s", "20Gbit", "5", "fast", "/s", "5/s"])
def test_rates_that_may_mean_bits_or_bytes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_rate(text)


def test_shares_are_percent_or_a_number() -> None:
    assert parse_share("95%") == parse_share(0.95) == 0.95
    for wrong in ("95", "101%", 1.01, -0.1, "x", float("nan")):
        with pytest.raises(ConfigError):
            parse_share(wrong)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_printed_sizes_parse_back_to_within_their_digits(size: int) -> None:
    back = parse_bytes(format_bytes(size))
    assert abs(back - size) <= size * 0.05


@given(st.integers(min_value=1, max_value=1023), st.sampled_from([1, 1 << 10, 1 << 20, 1 << 30, 1 << 40]))
def test_whole_units_print_without_loss(count: int, unit: int) -> None:
    assert parse_bytes(format_bytes(count * unit)) == count * unit


@given(st.floats(min_value=1e-6, max_value=2.5e6))
def test_printed_durations_parse_back_to_within_their_digits(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=0.4 if seconds < 1e-5 else 0.02)


def test_a_duration_beyond_all_reason_is_refused() -> None:
    assert parse_duration("30d") == 30 * 86400
    for text in ("31d", "9999999h", "1000000000000s"):
        with pytest.raises(ConfigError):
            parse_duration(text)


def test_durations_read_as_a_person_says_them() -> None:
    assert [format_duration(s) for s in (0, 0.5, 2.5, 30, 245, 10920, 187200, -3)] == [
        "0s", "500ms", "2.5s", "30s", "4m05s", "3h02m", "2d04h", "-3s",
    ]  # fmt: skip
