"""Write an initramfs: a cpio archive in the kernel's "newc" format.

The format: Documentation/driver-api/early-userspace/buffer-format.rst of the kernel's sources.
Called by kernel.py. Uncompressed on purpose: QEMU puts it into the guest's memory as it is, and an emulated processor
would spend longer on unpacking than this one does on reading it.
"""

import stat
from collections.abc import Iterator
from pathlib import Path

DIRECTORIES = ("bin", "dev", "proc", "sys", "host", "scratch", "tree", "lib", "lib/modules")


def write(target: Path, *, init: Path, busybox: Path, modules: Path, load_order: list[str]) -> None:
    """Make ``target``: ``init`` as /init, ``busybox`` as its shell, and ``modules`` (a directory) as /lib/modules.

    ``load_order`` are paths below /lib/modules, one a line in /modules.list, each after what it needs.
    """
    with target.open("wb") as archive:
        for number, (name, mode, content) in enumerate(_entries(init, busybox, modules, load_order), 1):
            archive.write(_record(number, name, mode, content))
        archive.write(_record(0, "TRAILER!!!", 0, b""))


def _entries(init: Path, busybox: Path, modules: Path, load_order: list[str]) -> Iterator[tuple[str, int, bytes]]:
    for name in DIRECTORIES:
        yield name, stat.S_IFDIR | 0o755, b""
    yield "init", stat.S_IFREG | 0o755, init.read_bytes()
    yield "bin/busybox", stat.S_IFREG | 0o755, busybox.read_bytes()
    yield "bin/sh", stat.S_IFLNK | 0o777, b"busybox"
    yield "modules.list", stat.S_IFREG | 0o644, "".join(f"{path}\n" for path in load_order).encode()
    for path in sorted(modules.rglob("*")):
        name = f"lib/modules/{path.relative_to(modules)}"
        if path.is_dir():
            yield name, stat.S_IFDIR | 0o755, b""
        else:
            yield name, stat.S_IFREG | 0o644, path.read_bytes()


def _record(number: int, name: str, mode: int, content: bytes) -> bytes:
    encoded = name.encode() + b"\0"
    fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
    header = b"070701" + b"".join(b"%08X" % field for field in fields)
    return _padded(header + encoded) + _padded(content)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
