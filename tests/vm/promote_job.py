"""A job for power cuts (power_cuts.py): promote from warm on the NVMe disk into hot on persistent memory, and check
what a cut left: every resident block is as its source, what was not finished is gone, and is gone on with.
"""

import json
import os
import time

import trio

from tests import promotions
from tests.promotions import Place
from tests.vm.guest import NVME, PMEM, SHARE


def main() -> None:
    """Check, then promote until the power is cut; in the last boot check, and empty the tier."""
    number, last = int(os.environ["TIERFS_VM_BOOT"]), os.environ["TIERFS_VM_LAST"] == "1"
    place = Place(PMEM / "promote", NVME / "promote", pretend=False)
    if number == 0:
        trio.run(promotions.prepare, place)
    started_s = time.monotonic()
    seen = trio.run(promotions.check, place)
    report = {**vars(seen), "check_s": round(time.monotonic() - started_s, 1), "promotions_begun": 0}
    told = SHARE / f"promotions{number}.json"
    told.write_text(json.dumps(report))
    print(f"boot {number}: {report}", flush=True)
    if last:
        trio.run(promotions.empty, place)
        return

    def begun(model: bytes) -> None:
        (SHARE / "begun").touch()
        report["promotions_begun"] += 1
        told.write_text(json.dumps(report))

    trio.run(promotions.promote_for_ever, place, int(os.environ["TIERFS_VM_SEED"]) + number, begun)


if __name__ == "__main__":
    main()
