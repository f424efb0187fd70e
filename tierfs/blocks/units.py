"""Units in text: sizes, durations, rates and shares, parsed and printed in this one place.

Called by the configuration and the commands. Inside the project bytes are ints and times are float seconds; a unit is
always written in text, since a bare number leaves open what it counts. Parsing is exact (no binary floats on the way).
"""

import re
from fractions import Fraction

from tierfs.blocks.errors import ConfigError


class Size(int):
    """Bytes."""


class Duration(float):
    """Seconds."""


class Rate(int):
    """Bytes per second."""


class Share(float):
    """A part of a whole, 0 to 1."""


_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BYTES = {"b": 1}
_BYTES |= {f"{prefix}b": factor for prefix, factor in _DECIMAL.items()}
_BYTES |= {f"{prefix}ib": 1 << 10 * power for power, prefix in enumerate("kmgtp", start=1)}
_BITS = {"bit": Fraction(1, 8)} | {f"{prefix}bit": Fraction(factor, 8) for prefix, factor in _DECIMAL.items()}
_SECONDS = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "min": Fraction(60),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_NUMBER = r"(\d{1,18}(?:\.\d{1,9})?)"
_SIZE = re.compile(_NUMBER + r" ?([a-z]+)", re.ASCII)
_DURATION_PART = re.compile(_NUMBER + r" ?(ns|us|ms|s|min|m|h|d)(?![a-z])", re.ASCII)
_LONGEST_S = 30 * 86400  # more is a mistake, and soon beyond what select(2) takes
_LARGEST_BYTES = 1 << 62


def parse_bytes(text: str) -> Size:
    """The bytes of a size such as ``64MiB``, ``1.5 GiB`` or ``2TB`` (KiB is 1024, kB is 1000). Raises ConfigError."""
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _BYTES:
        raise ConfigError(f'{text!r} is not a size; write a number and B, KiB, MiB, GiB, TiB, MB or GB, as in "64MiB"')
    size = Fraction(match[1]) * _BYTES[match[2]]
    if size > _LARGEST_BYTES:
        raise ConfigError(f"{text!r} is more than 4 EiB")
    return Size(size)


def parse_duration(text: str) -> Duration:
    """The seconds of a duration such as ``30s``, ``500ms`` or ``1h30m``. Raises ConfigError."""
    rest = text.strip().lower()
    seconds = Fraction(0)
    position = 0
    while match := _DURATION_PART.match(rest, position):
        seconds += Fraction(match[1]) * _SECONDS[match[2]]
        position = match.end()
    if position == 0 or position != len(rest):
        raise ConfigError(f'{text!r} is not a duration; write a number and ms, s, m, h or d, as in "30s"')
    if seconds > _LONGEST_S:
        raise ConfigError(f"{text!r} is longer than 30 days")
    return Duration(seconds)


def parse_rate(text: str) -> Rate:
    """The bytes per second of a rate such as ``20Gbit/s`` or ``500MiB/s``. Raises ConfigError.

    ``Gb/s`` is refused: people write it for bits and for bytes.
    """
    match = _SIZE.fullmatch(text.strip().removesuffix("/s").lower())
    stripped = text.strip()
    ambiguous = re.search(r"[kKMGTP]?b/s$", stripped) is not None
    factor = None if match is None or ambiguous else _BITS.get(match[2]) or _BYTES.get(match[2])
    if match is None or factor is None or not stripped.endswith("/s"):
        raise ConfigError(f'{text!r} is not a rate; write it as "20Gbit/s" (bits) or "500MiB/s" (bytes)')
    rate = Fraction(match[1]) * factor
    if rate > _LARGEST_BYTES:
        raise ConfigError(f"{text!r} is more than 4 EiB/s")
    return Rate(rate)


def parse_share(value: str | float) -> Share:
    """A share such as ``"95%"`` or ``0.95``. Raises ConfigError when it is neither, or outside 0 to 1."""
    number: Fraction | float | None = None
    if isinstance(value, str):
        match = re.fullmatch(_NUMBER + " ?%", value.strip(), re.ASCII)
        number = Fraction(match[1]) / 100 if match else None
    else:
        number = value
    if number is None or not 0 <= number <= 1:
        raise ConfigError(f'{value!r} is not a share; write a number from 0 to 1, or "95%"')
    return Share(number)


def format_bytes(size_bytes: int) -> str:
    """The size in its largest binary unit: ``64MiB`` when exact, else rounded to one digit (``1.4GiB``)."""
    for power, prefix in reversed(list(enumerate("KMGTP", start=1))):
        unit = 1 << 10 * power
        if abs(size_bytes) >= unit:
            whole, rest = divmod(size_bytes, unit)
            return f"{whole}{prefix}iB" if rest == 0 else f"{size_bytes / unit:.1f}{prefix}iB"
    return f"{size_bytes}B"


def format_duration(seconds: float) -> str:
    """The duration as a person would say it: ``500ms``, ``2.5s``, ``4m05s``, ``3h02m``, ``2d04h``."""
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if 0 < seconds < 0.0009995:
        return f"{seconds * 1e6:.3g}us"
    if 0 < seconds < 0.9995:
        return f"{seconds * 1e3:.3g}ms"
    if seconds < 119.5:
        return f"{seconds:.3g}s"
    whole = round(seconds)
    if whole < 7200:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 172800:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
