"""The memory budget under a real cgroup: defaults fit into it, and a configuration that does not is told."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import ENVIRONMENT, Mount, Serve, tierfs
from tierfs.config.mounts import mounts

MIB = 1 << 20
LIMIT_BYTES = 512 * MIB
MakeServe = Callable[..., Serve]


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup of half a gigabyte; its cgroup.procs takes processes. Version 2 where memory is there, else 1."""
    made = _make()
    if made is None:
        pytest.skip("no cgroup with a limit of memory can be made here: needs root and a writable hierarchy")
    yield made
    for pid in (made / "cgroup.procs").read_text().split():
        (made.parent / "cgroup.procs").write_text(pid)
    made.rmdir()


def _make() -> Path | None:
    for entry in mounts():
        place = Path(entry.mountpoint) / f"tierfs-test-{uuid.uuid4().hex[:8]}"
        second = entry.file_system == "cgroup2"
        if not second and not (entry.file_system == "cgroup" and "memory" in entry.options):
            continue
        try:
            place.mkdir()
            limit = place / ("memory.max" if second else "memory.limit_in_bytes")
            if limit.exists():
                limit.write_text(str(LIMIT_BYTES))
                return place
            place.rmdir()
        except OSError:
            continue
    return None


def within(cgroup: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command of tierfs, and what it starts, in that cgroup."""
    line = [sys.executable, "-m", "tierfs.cli.main", *map(str, arguments)]
    return subprocess.run(
        ["sh", "-c", f'echo $$ > "{cgroup}/cgroup.procs" && exec "$@"', "sh", *line],
        capture_output=True, text=True, timeout=90, env=ENVIRONMENT,
    )  # fmt: skip


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs that promises far more than the cgroup has."""
    place = tmp_path / "hot"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", place], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def mounted_within(
    cgroup: Path, tmp_path: Path, serve: MakeServe, hot: str
) -> tuple[Mount, dict[str, Any], dict[str, Any]]:
    """A mount whose daemon lives in the cgroup, its status, and what the doctor says of memory."""
    models = tmp_path / "models"
    models.mkdir()
    (models / "m.bin").write_bytes(os.urandom(MIB))
    work = tmp_path / "work"
    work.mkdir()
    mount = Mount(serve(models).url, work, hot=hot)
    done = within(cgroup, "mount", mount.config, mount.path)
    assert done.returncode == 0, done.stderr
    status = mount.status()
    mount.pid = int(status["daemon"]["pid"])
    document = json.loads(tierfs("doctor", mount.config, "--json", check=False, timeout_s=90).stdout)
    (budget,) = [one for one in document["findings"] if one["name"] == "memory.budget"]
    return mount, status, budget


@pytest.mark.fuse
def test_computed_sizes_fit_into_the_cgroup_and_not_only_into_the_machine(
    cgroup: Path, tmpfs: Path, tmp_path: Path, serve: MakeServe
) -> None:
    mount, status, budget = mounted_within(cgroup, tmp_path, serve, f'path = "{tmpfs}/tier"')
    try:
        assert status["memory"]["limit_bytes"] == LIMIT_BYTES // 4
        assert 0 < status["tiers"]["hot"]["capacity_bytes"] <= (LIMIT_BYTES - LIMIT_BYTES // 4) * 0.9
        assert status["memory"]["notes"] == []
        assert budget["level"] == "ok", "of the daemon's cgroup, though the doctor is not in it"
        assert (mount.path / "m.bin").stat().st_size == MIB
    finally:
        mount.cleanup()


@pytest.mark.fuse
def test_a_configuration_larger_than_the_cgroup_is_told_in_status_and_by_the_doctor(
    cgroup: Path, tmpfs: Path, tmp_path: Path, serve: MakeServe
) -> None:
    mount, status, budget = mounted_within(cgroup, tmp_path, serve, f'path = "{tmpfs}/tier"\ncapacity = "1GiB"')
    try:
        (note,) = status["memory"]["notes"]
        assert "1GiB" in note and "has 512MiB" in note and cgroup.name in note and "hot.capacity" in note
        assert note in tierfs("status", mount.path).stdout
        assert budget["level"] == "problem" and cgroup.name in budget["what"]
        logs = "".join(path.read_text() for path in (mount.work / "state").rglob("*.log"))
        assert logs.count("memory_overcommitted") == 1
    finally:
        mount.cleanup()
