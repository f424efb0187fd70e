"""In the VM: a mount with hot on persistent memory and warm on an NVMe disk, over a server on localhost."""

import mmap
from pathlib import Path
from typing import BinaryIO

import pytest
import xxhash

from tests.vm.guest import BLOCK_BYTES, NVME, Mounted, Server, drop_caches, eventually, resident_kib, write_model

pytestmark = pytest.mark.vm

SIZE_BYTES = 5 * BLOCK_BYTES + 12_345


def open_in_passthrough(mounted: Mounted, path: Path) -> BinaryIO:
    """Open it until the kernel has it in passthrough: a handle that is not yet released holds it back."""
    opened: list[BinaryIO] = []

    def passed() -> bool:
        before = mounted.status()["channel"]["passthrough_opens"]
        file = path.open("rb")
        if mounted.status()["channel"]["passthrough_opens"] > before:
            opened.append(file)
        else:
            file.close()
        return bool(opened)

    eventually(passed, "the file is opened in passthrough")
    return opened[0]


def digest_of_map(file: BinaryIO, path: Path) -> tuple[bytes, int]:
    """Hash a whole shared map of a file; its digest, and how many KiB of it were resident right afterwards."""
    with mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as view:
        return xxhash.xxh3_128_digest(view), resident_kib(path)


def test_a_map_of_a_hot_model_is_persistent_memory_itself(tmp_path: Path) -> None:
    source = tmp_path / "source"
    content = write_model(source / "m" / "weights.bin", SIZE_BYTES, seed=1)
    expected = xxhash.xxh3_128_digest(content)
    with Server(source, tmp_path / "served") as server, Mounted(server.url, tmp_path, "tiers", hot="") as mounted:
        place = mounted.path / "m" / "weights.bin"
        assert place.read_bytes() == content  # cold

        mounted.ask("warm", paths=["m"], tier="hot")
        where = mounted.ask("where", paths=["m"])
        assert where["tiers"]["hot"] == SIZE_BYTES, where
        status = mounted.status()
        assert status["tiers"]["hot"]["kind"] == "dax"
        if not status["kernel"]["passthrough"]:
            pytest.skip(f"no passthrough: {status['kernel']['passthrough_reason']}")

        drop_caches()
        reads = status["requests"]["reads"]
        with open_in_passthrough(mounted, place) as file:
            assert file.read() == content
            assert digest_of_map(file, place) == (expected, 0)
        assert mounted.status()["requests"]["reads"] == reads, "reads of a passthrough handle came to the daemon"

        # The same map of an ordinary disk's file is in the page cache: the 0 above says something.
        ordinary = NVME / "ordinary"
        ordinary.write_bytes(content)
        with ordinary.open("rb") as file:
            found, resident = digest_of_map(file, ordinary)
        assert found == expected
        assert resident * 1024 >= SIZE_BYTES
