"""Versions that are open although a newer generation lacks them, kept by the mount: the kernel's handles on them
outlive a daemon, and the daemon after it must know what they are.

One small file, replaced atomically. The mount writes it before it moves to the generation that lacks them, and reads
it when it takes over. It holds what was open then: at most as many records as there are open files.
"""

import logging
import os
from collections.abc import Collection
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)


class Superseded(msgspec.Struct, frozen=True):
    """One file version, as its catalog had it, and the inode number it was opened by."""

    inode: int
    version: bytes
    content: bytes  # the content id, where it was known: what its blocks are found by
    path: bytes  # the first one of its hard-link group
    size_bytes: int
    mode: int
    mtime_ns: int
    links: int
    model: bytes
    model_bytes: int


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(list[Superseded])


class SupersededStore:
    """The records of one mount. Blocking, but for covers(); called from one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: frozenset[Superseded] = frozenset()

    def load(self) -> list[Superseded]:
        """What was kept; nothing where there is nothing usable (logged)."""
        try:
            records = _decoder.decode(self._path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("superseded_versions_unreadable path=%s error=%s", self._path, error)
            return []
        self._kept = frozenset(records)
        return records

    def covers(self, records: Collection[Superseded]) -> bool:
        """Whether all of these were given to replace(), or loaded. Never waits."""
        return self._kept.issuperset(records)

    def replace(self, records: Collection[Superseded]) -> None:
        """Keep these instead, durable on return. A failure is logged and left: only a restart would miss them."""
        if frozenset(records) != self._kept:
            try:
                self._write(_encoder.encode(list(records)))
            except OSError as error:
                log.warning("superseded_versions_not_kept path=%s error=%s", self._path, error)
        self._kept = frozenset(records)  # after a failure, too: the caller must not try for ever

    def _write(self, data: bytes) -> None:
        temporary = self._path.with_suffix(".new")
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
