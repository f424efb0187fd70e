"""SECURITY.md says the limits that are in force, and names tests that are there."""

import re
from pathlib import Path

from tierfs.app.serve import ServerLimits
from tierfs.blocks.units import format_bytes
from tierfs.catalog import schema
from tierfs.fs.inodes import EXCEPTIONS_LIMIT
from tierfs.tiers.local import _OBJECT_BLOCKS_MAX
from tierfs.wire import framing, messages

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()


def size(count: int) -> str:
    """4MiB as the page writes it."""
    return re.sub(r"(\d)([KMGT]?i?B)$", r"\1 \2", format_bytes(count))


def test_the_limits_are_those_in_force() -> None:
    limits = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", TEXT, flags=re.MULTILINE))
    assert limits["entries of a catalog"] == f"{schema.ENTRIES_LIMIT:,}"
    assert limits["an encoded catalog"].startswith(f"1 GiB, in parts of {size(messages.CATALOG_PART_LIMIT_BYTES)};")
    assert limits["all paths of a catalog together"] == size(schema.PATHS_LIMIT_BYTES)
    assert limits["size of a file"] == f"below {size(schema.SIZE_LIMIT_BYTES)}"
    assert limits["names that meet on one inode number"] == f"{EXCEPTIONS_LIMIT:,}"
    assert limits["blocks of a file that a local tier keeps"] == f"{_OBJECT_BLOCKS_MAX:,}"
    assert size(messages.CONTENTS_LIMIT_BYTES) in limits["content ids"]
    assert (
        limits["body and data of one frame"] == f"{size(framing.BODY_LIMIT_BYTES)} and {size(framing.DATA_LIMIT_BYTES)}"
    )
    assert limits["words of an error"] == f"{messages.REASON_LIMIT_CHARACTERS:,} characters"
    assert f"more than {ServerLimits().newcomer_s:g} s old" in TEXT


def test_every_test_it_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+\.py)`", TEXT))
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert named and named <= there, named - there
