"""An export with everything in it, and readers of every kind for it: what the tests that replace daemons share."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.integration.processes import Mount, eventually, family, waiting_requests, waits_of
from tierfs.wire.channel import COUNTERS_BYTES, decode_counters

BLOCK = 4 << 20
MODELS = 8
END_S = 120.0
ROUND_S = 90.0  # more than any outage and any wait for a source; what takes longer hangs
PROGRAM = Path(__file__).with_name("kill_load.py")


def make_truth(root: Path) -> Path:
    """Eight models of three to six blocks, a tree of small files and symlinks, a directory of many names."""
    rng = random.Random(23)
    for number in range(MODELS):
        (root / f"m{number}").mkdir()
        (root / f"m{number}" / "weights.bin").write_bytes(rng.randbytes((3 + number % 4) * BLOCK + 1001 * number + 7))
    for number in range(300):
        directory = root / "tree" / f"d{number % 7}" / f"e{number % 3}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"file{number}").write_bytes(rng.randbytes(number * 37 % 9000))
        if number % 5 == 0:
            (directory / f"link{number}").symlink_to(f"../e{(number + 1) % 3}/file{number + 1}")
    (root / "many").mkdir()
    for number in range(2500):
        (root / "many" / f"a-rather-long-name-of-a-small-file-{number:05d}").write_bytes(b"%d" % number)
    return root


def counters(channel: int) -> dict[str, int]:
    """The channel's counters, without a daemon."""
    for name in os.listdir(f"/proc/{channel}/fd"):
        path = f"/proc/{channel}/fd/{name}"
        if "tierfs-counters" in os.readlink(path):
            return decode_counters(Path(path).read_bytes()[:COUNTERS_BYTES]).named
    raise AssertionError("the channel has no counters")


@contextmanager
def running(
    commands: list[tuple[str, list[str]]],
    work: Path,
    stop: Path,
    end_s: float,
    *,
    round_s: float = ROUND_S,
    others: Callable[[], Iterable[int]] = tuple,
) -> Iterator[Callable[[], None]]:
    """Readers, each a name and what Python is to run, with their logs in ``work``; yields a check that all go on.

    A reader touches its output with each round; one that has not for ``round_s`` hangs. At the end they are told by the
    file ``stop``, and have to end well within ``end_s`` with a line of JSON that counts their rounds. Whatever fails
    prints what all processes here, and ``others``, wait for.
    """
    started: list[tuple[str, IO[bytes], subprocess.Popen[bytes]]] = []
    try:
        for number, (name, command) in enumerate(commands):
            log = (work / f"{stop.name}-{number}.log").open("w+b")
            reader = ["nice", sys.executable, *command]  # the machine is shared, with the daemon for one
            started.append((name, log, subprocess.Popen(reader, stdout=log, stderr=log)))

        def all_well() -> None:
            for name, log, reader in started:
                if reader.poll() is not None:
                    raise AssertionError(f"the reader {name!r} ended: {Path(log.name).read_text()}")
                silent_s = time.time() - os.stat(log.name).st_mtime
                assert silent_s < round_s, f"the reader {name!r} (pid {reader.pid}) hangs for {silent_s:.0f} s"

        yield all_well
        all_well()
        stop.touch()
        checked_bytes = 0
        for name, log, reader in started:
            status = reader.wait(end_s)
            text = Path(log.name).read_text()
            assert status == 0, f"the reader {name!r}: {text}"
            print(f"{name}: {text.strip()}")
            told = json.loads(text.splitlines()[-1])
            assert told["rounds"] > 0
            checked_bytes += told["checked_bytes"]
        print(f"all readers: {checked_bytes / 2**30:.1f} GiB compared", flush=True)
    except BaseException:
        print(*(waits_of(pid) for pid in [*family(os.getpid()), *others()]), waiting_requests(), sep="\n", flush=True)
        raise
    finally:
        for _, log, reader in started:
            if reader.poll() is None:
                reader.kill()
            reader.wait()
            log.close()


@contextmanager
def readers(mounted: Mount, truth: Path, work: Path, seed: int, *, passthrough: bool) -> Iterator[Callable[[], None]]:
    """Every kind of reader at once; yields a check that none has failed, and sees them end well.

    ``passthrough``: m1 is resident and nobody has it open, so wait until a map of it is in passthrough.
    """
    stop = work / "stop"
    warm_models, cold_models = ["m0/weights.bin"], [f"m{number}/weights.bin" for number in range(3, 8)]
    roles: list[tuple[str, list[str]]] = [
        ("read", warm_models),
        ("read", cold_models),
        ("maps", ["m1/weights.bin"]),  # in passthrough, until the end
        ("maps", ["m2/weights.bin", "m1/weights.bin"]),
        ("find", []),
        ("list", []),
        ("churn", [*warm_models, *cold_models]),
    ]
    commands = [
        (role, [str(PROGRAM), role, str(mounted.path), str(truth), str(stop), str(seed + number), *models])
        for number, (role, models) in enumerate(roles)
    ]
    with running(commands, work, stop, END_S) as all_well:
        if passthrough and mounted.status()["kernel"]["passthrough"]:
            # Else a daemon killed before that has no verified model to offer.
            eventually(lambda: counters(mounted.channel_pid)["passthrough_inodes"] > 0, "a map is in passthrough")
        yield all_well
