"""Native speed: the channel program, and what the kernel wants for passthrough. Called by examination.py.

What decides is listed in docs/CHANNEL.md. Whether a mount really has it, `tierfs status` says.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tierfs.app import launch
from tierfs.app.doctor.finding import Finding, Level, note, ok, problem, warning
from tierfs.app.doctor.looking import read_text
from tierfs.config.mounts import mount_of, mounts, nearest_existing
from tierfs.config.schema import MountConfig

_SYS_ADMIN = 21  # CAP_SYS_ADMIN: capability.h
_ALL_USERS = ["0", "0", "4294967295"]  # uid_map of the initial user namespace: user_namespaces(7)
_STACKED = ("overlay", "ecryptfs")  # file systems that lie on another one and count as a level


@dataclass(frozen=True, kw_only=True)
class PassthroughFacts:
    """``tiers``: each directory of a local tier with the file system it lies on."""

    release: str
    sys_admin: bool
    initial_user_namespace: bool
    program: str | None
    mode: str | None = None  # of the configuration
    user: str | None = None
    tiers: tuple[tuple[str, str], ...] = ()


def look(config: MountConfig | None, root: Path = Path("/")) -> PassthroughFacts:
    """``root`` is where /proc is found."""
    status = read_text(root / "proc/self/status") or ""
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    table = mounts(root / "proc/self/mountinfo")
    tiers = []
    for directory in [] if config is None else launch.tier_directories(config):
        entry = mount_of(nearest_existing(directory), table)
        tiers.append((str(directory), "unknown" if entry is None else entry.file_system))
    return PassthroughFacts(
        release=os.uname().release,
        sys_admin=effective is not None and bool(int(effective[1], 16) >> _SYS_ADMIN & 1),
        initial_user_namespace=(read_text(root / "proc/self/uid_map") or "").split() == _ALL_USERS,
        program=launch.find_program(),
        mode=None if config is None else config.mount.mode,
        user=None if config is None else config.mount.user,
        tiers=tuple(tiers),
    )


def judge(facts: PassthroughFacts) -> list[Finding]:
    """Pure."""
    findings = [_channel(facts)]
    if facts.mode == "direct":
        return findings
    findings += [*_kernel(facts), *_rights(facts), *_stacking(facts)]
    if all(finding.level is Level.OK for finding in findings):
        findings.append(ok("passthrough.possible", "models that are wholly resident can be read past tierfs"))
    return findings


def version_of(release: str) -> tuple[int, int]:
    """(6, 12) of ``6.12.30-amd64``; (0, 0) of what is no version."""
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _channel(facts: PassthroughFacts) -> Finding:
    name = "channel.program"
    if facts.mode == "direct":
        return note(
            name, 'mount.mode is "direct"', "every byte goes through the daemon, and a mount ends with it",
            'mount.mode = "auto"',
        )  # fmt: skip
    if facts.program is not None:
        return ok(name, f"{launch.PROGRAM} is {facts.program}")
    needed = facts.mode == "channel" or facts.user is not None
    return (problem if needed else warning)(
        name,
        f"{launch.PROGRAM} is not installed: neither beside this Python nor in PATH",
        "without it every byte goes through the daemon, and a mount ends with its daemon",
        f"install tierfs with pip from its source (needs meson and a C compiler), or name it in {launch.ENVIRONMENT}",
    )


def _kernel(facts: PassthroughFacts) -> list[Finding]:
    if version_of(facts.release) >= (6, 9):
        return [ok("passthrough.kernel", f"Linux {facts.release} has FUSE passthrough")]
    return [
        warning(
            "passthrough.kernel",
            f"Linux {facts.release} has no FUSE passthrough",
            "with it the kernel reads resident models itself, at the speed of the tier's own file",
            "use Linux 6.9 or later, such as that of Debian 13 or 12-backports, or Ubuntu 24.10",
        )
    ]


def _rights(facts: PassthroughFacts) -> list[Finding]:
    why = "the kernel lets nobody else hand files over to it"
    if not facts.initial_user_namespace:
        return [
            warning(
                "passthrough.rights", "this is a user namespace (a rootless container), whose root has no say here",
                why, "mount outside and pass /dev/fuse in: docs/CHANNEL.md, Containers",
            )
        ]  # fmt: skip
    if not facts.sys_admin:
        return [
            warning(
                "passthrough.rights", "no CAP_SYS_ADMIN", why,
                "mount as root, with mount.user for a daemon without rights; in a container --cap-add SYS_ADMIN",
            )
        ]  # fmt: skip
    return []


def _stacking(facts: PassthroughFacts) -> list[Finding]:
    return [
        warning(
            "passthrough.stacking",
            f"the tier directory {path} lies on {kind}",
            "the kernel refuses a file of a stacked file system (ELOOP), as is a container's own root",
            "put it on a volume of its own: docker run -v /var/cache/tierfs:/var/cache/tierfs",
        )
        for path, kind in facts.tiers
        if kind in _STACKED
    ]
