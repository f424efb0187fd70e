"""In the VM: the devices are real ones, and mounted as the tiers want them."""

import ctypes
import mmap
import os
import subprocess
from pathlib import Path

import pytest

from tests.vm.guest import NVME, PMEM

pytestmark = pytest.mark.vm

MAP_SHARED_VALIDATE, MAP_SYNC = 0x03, 0x80000
PROT_READ_WRITE = 0x3
SIZE_BYTES = 4 << 20


def mount_of(path: Path) -> tuple[str, str, str]:
    """Device, file system and options of what is mounted there."""
    for line in Path("/proc/mounts").read_text().splitlines():
        device, place, kind, options, *_ = line.split()
        if place == str(path):
            return device, kind, options
    raise AssertionError(f"nothing is mounted at {path}")


def synchronous_map(path: Path) -> tuple[int, int]:
    """Map a new file MAP_SYNC; its address, or 0, and errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    with path.open("wb+") as file:
        file.truncate(SIZE_BYTES)
        flags = MAP_SHARED_VALIDATE | MAP_SYNC
        address = libc.mmap(None, SIZE_BYTES, PROT_READ_WRITE, flags, file.fileno(), 0)
    return (0, ctypes.get_errno()) if address == ctypes.c_void_p(-1).value else (int(address), 0)


def test_the_nvdimm_has_a_dax_file_system() -> None:
    device, kind, options = mount_of(PMEM)
    assert (device, kind) == ("/dev/pmem0", "ext4")
    assert "dax=always" in options.split(",")
    assert os.statvfs(PMEM).f_bsize == 4096


def test_its_files_can_be_mapped_synchronously_and_those_of_memory_cannot(tmp_path: Path) -> None:
    address, error = synchronous_map(PMEM / "synchronous")
    assert address, os.strerror(error)
    ctypes.memset(address, 0x5A, SIZE_BYTES)
    assert (PMEM / "synchronous").read_bytes() == b"\x5a" * SIZE_BYTES
    (PMEM / "synchronous").unlink()
    assert synchronous_map(Path("/dev/shm/synchronous"))[0] == 0
    Path("/dev/shm/synchronous").unlink()


def test_the_nvme_disk_has_a_file_system_that_takes_direct_writes() -> None:
    device, kind, _ = mount_of(NVME)
    assert (device, kind) == ("/dev/nvme0n1", "ext4")
    assert Path("/sys/block/nvme0n1/device/model").exists()
    with mmap.mmap(-1, SIZE_BYTES) as buffer:
        buffer.write(b"tierfs!!" * (SIZE_BYTES // 8))
        descriptor = os.open(NVME / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            assert os.pwritev(descriptor, [buffer], 0) == SIZE_BYTES
        finally:
            os.close(descriptor)
    assert (NVME / "direct").read_bytes() == b"tierfs!!" * (SIZE_BYTES // 8)
    (NVME / "direct").unlink()


def test_soft_roce_is_up_and_has_an_address() -> None:
    port = Path("/sys/class/infiniband/rxe0/ports/1")
    assert "ACTIVE" in (port / "state").read_text()
    gids = [path.read_text().strip() for path in sorted((port / "gids").iterdir())]
    assert "0000:0000:0000:0000:0000:ffff:0a4d:0001" in gids  # 10.77.0.1


def test_pyverbs_of_the_distribution_opens_it() -> None:
    program = "import pyverbs.device as d; c = d.Context(name='rxe0'); print(c.query_port(1).state, c.query_gid(1, 1))"
    python = "/usr/bin/python3"  # Debian's package is for Debian's Python
    if subprocess.run([python, "-c", "import pyverbs"], capture_output=True).returncode != 0:
        pytest.skip("python3-pyverbs is not installed for /usr/bin/python3")
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "4", done.stdout  # IBV_PORT_ACTIVE
