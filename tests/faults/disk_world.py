"""A server and a mount whose warm directory is on a disk that can be hurt. What must hold is as for a hurt source."""

import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.faulty_disk import Disk
from tests.faults.source_world import SourceWorld
from tests.integration.processes import drop_caches, eventually, process_status

# Both have the same tier below them: in direct mode it is read in the long run.
MODES = ["channel", pytest.param("direct", marks=pytest.mark.long)]
_PAGE = """
import os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
sys.stdout.buffer.write(os.pread(file, 4096, int(sys.argv[2])))
"""


class DiskWorld(SourceWorld):
    """Model a is in warm, b to d are cold."""

    def __init__(self, models: Path, tmp_path: Path, serve: Any, mount: Any, **options: Any) -> None:
        self.disk = Disk(tmp_path)
        super().__init__(models, tmp_path, serve, mount, warm_directory=self.disk.path / "warm", **options)

    def close(self) -> None:
        """The mount's descriptors on the disk go first, or its daemon would be left in a read that nobody answers."""
        try:
            self.disk.suffer("stall", 0)
            self.mounted.cleanup()
        finally:
            self.disk.close()
            super().close()

    def warm(self) -> dict[str, Any]:
        """What status says of the warm tier."""
        found: dict[str, Any] = self.mounted.status()["tiers"]["warm"]
        return found

    def in_service(self, within_s: float = 15) -> None:
        """The tier comes back by itself."""
        eventually(lambda: self.warm()["state"] == "ok", "warm is in service", within_s)

    def keeps_again(self, model: str) -> None:
        """It was out of service once, and is back by itself: what is read now is kept for the next mount."""
        self.in_service()
        assert self.said("tier_device_out_of_service") == self.said("tier_device_in_service") == 1
        self.is_right(model)
        self.settled()
        self.remount()

    def is_right(self, *models: str, within_s: float = 10) -> None:
        """Each is read without an error, in time."""
        for model in models:
            drop_caches()
            outcome = self.read(model)
            assert outcome.what == "right", (model, outcome)
            assert outcome.took_s < within_s, (model, outcome)

    def fetched_by(self, *models: str) -> int:
        """Bytes that came from the source while these were read."""
        before = int(self.mounted.status()["source"]["fetched_bytes"])
        self.is_right(*models)
        return int(self.mounted.status()["source"]["fetched_bytes"]) - before

    def keeps(self, *models: str) -> None:
        """They are in warm, also after a new mount."""
        self.settled()
        self.remount()
        assert self.fetched_by(*models) == 0

    def has_beginning(self, model: str) -> None:
        """Its first block is in warm, and not all of it."""
        with (self.mounted.path / model / "model.bin").open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            assert len(file.read(4096)) == 4096
        self.settled()
        (found,) = [found for found in self.mounted.status()["models"] if found["path"] == model]
        assert 0 < found["resident_bytes"] < found["bytes"], found

    def page_is_right(self, model: str, offset_bytes: int, *, within_s: float = 20) -> None:
        """One page, which no readahead follows."""
        command = [sys.executable, "-c", _PAGE, str(self.mounted.path / model / "model.bin"), str(offset_bytes)]
        done = subprocess.run(command, capture_output=True, timeout=within_s, check=True)
        expected = (self.models / model / "model.bin").read_bytes()[offset_bytes : offset_bytes + 4096]
        assert done.stdout == expected

    def settled(self) -> None:
        """Nothing waits to be written any more."""
        eventually(lambda: not self.warm()["queued_bytes"], "written")
        time.sleep(0.1)

    def remount(self) -> None:
        """Unmount and mount: nothing is in memory any more."""
        self.settled()
        self.mounted.unmount()
        drop_caches()
        self.mounted.mount()

    def rebooted(self) -> None:
        """What is left of the tier was written under another boot, which did not end cleanly. The disk is unmounted."""
        with sqlite3.connect(self.disk.backing / "warm" / "residency.db") as database:
            assert database.execute("UPDATE meta SET value = 'another' WHERE name = 'boot'").rowcount == 1
            assert database.execute("UPDATE meta SET value = '0' WHERE name = 'clean'").rowcount == 1
        database.close()

    def threads(self) -> int:
        """Of the daemon and its channel."""
        pids = filter(None, (self.mounted.pid, self.mounted.channel_pid))
        return sum(process_status(pid)["Threads"] for pid in pids)
