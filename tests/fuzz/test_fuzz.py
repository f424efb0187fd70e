"""Every target of targets.py: its corpus as it is, then some seconds under atheris; minutes with --long.

To go on with what was found: ``.venv/bin/python -m tests.fuzz.main TARGET FILE``.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import OF_UNIT_TESTS, TARGETS, corpus

ROOT = Path(__file__).parents[2]

needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris is not installed (pip install atheris; it has wheels for some versions of Python only)",
)


def fuzz(name: str, seconds: int, work: Path) -> None:
    seeds = work / "seeds"
    seeds.mkdir()
    for number, seed in enumerate(corpus(name)):
        (seeds / str(number)).write_bytes(seed)
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.main", name, f"-max_total_time={seconds}", "-timeout=10", "-max_len=8192",
         "-rss_limit_mb=2048", "-print_final_stats=1", f"-artifact_prefix={work}/", str(seeds)],
        cwd=ROOT, capture_output=True, text=True, timeout=seconds + 60, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    found = [path.read_bytes().hex() for path in work.iterdir() if path.is_file()]
    assert done.returncode == 0, f"{said[-4000:]}\nthe input: {found}"
    assert "stat::number_of_executed_units" in said, said[-2000:]


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_is_refused_or_sound(name: str) -> None:
    for seed in corpus(name):
        TARGETS[name](seed)


@needs_atheris
@pytest.mark.parametrize("name", [name for name in TARGETS if name not in OF_UNIT_TESTS])
def test_no_bytes_are_trouble(name: str, tmp_path: Path) -> None:
    fuzz(name, 2, tmp_path)


@needs_atheris
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TARGETS)
def test_no_bytes_are_trouble_for_longer(name: str, tmp_path: Path) -> None:
    fuzz(name, 60, tmp_path)
