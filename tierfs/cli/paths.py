"""Paths given to commands: which mount they are in, and where in it."""

import os

from tierfs.blocks.errors import ControlError
from tierfs.control import registry


def the_mount(mountpoint: str | None) -> registry.Record:
    """The mount at or around that path; without one, the only one of this user. Raises ControlError."""
    if mountpoint is not None:
        return registry.find(os.path.abspath(mountpoint))
    found = [record for record in registry.records() if record.alive]
    if len(found) != 1:
        which = ", ".join(record.mountpoint for record in found)
        raise ControlError(f"there are {len(found)} mounts of this user: say which ({which})" if found else
                           "there is no tierfs mount of this user")  # fmt: skip
    return found[0]


def in_one_mount(paths: list[str]) -> tuple[registry.Record, list[str]]:
    """The mount that holds all these paths, and the paths relative to it. Touches no mount."""
    absolute = [os.path.abspath(path) for path in paths]
    found = [registry.find(path) for path in absolute]
    if len({record.mountpoint for record in found}) > 1:
        raise ControlError("the paths are in different mounts: one command for each, please")
    return found[0], [os.path.relpath(path, found[0].mountpoint) for path in absolute]
