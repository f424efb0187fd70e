"""Inode numbers: stable across restarts, never 0 or 1 (1 is the root), never reused for anything else.

A number is 63 bits hashed from an identity: of a file its version id (which is itself hashed from the export, the
first path of the hard-link group and the stat), of a directory or symlink its path. 63 bits, since some readers take
inode numbers as signed. Where two identities meet on one number, the later one gets another, and that exception is
kept in a small file, so that it stays even when the other identity goes away.

By chance two of a million identities meet in one of 10 million trees. But names can be made to meet, since the hash is
no cryptographic one: so there are at most ``EXCEPTIONS_LIMIT`` exceptions, over all trees.
"""

import json
import logging
import os
from pathlib import Path

import xxhash

from tierfs.blocks.errors import ProtocolError

ROOT_INODE = 1
EXCEPTIONS_LIMIT = 1024

log = logging.getLogger(__name__)


class Inodes:
    """Assigns numbers. ``store`` is the file that keeps exceptions; None keeps them in memory only.

    Whoever has numbered a tree calls ``keep`` before the numbers are shown to anybody.
    """

    def __init__(self, store: Path | None) -> None:
        self._store = store
        self._exceptions: dict[str, int] = {}
        self._unsaved: list[str] = []  # those of the tree that is being numbered
        if store is not None and store.exists():
            try:
                self._exceptions = {str(key): int(value) for key, value in json.loads(store.read_text()).items()}
            except (OSError, ValueError, AttributeError) as error:
                log.warning("inode_exceptions_unreadable path=%s error=%s", store, error)
        self._reserved = set(self._exceptions.values())

    def number(self, identity: bytes, taken: dict[int, bytes]) -> int:
        """The number of an identity; ``taken`` has the numbers given so far in this tree, and is added to.

        Raises ProtocolError when there would be more exceptions than the limit; those of this tree are forgotten then.
        """
        exception = self._exceptions.get(identity.hex())
        if exception is not None:
            taken[exception] = identity
            return exception
        number = xxhash.xxh3_64_intdigest(identity) >> 1
        other = taken.setdefault(number, identity)
        if number > ROOT_INODE and other == identity and number not in self._reserved:
            return number
        return self._except(identity, taken)

    def keep(self) -> None:
        """Save the exceptions that are new. Blocking; what cannot be saved is logged, and stays in memory."""
        if self._unsaved and self._store is not None:
            try:
                self._save(self._store)
            except OSError as error:
                log.warning("inode_exceptions_not_kept path=%s error=%s", self._store, error)
        self._unsaved.clear()

    def _except(self, identity: bytes, taken: dict[int, bytes]) -> int:
        if len(self._exceptions) >= EXCEPTIONS_LIMIT:
            for name in self._unsaved:
                self._reserved.discard(self._exceptions.pop(name))
            self._unsaved.clear()
            raise ProtocolError(
                f"the catalog has more than {EXCEPTIONS_LIMIT} entries that meet on one inode number, such as"
                f" {identity[1:]!r}: that is no chance, but names made to meet; remove them at the source"
            )
        salt = 0
        number = ROOT_INODE
        while number <= ROOT_INODE or number in taken or number in self._reserved:
            salt += 1
            number = xxhash.xxh3_64_intdigest(identity, seed=salt) >> 1
        log.info("inode_collision identity=%s number=%d", identity.hex(), number)
        self._exceptions[identity.hex()] = number
        self._reserved.add(number)
        taken[number] = identity
        self._unsaved.append(identity.hex())
        return number

    def _save(self, store: Path) -> None:
        temporary = store.with_suffix(".new")
        with temporary.open("w") as file:
            json.dump(self._exceptions, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(store)
