"""Memory: what the configuration takes of it, what the machine and its cgroups have, and how a tmpfs is mounted.

Called by examination.py. What is measured about huge pages is in docs/HOT-TIER.md.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tierfs.app.doctor.finding import Finding, ok, problem, warning
from tierfs.app.doctor.looking import read_text
from tierfs.app.doctor.passthrough import version_of
from tierfs.blocks.units import format_bytes
from tierfs.config.memory import MemoryRoom, memory_room, overcommitted
from tierfs.config.mounts import mount_of, mounts, nearest_existing
from tierfs.config.schema import MountConfig

_TMPFS = ("tmpfs", "ramfs")


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """``tmpfs_options``: of the tmpfs the hot tier lies on; None where it lies on something else, or there is none."""

    room: MemoryRoom
    running: bool = False  # a daemon with this configuration has its part of the memory already
    memory_limit_bytes: int = 0  # 0: no configuration
    hot_bytes: int = 0  # of a hot tier on a tmpfs
    hot_path: str = ""
    hot_mountpoint: str = ""
    tmpfs_options: frozenset[str] | None = None
    swap_bytes: int = 0
    shmem_huge: str = ""  # of /sys/kernel/mm/transparent_hugepage/shmem_enabled: the word in brackets
    release: str = ""


def look(config: MountConfig | None, daemon_pid: int | None, root: Path = Path("/")) -> MemoryFacts:
    """``daemon_pid``: of a running mount with this configuration, whose cgroup counts then instead of ours."""
    pid: int | str = "self" if daemon_pid is None else daemon_pid
    swap = re.search(r"^SwapTotal:\s*(\d+)", read_text(root / "proc/meminfo") or "", re.MULTILINE)
    huge = re.search(r"\[(\w+)\]", read_text(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled") or "")
    hot = None if config is None else config.hot
    entry = None
    if hot is not None:
        entry = mount_of(nearest_existing(hot.path), mounts(root / "proc/self/mountinfo"))
    volatile = entry is not None and entry.file_system in _TMPFS
    return MemoryFacts(
        room=memory_room(pid, root),
        running=daemon_pid is not None,
        memory_limit_bytes=0 if config is None else config.memory.limit,
        hot_bytes=hot.capacity if hot is not None and volatile else 0,
        hot_path="" if hot is None else str(hot.path),
        hot_mountpoint="" if entry is None else entry.mountpoint,
        tmpfs_options=entry.options if entry is not None and volatile else None,
        swap_bytes=int(swap[1]) * 1024 if swap else 0,
        shmem_huge=huge[1] if huge else "",
        release=read_text(root / "proc/sys/kernel/osrelease") or "",
    )


def judge(facts: MemoryFacts) -> list[Finding]:
    """Pure."""
    return [*_budget(facts), *_tmpfs(facts)]


def _budget(facts: MemoryFacts) -> list[Finding]:
    room = facts.room
    has = f"{room.owner} has {format_bytes(room.limit_bytes)}, {format_bytes(room.available_bytes)} of it to spare"
    if not facts.memory_limit_bytes:
        return [ok("memory.budget", has)]
    wanted = facts.memory_limit_bytes + facts.hot_bytes
    wrong = overcommitted(room, memory_limit_bytes=facts.memory_limit_bytes, hot_bytes=facts.hot_bytes)
    if wrong is not None:
        return [problem("memory.budget", wrong.what, wrong.why, wrong.mend)]
    may_take = f"buffers and a hot tier in memory may take {format_bytes(wanted)}; {has}"
    if wanted > room.available_bytes and not facts.running:
        why = "as the tier fills, the kernel drops page cache, swaps, and then ends processes"
        mend = "end what else takes memory, or lower hot.capacity and memory.limit"
        return [warning("memory.budget", may_take, why, mend)]
    return [ok("memory.budget", may_take)]


def _tmpfs(facts: MemoryFacts) -> list[Finding]:
    options = facts.tmpfs_options
    if options is None:
        return []
    findings = []
    line = mount_line(facts)
    if facts.swap_bytes and "noswap" not in options:
        what = f"the hot tier's tmpfs ({facts.hot_mountpoint}) may be swapped out: there is swap, and no noswap"
        why = "a model that is called hot would then be read from the swap device, 4 KiB at a time"
        if version_of(facts.release) >= (6, 4):
            mend = f"umount {facts.hot_mountpoint}; {line} (noswap cannot be set by a remount)"
        else:
            mend = "swapoff -a, or Linux 6.4 for the mount option noswap"
        findings.append(warning("memory.noswap", what, why, mend))
    if not huge_pages(options, facts.shmem_huge):
        findings.append(
            warning(
                "memory.huge_pages",
                f"the hot tier's tmpfs ({facts.hot_mountpoint}) has no huge pages",
                "with them a mapped model is walked several times as fast: measured in docs/HOT-TIER.md",
                f"mount -o remount,huge=within_size {facts.hot_mountpoint} (for files written from then on)",
            )
        )
    else:
        findings.append(ok("memory.huge_pages", f"the hot tier's tmpfs ({facts.hot_mountpoint}) has huge pages"))
    return findings


def huge_pages(options: frozenset[str], shmem_huge: str) -> bool:
    """Whether files of a tmpfs get huge pages without asking: tmpfs(5), admin-guide/mm/transhuge.rst."""
    if shmem_huge == "deny":
        return False
    return shmem_huge == "force" or bool({"huge=always", "huge=within_size"} & options)


def mount_line(facts: MemoryFacts) -> str:
    """The command that mounts a tmpfs as a hot tier wants it on this kernel."""
    size_mib = max(1, facts.hot_bytes * 10 // 9 >> 20)
    options = [f"size={size_mib}m", "huge=within_size", "mode=700"]
    if version_of(facts.release) >= (6, 4):
        options.append("noswap")
    return f"mount -t tmpfs -o {','.join(options)} tmpfs {facts.hot_mountpoint or '/mnt/hot'}"
