"""Databases for their owner alone: they name models, also those in directories that others may not enter.

SQLite makes its files with the mode that the umask leaves, and gives what it makes beside a database the same mode.
"""

import contextlib
import os
import stat
from pathlib import Path

_BESIDE = ("", "-wal", "-shm")


def keep_private(database: Path) -> None:
    """Call before the database is opened: it is made with mode 0600 if there is none, and one that was there gets it.

    Blocking. Raises nothing: on a medium that fails, or can only be read, the database itself says what is wrong.
    """
    for suffix in _BESIDE:
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (0 if suffix else os.O_CREAT)
            descriptor = os.open(f"{database}{suffix}", flags, 0o600)
            try:
                if stat.S_IMODE(os.fstat(descriptor).st_mode) != 0o600:
                    os.fchmod(descriptor, 0o600)
            finally:
                os.close(descriptor)
