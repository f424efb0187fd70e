"""What a subject says: findings, each with its level, what is, why it matters, and what mends it.

Made by the ``judge`` of every subject, which is pure: the same facts give the same findings. ``name`` is an interface
(docs/DOCTOR.md lists them all); the texts are for people.
"""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is. Only a problem keeps tierfs from doing what it was told."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of what is, one of why it matters, and the command or the line of the configuration that mends it."""

    name: str
    level: Level
    what: str
    why: str = ""
    mend: str = ""


def ok(name: str, what: str) -> Finding:
    """All is well there."""
    return Finding(name, Level.OK, what)


def note(name: str, what: str, why: str = "", mend: str = "") -> Finding:
    """Worth knowing."""
    return Finding(name, Level.NOTE, what, why, mend)


def warning(name: str, what: str, why: str, mend: str) -> Finding:
    """Works, but slower or more fragile than it could be."""
    return Finding(name, Level.WARNING, what, why, mend)


def problem(name: str, what: str, why: str, mend: str) -> Finding:
    """Will not work, or not as configured."""
    return Finding(name, Level.PROBLEM, what, why, mend)
