"""The jobs of test_two_guests.py: one guest serves a model, the other loads it while the first one is killed.

    guest 2: python -m tests.vm.two_guests serve                 until it is killed
    guest 1: python -m tests.vm.two_guests load FILE...          one after the other; /share/report.json at the end

The loading guest says by files in its share how far it is: ``mounted``, then ``FILE.begun`` after its first blocks.
The serving one sends slowly, so that READs are under way nearly all the time, and so when it is killed. The loading
guest is the one that listens on the wire, as QEMU's listening end takes a new guest on the other end.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import xxhash

from tests.vm.guest import BLOCK_BYTES, NVME, SHARE, Mounted, Server, eventually, write_model, write_token

LOADING, SERVING = "10.78.0.1", "10.78.0.2"
BLOCKS = 16
FILES = ("first", "second")
TIMEOUT_S = 150
LOOKED_AT_BLOCKS, BEGUN_BLOCKS = 2, 6  # not at once: while the status is asked for, nothing is read
RATE = "50mbit"


def serve() -> None:
    """Export the models: on the disk, so that they are the very same files after another boot."""
    directory = Path(tempfile.mkdtemp())
    exported = NVME / "exported"
    if not exported.exists():
        for seed, name in enumerate(FILES):
            write_model(exported / f"{name}.bin", BLOCKS * BLOCK_BYTES, seed=seed)
        os.sync()
    device = subprocess.check_output(["ip", "-br", "address", "show", "to", SERVING], text=True).split()[0]
    slow = ["tbf", "rate", RATE, "burst", "64kb", "latency", "2s"]
    subprocess.run(["tc", "qdisc", "add", "dev", device, "root", *slow], check=True)
    with Server(exported, directory / "state", SERVING):
        time.sleep(3600)


def load(names: list[str]) -> None:
    """Read each file from its beginning to its end, or to its error."""
    directory = Path(tempfile.mkdtemp())
    url = f"tierfs://{SERVING}:7411/"
    source = f'token_file = "{write_token(directory)}"\n[readahead]\nwindow_min = "4MiB"\nwindow_max = "8MiB"'
    report: dict[str, Any] = {}
    with Mounted(url, directory, "two", source=source, warm=None, timeout=f"{TIMEOUT_S}s") as mounted:
        eventually(lambda: mounted.status()["source"]["device"] != "", "blocks come by RDMA")
        (SHARE / "mounted").touch()
        for name in names:
            report[name] = read(mounted, name)
            report[name]["source"] = mounted.status()["source"]
        report["names"] = sorted(path.name for path in mounted.path.iterdir())
        report["log"] = mounted.log()
    (SHARE / "report.part").write_text(json.dumps(report, indent=1))
    (SHARE / "report.part").rename(SHARE / "report.json")


def read(mounted: Mounted, name: str) -> dict[str, Any]:
    """What came of it, and when."""
    digest, size_bytes, error = xxhash.xxh3_128(), 0, ""
    begun_s = time.monotonic()
    slowest_s = 0.0
    with (mounted.path / f"{name}.bin").open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        try:
            while True:
                asked_s = time.monotonic()
                piece = file.read(1 << 20)
                slowest_s = max(slowest_s, time.monotonic() - asked_s)
                if not piece:
                    break
                digest.update(piece)
                size_bytes += len(piece)
                if size_bytes == LOOKED_AT_BLOCKS * BLOCK_BYTES:
                    (SHARE / f"{name}.source.json").write_text(json.dumps(mounted.status()["source"]))
                if size_bytes == BEGUN_BLOCKS * BLOCK_BYTES:
                    (SHARE / f"{name}.begun").touch()
        except OSError as failure:
            error = os.strerror(failure.errno or 0)
            slowest_s = time.monotonic() - asked_s
    return {
        "bytes": size_bytes,
        "digest": digest.hexdigest(),
        "error": error,
        "slowest_read_s": round(slowest_s, 1),
        "seconds": round(time.monotonic() - begun_s, 1),
    }


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        load(sys.argv[2:])
