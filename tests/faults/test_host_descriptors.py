"""A daemon that may have 1,024 descriptors, as a hard limit, and more objects and open files than that."""

import os
import random
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.processes import Mount, Serve, descriptors, drop_caches, tierfs

pytestmark = [pytest.mark.fuse, pytest.mark.slow]

FILES = 1500
LIMIT = 1024


@pytest.mark.parametrize("mode", ["channel", "direct"])
def test_more_objects_than_descriptors(
    tmp_path: Path, serve: Callable[..., Serve], mount: Callable[..., Mount], mode: str
) -> None:
    root = tmp_path / "models"
    rng = random.Random(3)
    for number in range(FILES):
        (root / f"d{number % 10}").mkdir(parents=True, exist_ok=True)
        (root / f"d{number % 10}" / f"f{number}").write_bytes(rng.randbytes(1 + number * 7))
    server = serve(root)
    mounted = mount(
        server.url,
        warm=f'path = "{tmp_path}/warm"\ncapacity = "1GiB"',
        mode=mode,
        descriptor_limit=LIMIT,  # a hard one, so that the daemon cannot raise it
    )
    assert resource.prlimit(mounted.pid, resource.RLIMIT_NOFILE) == (LIMIT, LIMIT)
    held = []
    try:
        for again in range(2):
            for path in sorted(root.rglob("f*")):
                file = (mounted.path / path.relative_to(root)).open("rb", buffering=0)
                held.append(file)
                assert file.read() == path.read_bytes(), path
            if again == 0:
                tierfs("warm", mounted.path)
                drop_caches()
        assert len(held) == 2 * FILES
        assert len(descriptors(mounted.pid)) < LIMIT
    finally:
        for file in held:
            file.close()
    log = mounted.log()
    assert "_by_bug" not in log and "Too many open files" not in log
    assert len(os.listdir(mounted.path)) == 10
