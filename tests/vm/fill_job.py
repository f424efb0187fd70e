"""A job for power cuts (power_cuts.py): fill and evict a warm tier on the NVMe disk, and check what a cut left of it.

The source is /share/source, which the host made: its inodes and times, and so its versions, are those of the boot
before. The tier is smaller than the source, so that models come and go. Two checks: before the mount, every block that
the index calls resident has the bytes of its digest (data durable first, then the row), and after it every file reads
as its source, and no block had to be dropped.
"""

import itertools
import json
import os
import random
import shutil
import sqlite3
from pathlib import Path

import xxhash

from tests.vm.guest import SHARE, Mounted

SOURCE = SHARE / "source"
CAPACITY = "6MiB"
BLOCK_SIZE = "128KiB"  # small, so that an emulated processor gets through many of them


def main() -> None:
    """Check, then work until the power is cut; in the last boot only check."""
    number, last = int(os.environ["TIERFS_VM_BOOT"]), os.environ["TIERFS_VM_LAST"] == "1"
    work = Path("/tmp/fill")
    work.mkdir()
    tables = {"warm": f'capacity = "{CAPACITY}"', "source": f'block_size = "{BLOCK_SIZE}"'}
    mounted = Mounted(f"dir:{SOURCE}", work, "fill", **tables)
    found = resident_blocks(mounted.warm, work) if number else 0
    print(f"boot {number}: {found} blocks resident and right", flush=True)
    with mounted:
        unfinished = object_files(mounted.warm) - set(rows(mounted.warm, work))
        assert not unfinished, f"the mount left objects without rows: {unfinished}"
        models = sorted(path.name for path in SOURCE.iterdir())
        for model in models:
            compare(mounted, model)
        corrupt = mounted.status()["tiers"]["warm"]["corrupt_blocks"]
        assert corrupt == 0, f"{corrupt} blocks were resident and wrong"
        report = {"resident_blocks": found, "rounds": 0, "written_blocks": 0, "evicted_blocks": 0}
        (SHARE / f"boot{number}.json").write_text(json.dumps(report))
        if last:
            return
        (SHARE / "begun").touch()
        choice = random.Random(number)
        for rounds in itertools.count(1):
            model = choice.choice(models)
            mounted.ask("warm", paths=[model])
            compare(mounted, model)
            tier = mounted.status()["tiers"]["warm"]
            counts = {name: tier[name] for name in ("written_blocks", "evicted_blocks")}
            (SHARE / f"boot{number}.json").write_text(json.dumps({**report, "rounds": rounds, **counts}))


def compare(mounted: Mounted, model: str) -> None:
    """Every file of a model reads as its source."""
    for source in (SOURCE / model).iterdir():
        with (mounted.path / model / source.name).open("rb") as file:
            found = file.read()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert found == source.read_bytes(), f"{model}/{source.name} has wrong bytes"


def resident_blocks(tier: Path, work: Path) -> int:
    """Check every block that the index has, before any daemon heals something; how many there are."""
    count = 0
    for name, (block_bytes, blocks) in rows(tier, work).items():
        with (tier / "objects" / name[:2] / name).open("rb") as file:
            for block, digest in blocks:
                file.seek(block * block_bytes)
                found = xxhash.xxh3_128_digest(file.read(block_bytes))
                assert found == digest, f"block {block} of {name} is resident, and wrong on the disk"
                count += 1
    return count


def rows(tier: Path, work: Path) -> dict[str, tuple[int, list[tuple[int, bytes]]]]:
    """What the index has: block size and blocks by the object's name. Read from a copy: opening it recovers it."""
    copy = work / "residency"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for path in tier.glob("residency.db*"):
        shutil.copy(path, copy)
    assert not list(tier.glob("*.corrupt*")), "an index was damaged"
    found: dict[str, tuple[int, list[tuple[int, bytes]]]] = {}
    with sqlite3.connect(copy / "residency.db") as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        for number, name, block_bytes in db.execute("SELECT id, name, block_bytes FROM objects").fetchall():
            blocks = db.execute("SELECT block, digest FROM blocks WHERE object = ?", (number,)).fetchall()
            found[name.hex()] = (block_bytes, blocks)
    db.close()
    return found


def object_files(tier: Path) -> set[str]:
    """The names of the objects that are there as files."""
    return {path.name for path in (tier / "objects").glob("*/*")}


if __name__ == "__main__":
    main()
