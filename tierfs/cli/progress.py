"""A bar on stderr for commands that take long: how far, how fast, how long still. None where that is no terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields ``show(total_bytes, done_bytes)``."""
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(what, total=None)
        yield lambda total_bytes, done_bytes: progress.update(task, total=total_bytes, completed=done_bytes)
