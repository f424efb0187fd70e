"""FUSE: whether this user can mount at all, and the kernel's deadlines for requests. Called by examination.py.

Sources: fusermount3(1), Documentation/admin-guide/sysctl/fs.rst.
"""

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from tierfs.app.doctor.finding import Finding, note, ok, problem
from tierfs.app.doctor.looking import read_number, read_text
from tierfs.blocks.units import format_duration
from tierfs.config.schema import MountConfig


@dataclass(frozen=True, kw_only=True)
class FuseFacts:
    """``device``: usable, missing, or why it cannot be opened. Limits are None where the kernel has no such limit."""

    root: bool
    device: str
    known_to_kernel: bool
    fusermount: str | None = None
    fusermount_setuid: bool = False
    user_allow_other: bool = False
    wants_allow_other: bool | None = None  # None: no configuration to ask
    max_request_timeout_s: int | None = None
    default_request_timeout_s: int | None = None
    longest_wait_s: float = 60.0  # what a request may wait by the configuration


def look(config: MountConfig | None, root: Path = Path("/")) -> FuseFacts:
    """``root`` is where the file tree begins."""
    program = shutil.which("fusermount3")
    settings = root / "proc/sys/fs/fuse"
    options = None if config is None else config.mount
    return FuseFacts(
        root=os.geteuid() == 0,
        device=_device(root / "dev/fuse"),
        known_to_kernel="fuse" in (read_text(root / "proc/filesystems") or "").split(),
        fusermount=program,
        fusermount_setuid=program is not None and bool(os.stat(program).st_mode & stat.S_ISUID),
        user_allow_other=_allows_other(read_text(root / "etc/fuse.conf") or ""),
        wants_allow_other=None if options is None else options.allow_other,
        max_request_timeout_s=read_number(settings / "max_request_timeout"),
        default_request_timeout_s=read_number(settings / "default_request_timeout"),
        longest_wait_s=60.0 if options is None else max(options.restart_grace, options.request_timeout),
    )


def judge(facts: FuseFacts) -> list[Finding]:
    """Pure."""
    findings = [_device_finding(facts)]
    if not facts.root:
        findings += _unprivileged(facts)
    findings += _requests(facts)
    return findings


def _device(path: Path) -> str:
    if not path.exists():
        return "missing"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))  # a descriptor that mounts nothing changes nothing
    except OSError as error:
        return error.strerror or "cannot be opened"
    return "usable"


def _allows_other(text: str) -> bool:
    return any(line.strip() == "user_allow_other" for line in text.splitlines())


def _device_finding(facts: FuseFacts) -> Finding:
    if facts.device == "usable":
        return ok("fuse.device", "/dev/fuse can be used")
    why = "nothing can be mounted without it"
    container = "in a container: give it the device (docker run --device /dev/fuse), or mount outside: docs/CHANNEL.md"
    if facts.device != "missing":
        mend = f"chmod 666 /dev/fuse; {container}"
        return problem("fuse.device", f"/dev/fuse cannot be opened by this user: {facts.device}", why, mend)
    if facts.known_to_kernel:
        return problem("fuse.device", "there is no /dev/fuse, but the kernel knows FUSE", why, container)
    return problem("fuse.device", "there is no /dev/fuse", why, f"modprobe fuse; {container}")


def _unprivileged(facts: FuseFacts) -> list[Finding]:
    findings = []
    why = "users mount through it; root needs none"
    if facts.fusermount is None:
        what = "fusermount3 is not installed"
        findings.append(problem("fuse.fusermount", what, why, "apt-get install fuse3, or mount as root"))
    elif not facts.fusermount_setuid:
        what = f"{facts.fusermount} is not setuid"
        findings.append(problem("fuse.fusermount", what, why, f"chmod u+s {facts.fusermount}, or mount as root"))
    else:
        findings.append(ok("fuse.fusermount", f"{facts.fusermount} is there for users"))
    if facts.wants_allow_other is not False and not facts.user_allow_other:
        what = "user_allow_other is not in /etc/fuse.conf"
        why = "mount.allow_other is on by default, and a user's mount is refused then"
        mend = "echo user_allow_other >> /etc/fuse.conf (as root), or mount.allow_other = false"
        report = note if facts.wants_allow_other is None else problem
        findings.append(report("fuse.allow_other", what, why, mend))
    return findings


def _requests(facts: FuseFacts) -> list[Finding]:
    findings = []
    for name, limit_s in (
        ("fuse.max_request_timeout", facts.max_request_timeout_s),
        ("fuse.default_request_timeout", facts.default_request_timeout_s),
    ):
        if limit_s and limit_s <= facts.longest_wait_s:
            findings.append(
                problem(
                    name,
                    f"the kernel gives a request {limit_s} s (fs.{name}), the configuration"
                    f" {format_duration(facts.longest_wait_s)}",
                    "the kernel ends the whole mount when one request takes longer, as while the daemon restarts",
                    f"sysctl -w fs.{name}=0, or set mount.restart_grace and mount.request_timeout below it",
                )
            )
    return findings
