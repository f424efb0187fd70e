"""Channel mode with something broken on purpose: a daemon that errs, requests that kill it, media that fail.

The daemon is the real one, with one function of it changed by a `sitecustomize` on its path.
"""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.processes import ENVIRONMENT, ROOT, Serve
from tests.integration.test_channel import MakeMount, channel_mount, channel_status, digest
from tests.integration.test_channel import every_build as every_build
from tests.integration.test_channel import models as models
from tests.integration.test_channel import plain as plain
from tests.integration.test_channel import programs as programs

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed"),
]

CHANGED_LOCATE = """
from tierfs.fs.file_view import FileView
locate = FileView.locate
async def changed(self, offset_bytes, length_bytes):
    {0}
    return await locate(self, offset_bytes, length_bytes)
FileView.locate = changed
"""


@pytest.fixture
def change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """change(lines): daemons mounted from now on run them before every read that is not passthrough."""

    def make(lines: str) -> None:
        folder = tmp_path / "change"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(CHANGED_LOCATE.format(lines.replace("\n", "\n    ")))
        monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", f"{folder}:{ROOT}")

    return make


def error_of_read(path: Path) -> int | None:
    try:
        path.read_bytes()
    except OSError as error:
        return error.errno
    return None


def test_a_reply_that_names_less_than_there_is_becomes_an_error_and_no_zeros(
    plain: None,
    models: Path,
    tmp_path: Path,
    mount: MakeMount,
    serve: Callable[..., Serve],
    change: Callable[[str], None],
) -> None:
    change("if self.facts.path == b'm1/weights.bin':\n    length_bytes //= 2")
    mounted = channel_mount(mount, serve, models, tmp_path)
    with (mounted.path / "m1" / "weights.bin").open("rb", buffering=0) as file:
        with pytest.raises(OSError) as failed:
            os.pread(file.fileno(), 1 << 20, 0)
        assert failed.value.errno == errno.EIO
    assert channel_status(mounted)["bad_messages"] > 0
    assert digest(mounted.path / "m2" / "weights.bin") == digest(models / "m2" / "weights.bin")
