"""The harness's command: boot the test VM and run pytest, a shell or any command in it.

    python -m tests.vm.main [--limit SECONDS] [--keep DIRECTORY] [PYTEST ARGUMENT...]
    python -m tests.vm.main [--limit SECONDS] [--keep DIRECTORY] --run COMMAND...     or --shell, or --prepare

Called by run.sh, which installs what this needs. Ends with pytest's (or the command's) status; 124 where the limit was
reached, 125 where the guest died, 77 where there can be no VM on this machine, with the reason as the last line.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.vm.kernel import Unavailable, find_or_build
from tests.vm.qemu import ROOT, Ending, Machine, Outcome

LIMIT_S = 600.0
AT_LIMIT, DIED, UNAVAILABLE = 124, 125, 77
PYTEST = ("-m", "pytest", "-m", "vm", "-p", "no:cacheprovider", "-o", "timeout=240")
REPORT = ("--color=no", "--tb=short", "--durations=5")


def main() -> int:
    """Parse, boot, report."""
    parser = argparse.ArgumentParser(prog="tests/vm/run.sh", description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="kill the guest after so many seconds")
    parser.add_argument("--keep", type=Path, help="keep images, share and logs in this directory, and use them again")
    parser.add_argument("--shell", action="store_true", help="a shell in the guest instead of tests")
    parser.add_argument("--run", nargs=argparse.REMAINDER, help="what follows is a command for the guest")
    parser.add_argument("--prepare", action="store_true", help="only install and download what a boot needs")
    options, arguments = parser.parse_known_args()  # the rest is for pytest
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that images and guest go then, too
    try:
        kernel = find_or_build()
        if options.prepare:
            return 0
        scratch = options.keep or Path(tempfile.mkdtemp(prefix=f"tierfs-vm.{os.getpid()}."))
        machine = Machine(kernel=kernel, directory=scratch.absolute())
        print(f"vm: {kernel.name}, {machine.accelerator}", file=sys.stderr)
        status = DIED
        try:
            status = _shell(machine) if options.shell else _run(machine, arguments, options)
        finally:
            if options.keep is None:
                _discard(machine, keep_logs=status != 0 and not options.shell)
        return status
    except Unavailable as error:
        print(f"vm: no test VM here: {error}", file=sys.stderr)
        return UNAVAILABLE


def pytest_job(arguments: list[str]) -> list[str]:
    """The command that runs the tests marked vm; the junit file is /share/junit.xml."""
    paths = [] if any(not argument.startswith("-") for argument in arguments) else ["tests/vm"]
    python = str(ROOT / ".venv" / "bin" / "python")
    return [
        python,
        *PYTEST,
        *REPORT,
        "--junitxml=/share/junit.xml",
        "--basetemp=/tmp/tierfs-vm-tests",
        *arguments,
        *paths,
    ]


def prepare(machine: Machine) -> dict[str, str]:
    """Build on the host what would take long in the guest; returns variables for the guest: where that is, and those
    of this process that begin with TIERFS_VM_."""
    machine.share.mkdir(parents=True, exist_ok=True)
    program = machine.share / "tierfs-channel"
    sources = sorted(str(path) for path in (ROOT / "mount-helpers" / "channel").glob("*.c"))
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-g", "-pthread"]
    subprocess.run(["gcc", *flags, *sources, "-o", str(program)], check=True, timeout=120)
    compiled = ["tierfs", "tests/integration", "tests/vm"]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *compiled], cwd=ROOT, check=True, timeout=120)
    chosen = {name: value for name, value in os.environ.items() if name.startswith("TIERFS_VM_")}
    return {**chosen, "TIERFS_CHANNEL_PROGRAM": "/share/tierfs-channel", "PYTHONPATH": str(ROOT)}


def exit_status(outcome: Outcome) -> int:
    """What this command ends with."""
    if outcome.status is not None:
        return outcome.status
    return AT_LIMIT if outcome.ending is Ending.LIMIT else DIED


def _run(machine: Machine, arguments: list[str], options: argparse.Namespace) -> int:
    job = options.run or pytest_job(arguments)
    with machine.boot(job, environment=prepare(machine)) as guest:
        outcome = guest.wait(limit_s=options.limit, echo=True)
    print(f"vm: {outcome.describe()}", file=sys.stderr)
    return exit_status(outcome)


def _discard(machine: Machine, *, keep_logs: bool) -> None:
    """Remove what nobody asked for; after a failure the console and the share stay."""
    for image in (machine.nvdimm, machine.nvme):
        image.unlink(missing_ok=True)
    if not keep_logs:
        shutil.rmtree(machine.directory, ignore_errors=True)


def _shell(machine: Machine) -> int:
    environment = {**prepare(machine), "TERM": os.environ.get("TERM", "dumb")}
    job = ["setsid", "--ctty", "--wait", "bash", "-c", "exec bash -i </dev/ttyS0 >/dev/ttyS0 2>&1"]
    with machine.boot(job, environment=environment, interactive=True) as guest:
        return exit_status(guest.wait(limit_s=float("inf")))


if __name__ == "__main__":
    sys.exit(main())
