"""The whole examination: all subjects looked at side by side, then judged. Called by cli/doctor.

What must hold: it changes nothing, needs no rights, and is over within the longest deadlines of its three rounds,
whatever hangs. Loading the configuration is a look as well: it measures the tiers' directories.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from tierfs.app.doctor import (
    clock,
    fuse,
    limits,
    memory,
    mounted,
    passthrough,
    places,
    pmem,
    rdma,
    source,
    speed,
    storage,
    transport,
)
from tierfs.app.doctor.finding import Finding, Level, note, ok, problem, warning
from tierfs.app.doctor.looking import Failure, Look, look_all
from tierfs.blocks.errors import ConfigError
from tierfs.config.load import load_mount_config
from tierfs.config.schema import MountConfig

_LOOK_S = 5.0
_IMPORT_S = 15.0  # for pyverbs
_LOAD_S = 15.0  # a full tier has many files to measure
_SPARE_S = 4.0  # beyond what a look allows itself

_Facts = TypeVar("_Facts")


@dataclass(frozen=True)
class Examination:
    """``config``: the path of the configuration that was looked at, empty without one."""

    config: str
    findings: tuple[Finding, ...]

    def count(self, level: Level) -> int:
        """How many findings have that level."""
        return sum(finding.level is level for finding in self.findings)


def examine(config_path: Path | None, *, measure: bool = False) -> Examination:
    """Look at this machine, and at what the configuration names.

    Without one, that of the only mount that is up is taken. ``measure`` allows the doctor to write a temporary file
    without a name, to read it. Never raises a TierfsError: what is wrong is a finding.
    """
    facts = look_all({"mounts": Look(mounted.look, mounted.MOUNTS_MAX * mounted.ANSWER_S + _SPARE_S)})
    found = facts["mounts"] if isinstance(facts["mounts"], list) else []
    up = [one for one in found if one.alive]
    if config_path is None and len({one.config for one in up}) == 1:
        config_path = Path(up[0].config)
    same = [] if config_path is None else [one for one in up if one.config == str(config_path.absolute())]
    daemon_pid = same[0].pid if same and not same[0].trouble else None
    if config_path is not None:
        facts |= look_all({"configuration": Look(partial(_load, config_path, daemon_pid), _LOAD_S)})
    loaded = facts.get("configuration")
    config = loaded if isinstance(loaded, MountConfig) else None
    facts |= look_all(_looks(config, daemon_pid, measure))
    findings = [
        *_configuration(config_path, loaded),
        *_judged("fuse", facts, fuse.judge),
        *_judged("passthrough", facts, passthrough.judge),
        *_judged("limits", facts, limits.judge),
        *_judged("memory", facts, memory.judge),
        *_judged("clock", facts, clock.judge),
        *_judged("pmem", facts, pmem.judge),
        *_judged("rdma", facts, rdma.judge),
        *_judged("tiers", facts, places.judge, hangs=problem),
        *_judged("storage", facts, storage.judge),
        *_judged(
            "speed",
            facts,
            partial(speed.judge, largest_model_bytes=_largest_model_bytes(same, facts["transport"])),
        ),
        *_judged("source", facts, source.judge, hangs=problem),
        *_judged("transport", facts, transport.judge),
        *_judged("mounts", facts, mounted.judge),
    ]
    return Examination("" if config_path is None else str(config_path), tuple(findings))


def _looks(config: MountConfig | None, daemon_pid: int | None, measure: bool) -> dict[str, Look]:
    directories = 0 if config is None or config.warm is None else len(config.warm.directories)
    measuring_s = directories * (speed.READ_S + (speed.WRITE_S if measure else 0.0))
    connecting_s = 0.0 if config is None else 2 * source.connect_timeout_s(config)
    return {
        "fuse": Look(partial(fuse.look, config), _LOOK_S),
        "passthrough": Look(partial(passthrough.look, config), _LOOK_S),
        "limits": Look(limits.look, _LOOK_S),
        "memory": Look(partial(memory.look, config, daemon_pid), _LOOK_S),
        "clock": Look(partial(clock.look, config), _LOOK_S),
        "pmem": Look(partial(pmem.look, config), _LOOK_S),
        "rdma": Look(partial(rdma.look, config), _IMPORT_S),
        "tiers": Look(partial(places.look, config), _LOOK_S),
        "storage": Look(partial(storage.look, config), _LOOK_S),
        "speed": Look(partial(speed.look, config, temporary=measure), measuring_s + _SPARE_S),
        "source": Look(partial(source.look, config), connecting_s + _SPARE_S),
        "transport": Look(partial(transport.look, config), transport.deadline_s(config) + _SPARE_S),
    }


def _largest_model_bytes(mounts: list[mounted.Mounted], found: object) -> int:
    """Of what the source publishes, or else of what a mount of this configuration shows; 0 where neither is known."""
    published = found.largest_model_bytes if isinstance(found, transport.TransportFacts) else 0
    return published or max((one.largest_model_bytes for one in mounts), default=0)


def _load(path: Path, daemon_pid: int | None) -> MountConfig | ConfigError:
    try:
        return load_mount_config(path, pid="self" if daemon_pid is None else daemon_pid)
    except ConfigError as error:
        return ConfigError(str(error))  # without its cause, which may not go through a pipe


def _configuration(path: Path | None, loaded: object) -> list[Finding]:
    name = "configuration.valid"
    if path is None:
        mend = "tierfs doctor CONFIG"
        return [note(name, "no configuration was given: only the machine is looked at", mend=mend)]
    if isinstance(loaded, MountConfig):
        return [ok(name, f"{path} is a configuration of a mount")]
    if isinstance(loaded, Failure):
        why = "loading it measures the directories of the tiers and reads the token: one of them may hang"
        return [problem(name, f"{path} could not be loaded: {loaded.reason}", why, "look at the file systems it names")]
    why = "`tierfs mount` refuses it; only the machine is looked at"
    return [problem(name, str(loaded), why, "correct that key: docs/CONFIGURATION.md")]


def _judged(
    subject: str,
    facts: dict[str, object],
    judge: Callable[[_Facts], list[Finding]],
    hangs: Callable[[str, str, str, str], Finding] = warning,
) -> list[Finding]:
    """The findings of a subject; one that says so where looking gave nothing."""
    found = facts[subject]
    if isinstance(found, Failure):
        why = "what hangs or fails for the doctor does so for tierfs"
        mend = "look at dmesg; at mounts whose server is gone: findmnt, ls"
        return [hangs("doctor.no_answer", f"{subject}: {found.reason}", why, mend)]
    return judge(found)  # type: ignore[arg-type]  # look_all carries what the subject's own look returned
