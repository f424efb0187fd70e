"""`tierfs reload`, and SIGHUP of a daemon in direct mode: the configuration again, while the mount runs.

Built by mount.py, called over the control socket. What must hold: a file with a mistake changes nothing at all; what
changes is in force when the answer comes, and what cannot is named together with what would bring it into force.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import trio

from tierfs.blocks.errors import ConfigError
from tierfs.blocks.units import Duration, Rate, Share, Size, format_bytes, format_duration
from tierfs.cache.prefetcher import Prefetcher
from tierfs.config.load import keys
from tierfs.config.schema import MountConfig
from tierfs.control.operate import Change
from tierfs.fs.filesystem import Filesystem
from tierfs.fs.pins import Pins
from tierfs.fuse.operations import Operations
from tierfs.policy.readahead import ReadaheadConfig
from tierfs.tiers.local import DirectoryTier

log = logging.getLogger(__name__)

# What the file gives, and which of its keys are written there (or in --set): others may have a computed value.
Reread = Callable[[], tuple[MountConfig, frozenset[str]]]

LIVE = frozenset({
    "hot.admit", "hot.capacity", "log.level", "mount.metadata_ttl", "mount.request_timeout", "readahead.rate_max",
    "readahead.streams_max", "readahead.window_max", "readahead.window_min", "source.timeout", "warm.capacity",
    "warm.high_watermark", "warm.low_watermark", "warm.write_queue",
})  # fmt: skip
RESTART = frozenset({
    "hot.path", "log.file", "log.format", "memory.limit", "metrics.listen", "mount.gid", "mount.uid",
    "source.connections", "source.rescan", "source.tls", "source.tls_ca_file", "source.token_file", "source.transport",
    "warm.path", "warm.paths",
})  # fmt: skip
# What the kernel, or the channel, was given once; and what the state of the mount is found by.
MOUNT = frozenset({
    "mount.allow_other", "mount.max_background", "mount.mode", "mount.read_ahead", "mount.restart_grace", "mount.user",
    "source.block_size", "source.url", "state_dir",
})  # fmt: skip
_MEASURED = ("hot.capacity", "warm.capacity")  # where the file does not say, measured anew at each reading


class Reloader:
    """The settings in force, and the parts that can take others."""

    def __init__(
        self,
        config: MountConfig,
        reread: Reread,
        given: frozenset[str],
        *,
        channel: bool,
        filesystem: Filesystem,
        prefetcher: Prefetcher,
        operations: Operations,
        tiers: Sequence[DirectoryTier],
        pins: Pins,
    ) -> None:
        self._in_force = flat(config)
        self._reread = reread
        self._given = given
        self._restart = "`tierfs restart`" if channel else "unmounting and mounting again"
        self._filesystem = filesystem
        self._prefetcher = prefetcher
        self._operations = operations
        self._tiers = {tier.name: tier for tier in tiers}
        self._pins = pins

    async def reload(self) -> list[Change]:
        """Read the file again; every key that has another value there than is in force. Raises ConfigError."""
        try:
            config, given = await trio.to_thread.run_sync(self._reread)
        except ConfigError as error:
            raise ConfigError(f"{error}; nothing was changed") from error
        # From here to the end there is no checkpoint: readers meet the old settings or the new ones.
        changes = []
        for key, value in flat(config).items():
            before = self._in_force[key]
            measured = key in _MEASURED and key not in given and key not in self._given
            if value != before and not measured:
                needs = self._needs(key, before, value)
                changes.append(Change(key, _shown(before), _shown(value), needs))
                if not needs:
                    self._in_force[key] = value
                    self._given = self._given - {key} | (given & {key})
        if any(not change.needs for change in changes):
            self._apply()
        for change in changes:
            log.info(
                "reloaded key=%s before=%s after=%s needs=%r", change.key, change.before, change.after, change.needs
            )
        return changes

    def _needs(self, key: str, before: Any, value: Any) -> str:
        """What would bring that value into force; empty where it can be now."""
        if key in MOUNT:
            return "unmounting and mounting again"
        table = key.partition(".")[0]
        tier = self._tiers.get(table)
        if key in RESTART or (table in ("hot", "warm") and (tier is None or before is None or value is None)):
            return self._restart
        if tier is not None and key.endswith(".capacity"):
            pinned_bytes = self._pins.pinned_bytes(table)
            if value < before and value < pinned_bytes:
                return f"unpinning: {format_bytes(pinned_bytes)} are pinned in {table}"
            if value > before and tier.statistics().residency == "libpmemobj pool":
                return f"{self._restart}: the pool is made for its capacity"
        return ""

    def _apply(self) -> None:
        value = self._in_force
        logging.getLogger().setLevel(value["log.level"].upper())
        self._filesystem.cache.configure(
            source_timeout_s=value["source.timeout"], hot_admission=value["hot.admit"] or "first"
        )
        self._filesystem.configure(
            ReadaheadConfig(
                window_min_bytes=value["readahead.window_min"],
                window_max_bytes=min(value["readahead.window_max"], value["memory.limit"] // 2),
                streams_max=value["readahead.streams_max"],
            ),
            request_timeout_s=value["mount.request_timeout"],
        )
        self._prefetcher.set_rate(value["readahead.rate_max"])
        operations = self._operations
        operations.presentation = replace(operations.presentation, metadata_ttl_s=value["mount.metadata_ttl"])
        if "hot" in self._tiers:
            self._tiers["hot"].resize(capacity_bytes=value["hot.capacity"])
        if "warm" in self._tiers:
            self._tiers["warm"].resize(
                capacity_bytes=value["warm.capacity"],
                high_watermark=value["warm.high_watermark"],
                low_watermark=value["warm.low_watermark"],
                write_queue_bytes=min(value["warm.write_queue"], value["memory.limit"] // 4),
            )


def flat(config: MountConfig) -> dict[str, Any]:
    """Every key and its value; None for those of a table that is not there."""
    found: dict[str, Any] = {}
    for key in keys(MountConfig):
        table = key.partition(".")[0]
        found[key] = None if getattr(config, table) is None else attrgetter(key)(config)
    return found


def _shown(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, Rate):
        return f"{format_bytes(value)}/s"
    if isinstance(value, Size):
        return format_bytes(value)
    if isinstance(value, Duration):
        return format_duration(value)
    if isinstance(value, Share):
        return f"{float(value):g}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "not set"
    return str(value).lower() if isinstance(value, bool) else str(value)
