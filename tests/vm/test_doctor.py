"""In the VM: the doctor finds persistent memory, an RDMA device and an NVMe disk that are really there."""

from pathlib import Path

import pytest

from tests.vm.guest import NVME, PMEM
from tierfs.app.doctor import clock, fuse, limits, memory, pmem, rdma, storage
from tierfs.app.doctor.disks import disks_below
from tierfs.app.doctor.finding import Level

pytestmark = pytest.mark.vm


def test_the_dax_mount_is_found_to_be_one() -> None:
    facts = pmem.look(None)
    assert facts.regions and any(namespace.mode == "fsdax" for namespace in facts.namespaces), facts
    (found,) = [finding for finding in pmem.judge(facts) if finding.name == "pmem.mount"]
    assert found.level is Level.OK and str(PMEM) in found.what


def test_the_rdma_device_is_found_with_its_link_and_addresses() -> None:
    facts = rdma.look(None)
    assert [(port.state, port.link_layer) for port in facts.ports] == [("ACTIVE", "Ethernet")], facts
    assert facts.ports[0].gids > 0 and facts.usable
    (found,) = [finding for finding in rdma.judge(facts) if finding.name == "rdma.link"]
    assert found.level is Level.OK


def test_the_disk_below_the_warm_tier_is_an_nvme_disk_with_its_queues() -> None:
    (disk,) = disks_below(Path(NVME).resolve())
    assert disk.kind == "nvme" and disk.model.startswith("QEMU") and not disk.rotating
    assert disk.read_ahead_kb is not None and disk.requests is not None
    kind = storage.judge(storage.StorageFacts(disks=(disk,), virtual_machine=True))[0]
    assert "not passed through" in kind.what


def test_this_kernel_answers_every_other_question_too() -> None:
    findings = [
        *fuse.judge(fuse.look(None)),
        *limits.judge(limits.look()),
        *memory.judge(memory.look(None, None)),
        *clock.judge(clock.look(None)),
    ]
    assert {"fuse.device", "limits.open_files", "memory.budget"} <= {finding.name for finding in findings}
    assert not [finding for finding in findings if finding.level is Level.PROBLEM]
