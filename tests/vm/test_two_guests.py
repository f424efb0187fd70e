"""On the host: two guests on one wire. The one that serves is killed in mid-load; the load goes on, or ends in time."""

import json
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from tests.vm.guest import BLOCK_BYTES
from tests.vm.kernel import find_or_build
from tests.vm.main import LIMIT_S, prepare
from tests.vm.qemu import ROOT, Ending, Guest, Machine, Wire
from tests.vm.test_on_host import directory, harness  # noqa: F401 - fixtures
from tests.vm.two_guests import BLOCKS, FILES, TIMEOUT_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(int(2 * LIMIT_S))]

PYTHON = str(ROOT / ".venv" / "bin" / "python")
AWAY_S = 10.0
LOADING_LIMIT_S = 1.5 * LIMIT_S  # four boots beside each other


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def listens(port: int) -> bool:
    """Whether somebody listens there. Trying it would take the place of the other guest."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in lines)


def wait_for(guest: Guest, condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert guest.alive, f"the guest ended before: {what}; see {guest.log}"
        assert time.monotonic() < deadline_s, f"not in time: {what}; see {guest.log}"
        time.sleep(0.1)


def content(name: str) -> bytes:
    return random.Random(FILES.index(name)).randbytes(BLOCKS * BLOCK_BYTES)


def test_a_server_that_is_killed_in_mid_load_costs_time_or_an_error_at_the_deadline(
    harness: None,  # noqa: F811 - a fixture
    directory: Path,  # noqa: F811 - a fixture
) -> None:
    kernel, port = find_or_build(), free_port()
    loading = Machine(kernel=kernel, directory=directory / "loading", memory_mib=1024, wire=Wire(1, port))
    serving = Machine(kernel=kernel, directory=directory / "serving", memory_mib=1024, wire=Wire(2, port))
    share = loading.share
    environment = prepare(loading)
    prepare(serving)
    with loading.boot([PYTHON, "-m", "tests.vm.two_guests", "load", *FILES], environment=environment) as loader:
        wait_for(loader, lambda: listens(port), "it listens on the wire")
        with serving.boot([PYTHON, "-m", "tests.vm.two_guests", "serve"], environment=environment):
            wait_for(loader, (share / "first.begun").exists, "the first load has begun")
        # Killed; and back after a while, as another boot of the same machine.
        time.sleep(AWAY_S)
        with serving.boot([PYTHON, "-m", "tests.vm.two_guests", "serve"], environment=environment):
            wait_for(loader, (share / "second.begun").exists, "the second load has begun")
        # Killed, and never back.
        outcome = loader.wait(limit_s=LOADING_LIMIT_S)
    assert (outcome.ending, outcome.status) == (Ending.FINISHED, 0), outcome.describe()
    report = json.loads((share / "report.json").read_text())
    print(json.dumps({name: report[name] for name in FILES}, indent=1))
    for name in FILES:
        source = json.loads((share / f"{name}.source.json").read_text())
        assert source["transport"] == "rdma" and source["rdma_bytes"] > 0, source
    assert report[FILES[-1]]["source"]["rdma_failed_reads"] > 0, "no READ was under way at either end of the server"
    first, second = (report[name] for name in FILES)
    assert first["error"] == ""
    assert first["digest"] == xxhash.xxh3_128_hexdigest(content("first"))
    assert first["slowest_read_s"] > AWAY_S
    assert second["error"] == "Input/output error"
    assert TIMEOUT_S * 0.9 <= second["slowest_read_s"] <= TIMEOUT_S + 60
    assert report["names"] == sorted(f"{name}.bin" for name in FILES)  # the mount is alive
