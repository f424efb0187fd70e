"""The channel's C parts: unit tests and a short fuzz run, built with the address and undefined-behaviour sanitizers."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "mount-helpers" / "channel"
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{SOURCES}"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


def build(target: Path, *sources: Path) -> Path:
    subprocess.run(["gcc", *FLAGS, *SANITIZERS, *map(str, sources), "-o", str(target)], check=True, timeout=60)
    return target


def test_the_tables_and_parsers_keep_their_rules(tmp_path: Path) -> None:
    names = ("parse.c", "requests.c", "suspects.c", "inodes.c", "epoch.c", "log.c", "replies.c", "control.c")
    parts = [SOURCES / name for name in names]
    program = build(tmp_path / "unit", HERE / "unit.c", *parts)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_mutated_messages_are_refused_without_harm(tmp_path: Path) -> None:
    program = build(tmp_path / "fuzz", HERE / "fuzz.c", SOURCES / "parse.c")
    done = subprocess.run([str(program), "3"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
