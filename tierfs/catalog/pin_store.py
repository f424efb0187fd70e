"""What an operator has pinned in one mount, kept in its state directory so that it outlives daemons.

One small file, replaced atomically and durable before the command says so. A pin names a path, not a content: what is
published there later is pinned as well. Paths are bytes, and base64 in the file.
"""

import logging
import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from tierfs.blocks.errors import ControlError

log = logging.getLogger(__name__)


class Pin(msgspec.Struct, frozen=True):
    """One path to be kept in one tier."""

    path: bytes  # relative to the mountpoint; empty for all of it
    tier: str  # hot or warm
    warm: bool = True  # what is not resident is brought


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(list[Pin])


class PinStore:
    """The pins of one mount. Blocking; called from one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> list[Pin]:
        """What is pinned. A file that cannot be used is put aside and told of: nothing is pinned then."""
        try:
            return _decoder.decode(self._path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError) as error:
            aside = self._path.with_suffix(".unreadable")
            log.error("pins_unreadable path=%s kept_as=%s error=%s: nothing is pinned", self._path, aside, error)
            try:
                self._path.replace(aside)
            except OSError as failure:
                log.warning("pins_not_put_aside path=%s error=%s", self._path, failure)
            return []

    def replace(self, pins: Collection[Pin]) -> None:
        """Keep these instead, durable on return. Raises ControlError; the old ones are kept then."""
        temporary = self._path.with_suffix(".new")
        try:
            with temporary.open("wb") as file:
                file.write(_encoder.encode(list(pins)))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
            directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise ControlError(f"the pins cannot be kept in {self._path}: {error.strerror}; see state_dir") from error
