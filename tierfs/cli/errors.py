"""How a command ends when something is wrong: one line on stderr and a nonzero status."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tierfs.blocks.errors import TierfsError


@contextmanager
def one_line() -> Iterator[None]:
    """Print expected trouble as one line and exit with status 1."""
    try:
        yield
    except TierfsError as error:
        message = " ".join(str(error).split())
        print(f"tierfs: {message}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
