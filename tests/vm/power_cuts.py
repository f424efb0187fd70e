"""Power cuts: one job, booted again and again on the same images, each boot but the last ended in the middle.

Called by the tests on the host. A job is a command for the guest with this contract: it first checks what the boot
before left on the devices (ending with another status than 0 where that is wrong), then makes the file /share/begun
and works on until the power goes. In the last boot, where TIERFS_VM_LAST is 1, it checks and ends.

What a cut loses is what the guest had not handed to its devices: dirty pages, unfinished transactions. What it had
written without asking for a flush is kept, as on a disk without a volatile cache, and so is what it had stored to the
NVDIMM without flushing the processor's cache: such faults cannot be seen here.
"""

import random
from collections.abc import Mapping, Sequence

from tests.vm.qemu import Ending, Machine

BEGUN = "begun"
_LOG_TAIL_BYTES = 8000


def power_cuts(
    machine: Machine,
    job: Sequence[str],
    *,
    environment: Mapping[str, str],
    cuts: int,
    spread_s: float,
    limit_s: float,
    seed: int,
) -> None:
    """Boot ``cuts`` times with a cut up to ``spread_s`` seconds after the job has begun, then once to the end.

    ``limit_s`` holds for each boot. Raises AssertionError with the guest's last words when a boot ends in another way;
    the moments follow from ``seed``.
    """
    moments = random.Random(seed)
    for number in range(cuts + 1):
        last = number == cuts
        (machine.share / BEGUN).unlink(missing_ok=True)
        variables = {**environment, "TIERFS_VM_BOOT": str(number), "TIERFS_VM_LAST": "1" if last else "0"}
        delay_s = moments.uniform(0, spread_s)
        with machine.boot(job, environment=variables) as guest:
            cut = None if last else guest.cut(begun=BEGUN, delay_s=delay_s, limit_s=limit_s)
            outcome = cut or guest.wait(limit_s=limit_s)
        expected = (Ending.FINISHED, 0) if last else (Ending.CUT, None)
        if (outcome.ending, outcome.status) != expected:
            said = outcome.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
            raise AssertionError(
                f"boot {number} of {cuts + 1} (seed {seed}, cut after {delay_s:.3f} s): {outcome.describe()}\n{said}"
            )
