"""A job for the VM: how fast blocks come by RDMA and by TCP, beside ib_read_bw in the same guest, and at what cost.

    bash tests/vm/run.sh --run .venv/bin/python -m tests.vm.rdma_bench

Writes /share/rdma-bench.json and prints it. "source" is the remote source alone, each block compared with its digest;
"mount" is a sequential read through a mount without local tiers. The guest has one emulated processor for both ends:
rates say nothing about a real network, only how they compare; cpu_s is all of the guest that was not idle.
"""

import json
import mmap
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import trio

from tests.vm.guest import BLOCK_BYTES, RDMA_HOST, SHARE, Mounted, Server, drop_caches, eventually, write_model
from tierfs.blocks.ids import VersionId, digest_block
from tierfs.blocks.spans import whole_block
from tierfs.tiers.remote import RemoteSource
from tierfs.tiers.remote_rdma import RdmaReader
from tierfs.transport.rdma.loading import load_pyverbs
from tierfs.transport.rdma.pyverbs_device import PyVerbs

MODEL_BYTES = 16 * BLOCK_BYTES
ROUNDS = 4
AT_ONCE = 8


def main() -> None:
    """Measure, in turn, so that a busy host is equally unfair to all."""
    load_pyverbs()  # takes seconds here
    directory = Path(tempfile.mkdtemp())
    exported = directory / "exported"
    content = write_model(exported / "weights.bin", MODEL_BYTES, seed=21)
    report: dict[str, list[dict[str, float]]] = {}
    with Server(exported, directory / "served", RDMA_HOST) as server:
        token = (directory / "token").read_bytes().strip()
        for _ in range(ROUNDS):
            report.setdefault("ib_read_bw 1MiB", []).append(perftest(1 << 20))
            report.setdefault("ib_read_bw 4MiB", []).append(perftest(4 << 20))
            for transport in ("rdma", "tcp"):
                measured = trio.run(fetch, server.url, token, transport)
                report.setdefault(f"source {transport}", []).append(measured)
        for transport in ("rdma", "tcp"):
            place = directory / transport
            place.mkdir()
            source = f'{server.source}\ntransport = "{transport}"'
            with Mounted(server.url, place, f"bench-{transport}", source=source, warm=None) as mounted:
                if transport == "rdma":
                    eventually(lambda mounted=mounted: mounted.status()["source"]["device"] != "", "RDMA is up")
                drop_caches()
                before, begun_s = busy_s(), time.monotonic()
                right = (mounted.path / "weights.bin").read_bytes() == content
                seconds = time.monotonic() - begun_s
                assert right, transport
                report[f"mount {transport}"] = [rate(MODEL_BYTES, seconds, busy_s() - before)]
    text = json.dumps(report, indent=1)
    (SHARE / "rdma-bench.json").write_text(text)
    print(text)


def perftest(message_bytes: int, *options: str) -> dict[str, float]:
    """ib_read_bw between two processes of the guest."""
    program = shutil.which("ib_read_bw")
    assert program is not None, "perftest is not installed"
    times = max(5, (48 << 20) // message_bytes)
    command = [
        program,
        "-d",
        "rxe0",
        "-x",
        "1",
        "-F",
        "-s",
        str(message_bytes),
        "-n",
        str(times),
        "-m",
        "4096",
        *options,
    ]
    before, begun_s = busy_s(), time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as listening:
        time.sleep(1.0)
        done = subprocess.run([*command, RDMA_HOST], capture_output=True, text=True, timeout=120)
        listening.wait(30)
    found = re.search(rf"^\s*{message_bytes}\s+\d+\s+\S+\s+(\S+)", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return {"mb_per_s": round(float(found[1]) * 1.048576, 1), "cpu_s": round(busy_s() - before, 2),
            "seconds": round(time.monotonic() - begun_s, 2)}  # fmt: skip


async def fetch(url: str, token: bytes, transport: str) -> dict[str, float]:
    """The whole model through a remote source, some blocks at once."""
    memory = memoryview(mmap.mmap(-1, AT_ONCE * BLOCK_BYTES))
    reader = RdmaReader(PyVerbs, source=url, timeout_s=10) if transport == "rdma" else None
    source = RemoteSource(url, token=token, rdma=reader, rdma_only=reader is not None)
    async with trio.open_nursery() as nursery:
        await nursery.start(source.run)
        publication = await source.publication()
        await source.use_memory(memory, block_bytes=BLOCK_BYTES, key="memory.limit")
        while reader is not None and not reader.ports:  # noqa: ASYNC110 - nothing to wait for but a state
            await trio.sleep(0.05)
        entry = next(entry for entry in publication.catalog.entries if entry.version)
        blocks = iter(range(MODEL_BYTES // BLOCK_BYTES))

        async def work(slot: int) -> None:
            buffer = memory[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES]
            for block in blocks:
                span = whole_block(MODEL_BYTES, BLOCK_BYTES, block)
                claimed = await source.read_into(VersionId(entry.version), span, buffer)
                assert claimed == digest_block(buffer)

        before, begun_s = busy_s(), time.monotonic()
        async with trio.open_nursery() as workers:
            for slot in range(AT_ONCE):
                workers.start_soon(work, slot)
        seconds = time.monotonic() - begun_s
        nursery.cancel_scope.cancel()
    return rate(MODEL_BYTES, seconds, busy_s() - before)


def rate(size_bytes: int, seconds: float, cpu_s: float) -> dict[str, float]:
    """As it is reported."""
    return {
        "mb_per_s": round(size_bytes / seconds / 1e6, 1),
        "cpu_s": round(cpu_s, 2),
        "cpu_ns_per_byte": round(cpu_s / size_bytes * 1e9, 1),
        "seconds": round(seconds, 2),
    }


def busy_s() -> float:
    """Processor time of the whole guest so far, interrupts included, idle and waiting not."""
    times = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(times) - times[3] - times[4]) / 100


if __name__ == "__main__":
    main()
