"""One reader of a file that is published again and again: ``python version_reader.py HOW PATH STOP NEWS WITHIN_S``.

Every page of a version names it, so that a mixture is seen. HOW is ``read`` or ``map``. NEWS says which version was
published when, on the monotonic clock: an open that comes WITHIN_S later must find that one or a newer one. It goes on
until the file STOP is there, then prints a line of JSON: rounds, stale ones, the longest, bytes compared. Each round
touches its output. A wrong byte, or an error that is not ESTALE, ends it at once with a nonzero status. A map's ESTALE
is SIGBUS, so each map lives in a child.
"""

import errno
import json
import mmap
import os
import signal
import sys
import time
from pathlib import Path

PAGE_BYTES = 4096
PIECE_BYTES = 1 << 20


def content(version: int, pages: int) -> bytes:
    """The bytes of one version: ``pages`` times 4096."""
    return b"".join((b"%020d%012d" % (version, page)) * (PAGE_BYTES // 32) for page in range(pages))


def publish(path: Path, version: int, pages: int, news: Path) -> None:
    """Put a version in place as publishers do, by rename; then say so in ``news``."""
    for target, data in ((path, content(version, pages)), (news, b"%d %f" % (version, time.monotonic()))):
        new = target.with_name(f".{target.name}.new")
        new.write_bytes(data)
        new.replace(target)


def check(data: bytes | mmap.mmap, at_least: int) -> None:
    """Raises AssertionError unless this is one version, whole, and not older than that."""
    version = int(data[:20])
    assert version >= at_least, f"version {version} is served, {at_least} was published long ago"
    assert data[:] == content(version, len(data) // PAGE_BYTES), f"version {version} is not whole"


def due(news: Path, within_s: float) -> int:
    """The version that a new open has to find at least."""
    version, published_s = news.read_text().split()
    return int(version) if time.monotonic() - float(published_s) > within_s else 0


def read_once(path: Path, at_least: int) -> bool:
    """False if what was opened has become stale."""
    try:
        with path.open("rb", buffering=0) as file:
            pieces = []
            while piece := file.read(PIECE_BYTES):
                pieces.append(piece)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return False
    check(b"".join(pieces), at_least)
    return True


def map_once(path: Path, at_least: int) -> bool:
    """The same over a map, in a child."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with path.open("rb") as file:
                check(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), at_least)
            status = 0
        except OSError as error:
            status = 2 if error.errno == errno.ESTALE else 1
            print(error, file=sys.stderr, flush=True)
        except AssertionError as error:
            print(error, file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGBUS:
        return False
    assert os.waitstatus_to_exitcode(status) in (0, 2), "see above"
    return os.waitstatus_to_exitcode(status) == 0


def main() -> None:
    how, path, stop, news, within_s = sys.argv[1:]
    once = {"read": read_once, "map": map_once}[how]
    rounds = stale = checked_bytes = 0
    longest_s = 0.0
    while not rounds or not os.path.exists(stop):
        start_s = time.monotonic()
        os.utime(sys.stdout.fileno())
        if once(Path(path), due(Path(news), float(within_s))):
            checked_bytes += os.stat(path).st_size
        else:
            stale += 1
        longest_s = max(longest_s, time.monotonic() - start_s)
        rounds += 1
        time.sleep(0.01)
    told = {"rounds": rounds, "stale": stale, "longest_s": round(longest_s, 2), "checked_bytes": checked_bytes}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
