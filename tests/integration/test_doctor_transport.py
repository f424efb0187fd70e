"""What the doctor says of the transport: here, where loopback has no RDMA device, and over fake devices."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.integration.processes import Mount, Serve, eventually
from tests.integration.rdma_serving import SERVER_BYTES
from tests.integration.serving import BLOCK_BYTES, pattern, run, serving
from tests.integration.test_doctor import examined, level, write_config
from tierfs.app.doctor import transport
from tierfs.app.doctor.finding import Finding, Level
from tierfs.config.load import load_mount_config
from tierfs.server.rdma import RdmaService
from tierfs.testing.verbs import NO_ANSWER, Fabric, roce_port
from tierfs.tiers.remote import RemoteSource
from tierfs.tiers.remote_rdma import RdmaReader

pytestmark = pytest.mark.usefixtures("own_runtime_dir")

MakeServe = Callable[..., Serve]
MakeMount = Callable[..., Mount]
NO_DEVICE = ("there is no RDMA device here", "no RDMA device has 127.0.0.1")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    (root / "m").mkdir(parents=True)
    (root / "m" / "weights.bin").write_bytes(pattern(3 * BLOCK_BYTES))
    return root


def test_auto_falls_back_and_the_finding_has_the_reason_and_what_mends_it(
    tmp_path: Path, models: Path, serve: MakeServe
) -> None:
    found = examined(write_config(tmp_path, serve(models).url), expect=0)
    (finding,) = found["source.transport"]
    assert finding["level"] in ("note", "warning")
    assert finding["what"].startswith("blocks come by TCP, not by RDMA: ")
    assert any(reason in finding["what"] for reason in NO_DEVICE)
    assert "rdma link" in finding["mend"] and "docs/RDMA.md" in finding["mend"]


def test_rdma_alone_is_a_problem_with_what_to_install_or_configure(
    tmp_path: Path, models: Path, serve: MakeServe
) -> None:
    url = serve(models).url
    found = examined(write_config(tmp_path, url, source='transport = "rdma"'), expect=1)
    (finding,) = found["source.transport"]
    assert finding["level"] == "problem" and any(reason in finding["what"] for reason in NO_DEVICE)
    assert "rdma link" in finding["mend"] and 'source.transport = "auto"' in finding["mend"]


def test_tcp_alone_is_as_it_was_asked_for(tmp_path: Path, models: Path, serve: MakeServe) -> None:
    found = examined(write_config(tmp_path, serve(models).url, source='transport = "tcp"'), expect=0)
    assert level(found, "source.transport") == "ok"
    assert 'source.transport is "tcp"' in found["source.transport"][0]["what"]


def test_a_directory_has_no_transport(tmp_path: Path, models: Path) -> None:
    assert "source.transport" not in examined(write_config(tmp_path, f"dir:{models}"))


@pytest.mark.fuse
def test_a_mount_that_is_up_says_how_its_blocks_come(
    tmp_path: Path, models: Path, serve: MakeServe, mount: MakeMount
) -> None:
    mounted = mount(serve(models).url)
    assert (mounted.path / "m" / "weights.bin").read_bytes() == pattern(3 * BLOCK_BYTES)
    eventually(lambda: "RDMA device" in mounted.status()["source"]["transport_reason"], "the reason is there")
    found = examined(mounted.config)
    (finding,) = [one for one in found["mount.transport"] if str(mounted.path) in one["what"]]
    assert finding["level"] == "ok" and any(reason in finding["what"] for reason in NO_DEVICE)


def judged(
    models: Path, tmp_path: Path, fabric: Fabric, *, wanted: str = "auto", server_bytes: int = SERVER_BYTES
) -> list[Finding]:
    """With these devices at both ends; nothing of them may stay open."""
    found: list[Finding] = []

    async def main() -> None:
        service = RdmaService(fabric.machine, memory_bytes=server_bytes)
        async with serving(models, rdma=service) as served:
            config = load_mount_config(write_config(tmp_path, served.url(), source=f'transport = "{wanted}"'))
            reader = RdmaReader(fabric.machine, source="test", timeout_s=1)
            source = RemoteSource(served.url(), connections=2, rdma=reader, rdma_only=wanted == "rdma")
            facts = await transport.try_source(config, source)
            assert facts.largest_model_bytes == 3 * BLOCK_BYTES
            found.extend(transport.judge(facts))
        assert service.lent_bytes == 0

    run(main)
    assert fabric.pinned_bytes == 0
    return found


@pytest.mark.parametrize("wanted", ["auto", "rdma"])
def test_with_devices_at_both_ends_port_and_gid_are_named_and_a_block_was_fetched(
    models: Path, tmp_path: Path, wanted: str
) -> None:
    fabric = Fabric()
    finding, packets = judged(models, tmp_path, fabric, wanted=wanted)
    assert (finding.name, finding.level) == ("source.transport", Level.OK)
    assert "fake0 port 1, GID 1 (127.0.0.1), MTU 1KiB" in finding.what
    assert fabric.read_bytes == BLOCK_BYTES
    assert packets.name == "rdma.mtu" and "mtu 4200" in packets.mend


SICK: list[tuple[Callable[[], Fabric], int, str, str]] = [
    (partial(Fabric, removed={"fake0"}), SERVER_BYTES, "there is no RDMA device", "rdma link add"),
    (partial(Fabric, pin_limit_bytes=8 << 20), SERVER_BYTES, "RLIMIT_MEMLOCK is 8MiB", "LimitMEMLOCK=infinity"),
    (partial(Fabric, fail_next=[NO_ANSWER] * 9), SERVER_BYTES, "did not answer", "UDP port 4791"),
    (partial(Fabric, deaf=True), SERVER_BYTES, "READ did not end", "UDP port 4791"),
    (Fabric, BLOCK_BYTES, "server.rdma_memory", "raise server.rdma_memory"),
]


@pytest.mark.parametrize(("fabric", "server_bytes", "reason", "mend"), SICK)
@pytest.mark.parametrize("wanted", ["auto", "rdma"])
def test_why_there_is_no_rdma_is_said_with_what_mends_it(
    models: Path, tmp_path: Path, fabric: Callable[[], Fabric], server_bytes: int, reason: str, mend: str, wanted: str
) -> None:
    (finding,) = judged(models, tmp_path, fabric(), wanted=wanted, server_bytes=server_bytes)
    assert finding.name == "source.transport" and finding.level >= Level.NOTE
    assert (finding.level is Level.PROBLEM) == (wanted == "rdma")
    assert reason in finding.what and mend in finding.mend


def test_an_address_that_no_device_has_is_named(models: Path, tmp_path: Path) -> None:
    fabric = Fabric()
    elsewhere = roce_port(b"\x0a\x00\x00\x05")
    fabric_machine = fabric.machine

    def machine() -> object:
        return fabric_machine(elsewhere)

    fabric.machine = machine  # type: ignore[method-assign,assignment]
    (finding,) = judged(models, tmp_path, fabric)
    assert finding.level is Level.WARNING and "no RDMA device has 127.0.0.1" in finding.what
    assert "source.url" in finding.mend
