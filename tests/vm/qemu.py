"""One virtual machine: its command line, its life, and what it ended with.

Called by main.py, power_cut.py and the tests on the host. What must hold: QEMU never outlives its Guest, whatever
happens (the context manager kills it by its pid; the kernel does, should this process die), and a boot ends within
its limit. Software emulation wherever KVM does not really work.
"""

import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import TracebackType

from tests.vm.kernel import Kernel, Unavailable
from tests.vm.tsc import counter_khz

ROOT = Path(__file__).parents[2]
QEMU = "qemu-system-x86_64"
MEMORY_MIB = 2048
NVDIMM_MIB = 512
NVME_MIB = 1024
POLL_S = 0.05
_KVM_GET_API_VERSION = 0xAE00


class Ending(Enum):
    """How a boot ended."""

    FINISHED = "the job ended"
    CUT = "the power was cut"
    LIMIT = "the limit was reached"
    DIED = "the guest died"


@dataclass(frozen=True)
class Outcome:
    """What a boot ended with. ``status`` is the job's own, None unless it FINISHED; ``log`` is the serial console."""

    ending: Ending
    status: int | None
    seconds: float
    log: Path

    def describe(self) -> str:
        """One line, for a message."""
        status = "" if self.status is None else f" with {self.status}"
        return f"{self.ending.value}{status} after {self.seconds:.0f} s; its log: {self.log}"


@dataclass(frozen=True)
class Wire:
    """An Ethernet between two guests: number 1 listens, number 2 connects; they are 10.78.0.1 and 10.78.0.2 on it."""

    number: int
    port: int

    def arguments(self) -> list[str]:
        """QEMU's arguments for this end."""
        end = "listen" if self.number == 1 else "connect"
        device = f"virtio-net-pci,netdev=wire,mac=02:00:00:00:77:0{self.number},host_mtu=4200"
        return ["-netdev", f"socket,id=wire,{end}=127.0.0.1:{self.port}", "-device", device]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What to boot. ``directory`` holds the images, which stay for a second boot, and the share with the guest.

    The share is /share in the guest. Whoever wants a result writes it there.
    """

    kernel: Kernel
    directory: Path
    memory_mib: int = MEMORY_MIB
    processors: int = 1
    wire: Wire | None = None
    accelerator: str = field(default_factory=lambda: accelerator())

    @property
    def share(self) -> Path:
        """The directory that the guest has as /share."""
        return self.directory / "share"

    @property
    def nvdimm(self) -> Path:
        """The persistent memory's bytes."""
        return self.directory / "nvdimm.img"

    @property
    def nvme(self) -> Path:
        """The disk's bytes."""
        return self.directory / "nvme.img"

    def boot(
        self, job: Sequence[str], *, environment: Mapping[str, str] | None = None, interactive: bool = False
    ) -> "Guest":
        """Start it with this job (a command, run as root in the checkout). Raises Unavailable without QEMU."""
        if shutil.which(QEMU) is None:
            raise Unavailable(f"{QEMU} is not installed")
        self.share.mkdir(parents=True, exist_ok=True)
        for image, mib in ((self.nvdimm, NVDIMM_MIB), (self.nvme, NVME_MIB)):
            if not image.exists():
                with image.open("wb") as file:
                    file.truncate(mib << 20)
        (self.share / "status").unlink(missing_ok=True)
        (self.share / "job").write_text(shlex.join(job) + "\n")
        exported = {"TIERFS_ROOT": str(ROOT), "TIERFS_WIRE": str(self.wire.number) if self.wire else ""}
        exported.update(environment or {})
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in exported.items()]
        (self.share / "boot.env").write_text("".join(lines))
        return Guest(self, interactive=interactive)

    def command(self, *, interactive: bool) -> list[str]:
        """QEMU's command line. What a device of the guest has written is in the host's page cache: a kill keeps it."""
        memory = f"{self.memory_mib}M"
        nvdimm = f"memory-backend-file,id=nvdimm,share=on,mem-path={_quoted(self.nvdimm)},size={NVDIMM_MIB}M"
        shares = [("host", Path("/"), ",readonly=on"), ("share", self.share, "")]
        line = ["nice", "-n", "5", "setpriv", "--pdeathsig", "KILL", "--", QEMU, *_ACCELERATORS[self.accelerator]]
        line += ["-machine", "q35,nvdimm=on,vmport=off,smm=off,hpet=off", "-smp", str(self.processors)]
        line += ["-m", f"{memory},slots=2,maxmem={self.memory_mib + 2 * NVDIMM_MIB}M"]
        # No nvdimm-persistence=cpu: libpmem would then leave out the flushes that are to be tested.
        line += ["-object", nvdimm, "-device", "nvdimm,id=nvdimm0,memdev=nvdimm"]
        line += ["-drive", f"file={_quoted(self.nvme)},format=raw,if=none,id=nvme,cache=writeback"]
        line += ["-device", "nvme,drive=nvme,serial=tierfs"]
        for tag, path, options in shares:
            line += ["-fsdev", f"local,id={tag},path={_quoted(path)},security_model=none,multidevs=remap{options}"]
            line += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
        line += self.wire.arguments() if self.wire else []
        line += ["-device", "isa-debug-exit,iobase=0xf4,iosize=1", "-no-reboot", "-nodefaults", "-no-user-config"]
        line += ["-display", "none", "-serial", "mon:stdio" if interactive else "stdio"]
        arguments = _KERNEL_ARGUMENTS
        if self.accelerator == "tcg" and (khz := counter_khz()):
            arguments += f" tsc_early_khz={khz}"
        line += ["-kernel", str(self.kernel.image), "-initrd", str(self.kernel.initramfs), "-append", arguments]
        return line


# panic=-1 and -no-reboot: a guest that panics ends QEMU. The mitigations are for a guest that somebody attacks.
# no_timer_check: on a busy host the emulated timer is too late for the kernel's check of it, which would then panic.
_KERNEL_ARGUMENTS = (
    "console=ttyS0 quiet panic=-1 mitigations=off nokaslr tsc=reliable random.trust_cpu=on no_timer_check"
)

# A second emulated processor costs twice the time of the first for what one process does alone (starting Python), and
# a fifth level of page tables is walked in software, too.
_ACCELERATORS = {
    "tcg": ["-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max,la57=off"],
    "kvm": ["-accel", "kvm", "-cpu", "host"],
}


class Guest:
    """A running machine; a context manager that ends it."""

    def __init__(self, machine: Machine, *, interactive: bool) -> None:
        self.machine = machine
        self.log = machine.directory / "console.log"
        self._started = time.monotonic()
        self._shown = 0
        command = machine.command(interactive=interactive)
        if interactive:
            self._process = subprocess.Popen(command)
        else:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        """QEMU's."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether QEMU still runs."""
        return self._process.poll() is None

    def __enter__(self) -> "Guest":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def wait(self, *, limit_s: float, echo: bool = False) -> Outcome:
        """Wait for the job's end; ``limit_s`` seconds after its start kill the guest. ``echo``: console to stderr."""
        while self._process.poll() is None:
            if time.monotonic() - self._started > limit_s:
                self._end()
                return self._outcome(Ending.LIMIT)
            time.sleep(POLL_S)
            if echo:
                self._echo()
        if echo:
            self._echo()
        return self._outcome(Ending.FINISHED)

    def cut(self, *, begun: str, delay_s: float, limit_s: float) -> Outcome:
        """Cut the power ``delay_s`` seconds after the job has made the file ``begun`` in the share.

        QEMU is killed with nothing flushed: what the guest had not yet handed to its devices is lost. A job that ends
        before its time, and a limit reached without ``begun``, are outcomes of their own.
        """
        while not (self.machine.share / begun).exists():
            if self._process.poll() is not None or time.monotonic() - self._started > limit_s:
                return self.wait(limit_s=limit_s)
            time.sleep(POLL_S / 10)
        try:
            self._process.wait(delay_s)
        except subprocess.TimeoutExpired:
            self._end()
            return self._outcome(Ending.CUT)
        return self._outcome(Ending.FINISHED)

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _outcome(self, ending: Ending) -> Outcome:
        status = None
        if ending is Ending.FINISHED:
            try:
                status = int((self.machine.share / "status").read_text())
            except (OSError, ValueError):
                # The job cut the power itself (guest.cut_power), or the guest is dead.
                ending = Ending.CUT if self._process.returncode == CUT_STATUS else Ending.DIED
        return Outcome(ending, status, time.monotonic() - self._started, self.log)

    def _echo(self) -> None:
        with self.log.open("rb") as log:
            log.seek(self._shown)
            news = log.read()
        self._shown += len(news)
        sys.stderr.write(news.decode(errors="replace").replace("\r\n", "\n"))
        sys.stderr.flush()


CUT_BYTE = 0x22  # what the job writes to isa-debug-exit; QEMU then ends with twice that and one
CUT_STATUS = CUT_BYTE * 2 + 1


def accelerator() -> str:
    """The fastest that works: TIERFS_VM_ACCELERATOR if set, else kvm where it is real, else tcg."""
    chosen = os.environ.get("TIERFS_VM_ACCELERATOR")
    if chosen is not None:
        if chosen not in _ACCELERATORS:
            raise Unavailable(f"TIERFS_VM_ACCELERATOR is {chosen}; it may be {' or '.join(_ACCELERATORS)}")
        return chosen
    return "kvm" if _kvm_works() else "tcg"


def _kvm_works() -> bool:
    # A /dev/kvm without the processor's own support exists (nested in some clouds) and makes virtual machines that
    # never get through their boot: the processor's flags decide as well.
    try:
        flags = re.search(r"^flags\s*:.*\b(vmx|svm)\b", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        with open("/dev/kvm", "r+b", buffering=0) as device:
            return flags is not None and fcntl.ioctl(device, _KVM_GET_API_VERSION) == 12
    except OSError:
        return False


def _quoted(path: Path) -> str:
    """A path inside one of QEMU's comma-separated options."""
    return str(path).replace(",", ",,")
