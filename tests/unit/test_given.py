"""What may stand for a mount that somebody else has made, and its name."""

import os
import tempfile
from pathlib import Path

import pytest

from tests.integration.processes import tierfs
from tierfs.app import places
from tierfs.blocks.errors import MountFailed
from tierfs.config.load import load_mount_config
from tierfs.control import registry
from tierfs.fuse import given


@pytest.mark.parametrize(
    ("text", "descriptor"),
    [
        ("/dev/fd/3", 3),
        ("/dev/fd/0", 0),
        ("/dev/fd/03", None),
        ("/dev/fd/", None),
        ("/dev/fd/3/x", None),
        ("/dev/fd/-1", None),
        ("/models", None),
        ("dev/fd/3", None),
    ],
)
def test_the_form_of_a_descriptor(text: str, descriptor: int | None) -> None:
    assert given.descriptor_of(text) == descriptor


def test_what_is_no_mounted_dev_fuse_is_refused() -> None:
    with tempfile.TemporaryFile() as file:
        descriptor = file.fileno()
        with pytest.raises(MountFailed, match="is not an opened /dev/fuse"):
            given.check(descriptor)
    with pytest.raises(MountFailed, match="standard stream"):
        given.check(0)
    with pytest.raises(MountFailed, match="is not open here"):
        given.check(descriptor)
    if os.access("/dev/fuse", os.R_OK | os.W_OK):
        descriptor = os.open("/dev/fuse", os.O_RDWR)
        try:
            with pytest.raises(MountFailed, match="nothing is mounted with"):
                given.check(descriptor)
        finally:
            os.close(descriptor)


def test_a_name_belongs_to_one_mount_and_is_free_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.ENVIRONMENT, str(tmp_path / "run"))
    monkeypatch.setattr(places, "ENDING_S", -2.0)  # how long one that ends is waited for
    file = tmp_path / "mount.toml"
    file.write_text(f'[source]\nurl = "dir:{tmp_path}"\n')
    config = load_mount_config(file, {})
    start = registry.process_start(os.getpid())
    record = registry.Record("/models", os.getpid(), start, str(registry.socket_path("/models")), str(file), given=True)
    registry.write(record)
    with pytest.raises(MountFailed, match="another --name"):
        places.clear_the_way(config, "/models", given=True)
    places.clear_the_way(config, "/dev/fd/3", given=True)
    registry.write(registry.Record("/models", os.getpid(), start + 1, record.socket, str(file), given=True))
    places.clear_the_way(config, "/models", given=True)
    assert registry.records() == []


def test_only_a_descriptor_has_another_name(tmp_path: Path) -> None:
    done = tierfs("mount", tmp_path / "none.toml", tmp_path, "--name", "/models", check=False)
    assert done.returncode == 1 and "its own name" in done.stderr
