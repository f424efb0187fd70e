"""Loads every model of a directory through a mount of it, by real clients, and compares with the local files.

    python examples/load_models.py --local DIRECTORY [--mount MOUNTPOINT --tierfs COMMAND --log FILE]

Each model is loaded three times, each time in a fresh process and with the page cache emptied before: from the local
directory; through the mount, cold (the caller has mounted with an empty warm tier); and, when all are warm, through the
mount again. After the cold and after the warm pass every file is compared byte by byte. Without --mount only the local
loads are done. Ends non-zero when anything differs or fails.
"""

import argparse
import filecmp
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESIDENT_WAIT_S = 120
LOAD_TIMEOUT_S = 900


@dataclass
class Model:
    """A directory with weights of one kind, relative to the root, and what came out of its loads."""

    path: Path
    client: str
    size_bytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def find_models(root: Path) -> list[Model]:
    """Every directory that holds weights, with the client for them."""
    clients = {".safetensors": "safetensors", ".gguf": "llama.cpp + gguf", ".onnx": "onnxruntime"}
    models: dict[tuple[Path, str], Model] = {}
    for path in sorted(root.rglob("*")):
        client = clients.get(path.suffix)
        if client and path.is_file():
            key = (path.parent.relative_to(root), client)
            model = models.setdefault(key, Model(key[0], client, 0))
            model.size_bytes += path.stat().st_size
    return list(models.values())


def drop_page_cache(roots: list[Path]) -> None:
    """Make the next read a read of the medium: for root all at once, else file by file (a hint the kernel follows)."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
        return
    except OSError:
        pass  # not root, or a container
    for root in roots:
        for parent, _, names in os.walk(root):
            for name in names:
                try:
                    descriptor = os.open(Path(parent, name), os.O_RDONLY | os.O_NONBLOCK)
                except OSError:
                    continue  # a dangling symlink, or a file of the tier that was evicted meanwhile
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                except OSError:
                    pass  # a socket or a directory
                finally:
                    os.close(descriptor)


def load(model: Model, root: Path, log: Path) -> tuple[float, dict[str, str]] | str:
    """The seconds and the results of one load, or what went wrong."""
    command = [sys.executable, str(Path(__file__).with_name("clients.py")), model.client, str(root / model.path)]
    with log.open("ab") as stderr:
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, timeout=LOAD_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return f"no end after {LOAD_TIMEOUT_S} s"
    if done.returncode != 0:
        return f"{model.client} ended with status {done.returncode}; see {log}"
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["seconds"], answer["found"]


def wait_resident(tierfs: str, mountpoint: Path) -> str:
    """Wait until the daemon says that every model is resident; what it is that is not, if the wait was in vain."""
    deadline = time.monotonic() + RESIDENT_WAIT_S
    while True:
        status = subprocess.run(
            [tierfs, "status", str(mountpoint), "--json"], capture_output=True, text=True, timeout=30, check=True
        )
        models = json.loads(status.stdout)["models"]
        missing = [model["path"] for model in models if model["resident_bytes"] < model["bytes"]]
        if not missing:
            return ""
        if time.monotonic() > deadline:
            return f"not wholly in a tier before the warm pass: {', '.join(missing)}"
        time.sleep(0.2)


def compare_bytes(local: Path, mount: Path) -> list[str]:
    """What differs between the two trees; every file is read to its end, also those that no client asked for."""
    problems = []
    for parent, _, names in os.walk(local):
        for name in names:
            path = (Path(parent) / name).relative_to(local)
            try:
                if not filecmp.cmp(local / path, mount / path, shallow=False):
                    problems.append(f"{path}: has other bytes")
            except OSError as error:
                problems.append(f"{path}: cannot be compared: {error}")
    return problems


def print_table(models: list[Model], passes: list[str]) -> None:
    table = Table(title="Seconds per load, and GB/s (10⁹ bytes)")
    table.add_column("model")
    table.add_column("client")
    table.add_column("MB", justify="right")
    for name in passes:
        table.add_column(name, justify="right")
    table.add_column("equal")
    for model in models:
        # A hub cache's snapshot is called by its repository: hub/models--a--b/snapshots/<revision>
        parts = model.path.parts
        name = parts[-3] if len(parts) >= 3 and parts[-2] == "snapshots" else str(model.path)
        cells = [
            f"{model.seconds[p]:.2f} s  {model.size_bytes / model.seconds[p] / 1e9:5.2f}" if p in model.seconds else "-"
            for p in passes
        ]
        verdict = "no" if model.problems else "equal" if "cold" in passes else "-"
        table.add_row(name, model.client, f"{model.size_bytes / 1e6:.0f}", *cells, verdict)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local", type=Path, required=True)
    parser.add_argument("--mount", type=Path)
    parser.add_argument("--warm", type=Path, help="the warm tier's directory, for emptying the page cache without root")
    parser.add_argument("--tierfs", default="tierfs")
    parser.add_argument("--log", type=Path, default=Path(os.devnull))
    arguments = parser.parse_args()
    models = find_models(arguments.local)
    if not models:
        sys.exit(f"load_models: no weights in {arguments.local}")
    passes = ["local"] if arguments.mount is None else ["local", "cold", "warm"]
    cached = [root for root in (arguments.local, arguments.mount, arguments.warm) if root is not None]
    expected: dict[int, dict[str, str]] = {}
    notes: list[str] = []
    different: list[str] = []
    for name in passes:
        if name == "warm":
            notes.append(wait_resident(arguments.tierfs, arguments.mount))  # the comparison has read every file
        for number, model in enumerate(models):
            print(f"  {name}: {model.client} loads {model.path}", file=sys.stderr)
            drop_page_cache(cached)
            result = load(model, arguments.local if name == "local" else arguments.mount, arguments.log)
            if isinstance(result, str):
                model.problems.append(f"{name}: {result}")
                continue
            model.seconds[name], found = result
            if not found or found != expected.setdefault(number, found):
                model.problems.append(f"{name}: not what the local file gives")
        if name != "local":
            print(f"  {name}: comparing every byte", file=sys.stderr)
            drop_page_cache(cached)
            different += compare_bytes(arguments.local, arguments.mount)
    print_table(models, passes)
    for note in filter(None, notes):
        print(f"note: {note}")
    problems = different + [f"{model.path}: {problem}" for model in models for problem in model.problems]
    for problem in problems:
        print(f"load_models: {problem}", file=sys.stderr)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
