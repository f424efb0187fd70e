"""Limits of processes: open files. (Locked memory is the business of rdma.py.) Called by examination.py."""

import resource
from dataclasses import dataclass

from tierfs.app.doctor.finding import Finding, ok, problem, warning

_FILES_NEEDED = 1024
_FILES_WANTED = 16384


@dataclass(frozen=True, kw_only=True)
class LimitFacts:
    """Of this process; the daemon inherits them, and raises the soft limit to the hard one by itself."""

    open_files_hard: int


def look() -> LimitFacts:
    """Ask the kernel."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return LimitFacts(open_files_hard=1 << 62 if hard == resource.RLIM_INFINITY else hard)


def judge(facts: LimitFacts) -> list[Finding]:
    """Pure."""
    name = "limits.open_files"
    what = f"a process may have {facts.open_files_hard} files open (hard limit)"
    if facts.open_files_hard >= _FILES_WANTED:
        return [ok(name, "a process may have enough files open")]
    report = problem if facts.open_files_hard < _FILES_NEEDED else warning
    why = "the daemon keeps a file open for each object that is read, and some for connections"
    mend = "LimitNOFILE=65536 in the systemd unit, or '* hard nofile 65536' in /etc/security/limits.conf"
    return [report(name, what, why, mend)]
