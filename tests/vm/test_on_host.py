"""On the host: boot the test VM for the tests marked vm, and for power cuts. Skipped where there can be no VM."""

import json
import os
import random
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vm.kernel import find_or_build
from tests.vm.main import LIMIT_S, UNAVAILABLE, prepare
from tests.vm.power_cuts import power_cuts
from tests.vm.qemu import ROOT, Ending, Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(int(LIMIT_S) + 300)]

RUN = ["bash", str(ROOT / "tests" / "vm" / "run.sh")]
MODELS = 12
POWER_CUTS = int(os.environ.get("TIERFS_VM_POWER_CUTS", "1"))  # of each tier
SEED = int(os.environ.get("TIERFS_VM_SEED", "4"))
CUT_LIMIT_S = 240.0
PYTHON = str(ROOT / ".venv" / "bin" / "python")


@pytest.fixture(scope="module")
def harness() -> None:
    """What the VM needs is installed, and its kernel is there."""
    done = subprocess.run(
        [*RUN, "--prepare"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
    )
    if done.returncode == UNAVAILABLE:
        pytest.skip(done.stderr.strip().rpartition("\n")[2])
    assert done.returncode == 0, done.stderr


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """For images and logs; the images are sparse, but large, and go."""
    yield tmp_path
    for image in tmp_path.glob("*.img"):
        image.unlink()


def test_a_guest_that_does_not_end_is_killed_at_the_limit(harness: None, directory: Path) -> None:
    machine = Machine(kernel=find_or_build(), directory=directory)
    with machine.boot(["sleep", "infinity"]) as guest:
        outcome = guest.wait(limit_s=2)
        assert not Path(f"/proc/{guest.pid}").exists()
    assert (outcome.ending, outcome.status) == (Ending.LIMIT, None)


def test_every_test_marked_vm_passes_in_the_guest(harness: None, directory: Path) -> None:
    done = subprocess.run([*RUN, "--keep", str(directory)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    junit = directory / "share" / "junit.xml"
    assert done.returncode == 0 and junit.exists(), done.stderr
    suite = ElementTree.parse(junit).getroot().find("testsuite")
    assert suite is not None
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    skipped = [
        f"{case.attrib['name']}: {reason.attrib['message']}" for case in suite for reason in case.iter("skipped")
    ]
    print(counts, *skipped, sep="\n")
    assert counts["tests"] > counts["skipped"]
    assert counts["failures"] == counts["errors"] == 0


def test_a_power_cut_leaves_no_wrong_byte_in_the_warm_tier(harness: None, directory: Path) -> None:
    machine = Machine(kernel=find_or_build(), directory=directory)
    source = machine.share / "source"
    content = random.Random(SEED)
    for number in range(MODELS):
        (source / f"m{number}").mkdir(parents=True)
        for part in range(2):
            (source / f"m{number}" / f"part{part}.bin").write_bytes(
                content.randbytes((400 << 10) + 1013 * number + part)
            )
    job = [PYTHON, "-m", "tests.vm.fill_job"]
    power_cuts(
        machine, job, environment=prepare(machine), cuts=POWER_CUTS, spread_s=8.0, limit_s=CUT_LIMIT_S, seed=SEED
    )
    reports = [json.loads((machine.share / f"boot{number}.json").read_text()) for number in range(POWER_CUTS + 1)]
    print(f"seed {SEED}:", *reports)
    assert reports[-1]["resident_blocks"] > 0, "nothing was resident when the power went"
    shutil.rmtree(source)


@pytest.mark.timeout(int(LIMIT_S) + 60 * POWER_CUTS)
def test_a_power_cut_while_promoting_leaves_no_wrong_byte_in_the_hot_tier(harness: None, directory: Path) -> None:
    machine = Machine(kernel=find_or_build(), directory=directory)
    environment = {**prepare(machine), "TIERFS_VM_SEED": str(SEED)}
    job = [PYTHON, "-m", "tests.vm.promote_job"]
    power_cuts(machine, job, environment=environment, cuts=POWER_CUTS, spread_s=5.0, limit_s=CUT_LIMIT_S, seed=SEED)
    names = [machine.share / f"promotions{number}.json" for number in range(POWER_CUTS + 1)]
    reports = [json.loads(name.read_text()) for name in names]
    print(f"seed {SEED}:", *reports, sep="\n")
    assert reports[-1]["blocks"] > 0, "nothing was resident when the power went"
    assert POWER_CUTS < 10 or sum(report["begun"] for report in reports) > 0, "no cut hit a promotion"
