"""Looking without hanging: every look runs in a child process of its own and has a deadline; and small readers of /sys.

Called by examination.py. A child, and not a thread, because a look may get stuck in the kernel (a dead network file
system, a failing disk) where nothing can end it: such a child is given up, holds nothing of ours open, and is nobody's
wait. A crash in a library it loads stays in it too. What must hold: a look changes nothing on the machine.
"""

import contextlib
import os
import pickle
import select
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_READ_BYTES = 1 << 16
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Failure:
    """A look that gave no facts."""

    reason: str


@dataclass(frozen=True)
class Look:
    """What is to be called in a child, and how long it may take."""

    call: Callable[[], object]
    deadline_s: float


def look_all(looks: Mapping[str, Look]) -> dict[str, object]:
    """Run all looks at once; the facts of each, or its Failure. Takes as long as the longest deadline at most."""
    children = {name: _start(look) for name, look in looks.items()}
    received = dict.fromkeys(looks, b"")
    waiting = {receive: name for name, (_, receive) in children.items()}
    started_s = time.monotonic()
    while waiting:
        left_s = {end: started_s + looks[name].deadline_s - time.monotonic() for end, name in waiting.items()}
        for end in [end for end, seconds in left_s.items() if seconds <= 0]:
            del waiting[end], left_s[end]
        if not waiting:
            break
        for end in select.select(list(waiting), [], [], min(left_s.values()))[0]:
            data = os.read(end, _READ_BYTES)
            received[waiting[end]] += data
            # Not only at the end of the pipe: a thread of the child that is stuck keeps its other end open.
            if not data or _whole(received[waiting[end]]) is not None:
                del waiting[end]
    facts: dict[str, object] = {}
    for name, (pid, receive) in children.items():
        whole = _whole(received[name])
        if whole is None:
            facts[name] = Failure(f"no answer within {looks[name].deadline_s:g} s, or a crash")
        else:
            facts[name] = pickle.loads(whole)
        os.close(receive)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # what cannot end just now is left to init
    return facts


def _whole(data: bytes) -> bytes | None:
    """The answer, if all of it has come: its length goes before it."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    whole = data[_LENGTH_BYTES:]
    return whole if len(data) > _LENGTH_BYTES and len(whole) == length else None


def _start(look: Look) -> tuple[int, int]:
    receive, send = os.pipe()
    pid = os.fork()
    if pid:
        os.close(send)
        return pid, receive
    try:
        # Whoever waits for the end of our output must not wait for a stuck child.
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        try:
            facts: object = look.call()
        except Exception as error:  # whatever it is, the other subjects are still worth looking at
            facts = Failure(f"{type(error).__name__}: {error}")
        answer = pickle.dumps(facts)
        with os.fdopen(send, "wb") as pipe:
            pipe.write(len(answer).to_bytes(_LENGTH_BYTES, "little") + answer)
    finally:
        os._exit(0)


def read_text(path: Path) -> str | None:
    """The stripped text of a small file of /proc or /sys; None where it is missing or cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def read_number(path: Path) -> int | None:
    """The number in such a file."""
    text = read_text(path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def entries(directory: Path) -> list[Path]:
    """What lies in a directory, in order; nothing where it is missing."""
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []
