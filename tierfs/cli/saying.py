"""What commands print for people goes through here, since it may hold names that a source chose. JSON needs none of
this: it escapes by itself, and keeps the names as they are."""

from typing import TextIO

from tierfs.blocks.text import printable


def say(line: str, *, file: TextIO | None = None) -> None:
    """Print one line, to standard output unless told otherwise."""
    print(printable(line), file=file, flush=True)
