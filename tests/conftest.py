"""What every test shares: tests that need a device say so by a marker, and are skipped with a reason without it."""

import os
import shutil

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _no_fuse()
    in_vm = "TIERFS_TEST_VM" in os.environ
    for item in items:
        if not in_vm and item.get_closest_marker("vm"):
            item.add_marker(pytest.mark.skip(reason="runs inside the test VM (tests/vm/run.sh)"))
        if reason and item.get_closest_marker("fuse"):
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_fuse() -> str | None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse cannot be opened"
    if shutil.which("fusermount3") is None:
        return "fusermount3 is not installed"
    if os.geteuid() != 0:
        return "tests over mounts drop caches and read other users' files: run them as root"
    return None
