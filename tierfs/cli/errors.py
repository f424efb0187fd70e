"""How a command ends when something is wrong: one line on stderr and a nonzero status."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tierfs.blocks.errors import TierfsError
from tierfs.cli.saying import say


@contextmanager
def one_line(status: int = 1) -> Iterator[None]:
    """Print expected trouble as one line and exit with that status."""
    try:
        yield
    except TierfsError as error:
        message = " ".join(str(error).split())
        say(f"tierfs: {message}", file=sys.stderr)
        raise SystemExit(status) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
