"""The kernel that the test VM boots: a package of the distribution, unpacked into a cache and installed nowhere.

Called by main.py and the tests on the host. FUSE passthrough wants Linux 6.9, so that on a Debian with an older kernel
the package of the next release, or of backports, is taken: from the mirror that the machine's own sources name, with
lists of our own, so that the system's apt never sees it. What must hold: an entry of the cache is complete or not
there (it is renamed into place); its name carries package, version, and a digest of what built it.
"""

import hashlib
import lzma
import os
import platform
import re
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.vm import initramfs

HERE = Path(__file__).parent
INPUTS = (HERE / "kernel.py", HERE / "initramfs.py", HERE / "init")
PASSTHROUGH = (6, 9)
DEBIAN_SUITES = ("trixie", "{codename}-backports")

# With what they need, in an order that loads. A name this kernel lacks, or has built in, is passed over.
MODULES = (
    *("virtio_pci", "virtio_net", "9pnet_virtio", "9p", "overlay"),
    *("crc32c_generic", "crc32c_intel", "crc32_generic", "crc32_pclmul", "libcrc32c", "ext4", "fuse", "loop"),
    *("nfit", "nd_pmem", "device_dax", "dax_pmem", "nvme", "dummy", "ib_uverbs", "rdma_ucm", "rdma_rxe", "sch_tbf"),
)

# Never in such a VM, and most of the package.
LEFT_OUT = ("drivers/gpu", "drivers/media", "drivers/net/wireless", "drivers/net/ethernet", "drivers/staging", "sound")


class Unavailable(Exception):
    """No kernel, or no tool: why the VM cannot be had on this machine."""


@dataclass(frozen=True)
class Kernel:
    """What QEMU boots. ``name`` is that of the cache's entry."""

    name: str
    image: Path
    initramfs: Path


@dataclass(frozen=True)
class _Package:
    """A kernel as apt knows it: packages to download, and the options that make apt look in the right place."""

    release: str
    version: str
    names: tuple[str, ...]
    apt: tuple[str, ...]

    @property
    def linux(self) -> tuple[int, int]:
        return _linux(self.version)


def find_or_build() -> Kernel:
    """The newest entry of the cache that these sources built, else a new one (about 100 MB from the mirror, 15 s).

    Raises Unavailable.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierfs" / "vm"
    built = [entry for entry in cache.glob(f"*-{_inputs_digest()}") if entry.is_dir()]
    if built:
        return _kernel(max(built, key=lambda entry: entry.stat().st_mtime))
    if platform.machine() != "x86_64":
        raise Unavailable(f"the test VM is for x86_64; this is {platform.machine()}")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=cache) as scratch:
        package = _choose(Path(scratch))
        entry = cache / f"{package.names[0]}_{package.version.replace(':', '%')}-{_inputs_digest()}"
        _build(package, Path(scratch), Path(scratch) / "entry")
        try:
            (Path(scratch) / "entry").rename(entry)
        except OSError:
            if not entry.is_dir():  # somebody else was faster; theirs is as good
                raise
    return _kernel(entry)


def _kernel(entry: Path) -> Kernel:
    return Kernel(entry.name, entry / "kernel", entry / "initramfs")


def _inputs_digest() -> str:
    digest = hashlib.sha256()
    for path in INPUTS:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _choose(scratch: Path) -> _Package:
    """The first kernel with passthrough, else the newest of those that can be had."""
    found: list[_Package] = []
    for apt in _places(scratch):
        package = _resolve(apt)
        if package is not None and package.linux >= PASSTHROUGH:
            return package
        if package is not None:
            found.append(package)
    if not found:
        raise Unavailable("apt knows no kernel package here: neither linux-image-amd64 nor linux-image-generic")
    return max(found, key=lambda package: package.linux)


def _places(scratch: Path) -> Iterator[tuple[str, ...]]:
    """Options for apt, per place to look in: the system's own sources, then other suites of the same mirror."""
    yield ()
    system = _os_release()
    if system.get("ID") != "debian":
        return
    targets = _output("apt-get", "indextargets", "--format", "$(RELEASE) $(SITE)", "Created-By: Packages")
    codename = system.get("VERSION_CODENAME", "")
    sites = {line.split()[1] for line in targets.splitlines() if line.startswith(f"{codename} ")}
    for site in sorted(sites):
        for suite in DEBIAN_SUITES:
            name = suite.format(codename=codename)
            directory = scratch / name
            (directory / "lists" / "partial").mkdir(parents=True)
            (directory / "sources.list").write_text(f"deb {site} {name} main\n")
            apt = (
                *("-o", f"Dir::Etc::sourcelist={directory}/sources.list", "-o", "Dir::Etc::sourceparts=/dev/null"),
                *("-o", f"Dir::State::lists={directory}/lists", "-o", "Dir::Cache::pkgcache="),
                *("-o", "Dir::Cache::srcpkgcache=", "-o", "APT::Default-Release="),
                *("-o", "APT::Update::Post-Invoke=", "-o", "APT::Update::Post-Invoke-Success="),
            )
            if _run("apt-get", "-q", *apt, "update"):
                yield apt


def _resolve(apt: tuple[str, ...]) -> _Package | None:
    """The package behind the distribution's name for "the newest kernel"."""
    system = _os_release()
    if system.get("ID") == "debian":
        metas = ["linux-image-amd64"]
    else:
        metas = [f"linux-image-generic-hwe-{system.get('VERSION_ID', '')}", "linux-image-generic"]
    for meta in metas:
        shown = _output("apt-cache", *apt, "show", "--no-all-versions", meta)
        found = re.search(r"^(?:Pre-)?Depends:.*?\blinux-image-(\d[\w.+~-]*)", shown, re.MULTILINE)
        if found is None:
            continue
        release = found[1]
        names = [f"linux-image-{release}", f"linux-modules-{release}", f"linux-modules-extra-{release}"]
        known = {name: _output("apt-cache", *apt, "show", "--no-all-versions", name) for name in names}
        version = re.search(r"^Version: (\S+)", known[names[0]], re.MULTILINE)
        if version is not None:
            return _Package(release, version[1], tuple(name for name in names if known[name]), apt)
    return None


def _build(package: _Package, scratch: Path, entry: Path) -> None:
    """Download, unpack, and make kernel and initramfs in ``entry``."""
    downloads, unpacked, modules = scratch / "downloads", scratch / "unpacked", scratch / "modules"
    for directory in (downloads, unpacked, modules, entry):
        directory.mkdir()
    if not _run("apt-get", "-q", *package.apt, "download", *package.names, cwd=downloads):
        raise Unavailable(f"apt-get could not download {' '.join(package.names)}")
    for archive in downloads.glob("*.deb"):
        _unpack(archive, unpacked)
    if not (unpacked / "lib" / "modules").exists():  # since Debian 13 and Ubuntu 25.04 below /usr
        (unpacked / "lib").symlink_to("usr/lib")
    if not _run("depmod", "-b", str(unpacked), package.release):
        raise Unavailable("depmod could not read the kernel's modules")
    load_order = _copy_modules(unpacked, package.release, modules)
    _run("depmod", "-b", str(modules), package.release, check=True)
    order = [path.removeprefix("lib/modules/") for path in load_order]
    busybox = shutil.which("busybox")
    if busybox is None:
        raise Unavailable("busybox is not installed (busybox-static)")
    extract_kernel(unpacked / "boot" / f"vmlinuz-{package.release}", entry / "kernel")
    initramfs.write(
        entry / "initramfs",
        init=HERE / "init",
        busybox=Path(busybox),
        modules=modules / "lib" / "modules",
        load_order=order,
    )


def _unpack(archive: Path, target: Path) -> None:
    leave_out = [f"--exclude=*/kernel/{part}" for part in LEFT_OUT]
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE) as packed:
        subprocess.run(["tar", "-x", "-C", str(target), *leave_out], stdin=packed.stdout, check=True)
    if packed.returncode != 0:
        raise Unavailable(f"dpkg-deb could not unpack {archive.name}")


def _copy_modules(source: Path, release: str, target: Path) -> list[str]:
    """Copy what MODULES need, decompressed; returns their paths below ``target`` in an order that loads."""
    order: dict[str, None] = {}
    base = ("modprobe", "-C", "/dev/null", "-d", str(source), "-S", release, "--show-depends")
    for name in MODULES:
        for line in _output(*base, name).splitlines():
            if not line.startswith("insmod "):
                continue  # builtin
            path = Path(line.split()[1])
            within = f"lib/modules/{release}/{str(path).partition(f'/modules/{release}/')[2]}"
            plain = re.sub(r"\.(xz|zst|gz)$", "", within)
            if plain not in order:
                (target / plain).parent.mkdir(parents=True, exist_ok=True)
                (target / plain).write_bytes(_decompressed(path.read_bytes()))
                order[plain] = None
    for name in ("modules.builtin", "modules.builtin.modinfo", "modules.order"):
        shutil.copy(source / "lib" / "modules" / release / name, target / "lib" / "modules" / release)
    return list(order)


def extract_kernel(packed: Path, target: Path) -> None:
    """Write the ELF kernel inside a bzImage: QEMU enters it by PVH, and nothing is unpacked on an emulated processor.

    Offsets: Documentation/arch/x86/boot.rst. What cannot be unpacked is copied as it is, which boots too, but slower.
    """
    image = packed.read_bytes()
    setup_sectors = image[0x1F1] or 4
    offset, length = (int.from_bytes(image[at : at + 4], "little") for at in (0x248, 0x24C))
    start = (setup_sectors + 1) * 512 + offset
    try:
        kernel = _decompressed(image[start : start + length], trailer_bytes=4)
    except (Unavailable, lzma.LZMAError, zlib.error):
        kernel = b""
    target.write_bytes(kernel if kernel.startswith(b"\x7fELF") else image)


def _decompressed(data: bytes, *, trailer_bytes: int = 0) -> bytes:
    """Unpack by its magic number; the kernel's own build appends ``trailer_bytes`` (the unpacked size)."""
    if data.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMADecompressor().decompress(data)
    if data.startswith(b"\x1f\x8b"):
        return zlib.decompressobj(31).decompress(data)
    if data.startswith(b"\x28\xb5\x2f\xfd"):
        if shutil.which("zstd") is None:
            raise Unavailable("zstd is not installed")
        packed = data[: len(data) - trailer_bytes]
        return subprocess.run(["zstd", "-dcq"], input=packed, stdout=subprocess.PIPE, check=True).stdout
    return data


def _linux(version: str) -> tuple[int, int]:
    found = re.match(r"(?:\d+:)?(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _os_release() -> dict[str, str]:
    try:
        return platform.freedesktop_os_release()
    except OSError:
        return {}


def _output(*command: str) -> str:
    """What it prints, or nothing where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _run(*command: str, cwd: Path | None = None, check: bool = False) -> bool:
    """Run a step of the build; whether it ended with 0."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)
    except FileNotFoundError as error:
        raise Unavailable(f"{command[0]} is not installed") from error
    if check and done.returncode != 0:
        raise Unavailable(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()}")
    return done.returncode == 0
