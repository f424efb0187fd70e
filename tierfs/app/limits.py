"""Limits of the process: those that a daemon sets for itself, and those it must live within."""

import logging
import resource

from tierfs.config.memory import memory_room, overcommitted
from tierfs.config.relations import on_tmpfs
from tierfs.config.schema import MountConfig

_log = logging.getLogger(__name__)


def raise_descriptor_limit() -> None:
    """Open files up to the hard limit: tiers and sources keep some hundred each, and 1,024 is a usual default."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def hot_memory_bytes(config: MountConfig) -> int:
    """What the hot tier may take of the memory: its capacity on a tmpfs, nothing elsewhere. Raises OSError."""
    return int(config.hot.capacity) if config.hot is not None and on_tmpfs(config.hot.path) else 0


def memory_notes(config: MountConfig) -> list[str]:
    """What is wrong with the configured use of memory, for `status`; logged as well."""
    try:
        hot_bytes = hot_memory_bytes(config)
        wrong = overcommitted(memory_room(), memory_limit_bytes=config.memory.limit, hot_bytes=hot_bytes)
    except OSError as error:
        _log.info("memory_limits_unknown error=%s", error)
        return []
    if wrong is None:
        return []
    _log.warning("memory_overcommitted %s", wrong)
    return [str(wrong)]
