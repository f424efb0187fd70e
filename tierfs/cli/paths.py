"""Paths given to commands: which mount they are in, and where in it."""

import os

from tierfs.blocks.errors import ControlError
from tierfs.control import registry


def in_one_mount(paths: list[str]) -> tuple[registry.Record, list[str]]:
    """The mount that holds all these paths, and the paths relative to it. Touches no mount."""
    absolute = [os.path.abspath(path) for path in paths]
    found = [registry.find(path) for path in absolute]
    if len({record.mountpoint for record in found}) > 1:
        raise ControlError("the paths are in different mounts: one command for each, please")
    return found[0], [os.path.relpath(path, found[0].mountpoint) for path in absolute]
