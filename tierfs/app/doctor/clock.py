"""The clock: certificates are good only within their time. Called by examination.py. Source: adjtimex(2)."""

import ctypes
import time
from dataclasses import dataclass

from tierfs.app.doctor.finding import Finding, note, ok, problem, warning
from tierfs.config.schema import MountConfig

_TIME_ERROR = 5  # what adjtimex returns for a clock that nothing keeps right
_TIMEX_BYTES = 512  # struct timex is smaller; all zero, modes included, it only asks
_BUILT_S = 1_735_689_600  # 2025-01-01: no clock that is right says less


@dataclass(frozen=True, kw_only=True)
class ClockFacts:
    """``synchronized``: by NTP or the like; None where the kernel does not tell."""

    now_s: float
    synchronized: bool | None
    tls: bool


def look(config: MountConfig | None) -> ClockFacts:
    """Ask the kernel; sets nothing."""
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return ClockFacts(
        now_s=time.time(),
        synchronized=None if state < 0 else state != _TIME_ERROR,
        tls=config is not None and config.source.tls,
    )


def judge(facts: ClockFacts) -> list[Finding]:
    """Pure."""
    mend = "timedatectl set-ntp true, or start chrony"
    if facts.now_s < _BUILT_S:
        report = problem if facts.tls else warning
        why = "certificates seem not valid yet, and what was used last is mistaken"
        return [report("clock.time", "the clock is years behind", why, mend)]
    if facts.synchronized is False:
        report = warning if facts.tls else note
        why = "TLS refuses certificates once the clock is far off; logs of two machines do not fit together"
        return [report("clock.synchronized", "nothing keeps the clock right", why, mend)]
    return [ok("clock.time", "the clock is kept right" if facts.synchronized else "the clock looks right")]
