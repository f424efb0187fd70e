"""Relations between keys, and defaults that depend on the machine. Called by load.py on a well-typed configuration.

``mistake(key, text)`` makes the error of a key; it knows the file. What this looks at outside is small: token and
certificate files must be readable, exports must be directories, a tier without a capacity gets one from its disk, and
what is memory has what the machine and the cgroups of this process leave for it.
"""

import contextlib
import os
import pwd
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from tierfs.blocks.errors import ConfigError
from tierfs.blocks.units import Duration, Size, format_bytes, format_duration
from tierfs.config.addresses import (
    DirectorySource,
    parse_listen,
    parse_metrics_listen,
    parse_source_url,
    valid_export_name,
)
from tierfs.config.memory import MemoryRoom, default_memory_limit
from tierfs.config.mounts import mount_of, mounts, nearest_existing
from tierfs.config.schema import (
    COMPUTED_DURATION,
    COMPUTED_SIZE,
    ExportConfig,
    KernelMountConfig,
    MemoryConfig,
    MetricsConfig,
    MountConfig,
    ServeConfig,
)

Mistake = Callable[[str, str], ConfigError]

BLOCKS_IN_MEMORY_MIN = 16
CAPACITY_SHARE = 0.9
REQUEST_GRACE_S = 30.0  # a request waits for the source, and then for a thread and a buffer
PAGE_BYTES = 4096
BLOCK_BYTES_MAX = 64 << 20
TOKEN_BYTES_MAX = 4096
RESTART_GRACE_MAX_S = 86400.0


def load_token(path: Path) -> bytes:
    """The shared token in that file, white space around it removed. Raises ConfigError without the file's content."""
    try:
        with path.open("rb") as file:
            content = file.read(TOKEN_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: the token cannot be read: {error.strerror}") from error
    token = content.strip()
    if not token or len(content) > TOKEN_BYTES_MAX:  # never the first part of a longer one
        raise ConfigError(f"{path}: expected a token, in a file of at most {TOKEN_BYTES_MAX} bytes")
    return token


def complete_mount(config: MountConfig, mistake: Mistake, room: MemoryRoom) -> MountConfig:
    """The configuration with computed defaults filled in. Raises ConfigError where keys contradict each other."""
    source = config.source
    try:
        directory = isinstance(parse_source_url(source.url), DirectorySource)
    except ConfigError as error:
        raise mistake(
            "source.url", f'is "{source.url}"; expected "tierfs://HOST:PORT/EXPORT" or "dir:/path"'
        ) from error
    for name in ("token_file", "tls", "tls_ca_file"):
        if directory and getattr(source, name):
            raise mistake(f"source.{name}", "is given; expected none, for a dir: source has no server")
    if directory and source.transport != "auto":
        raise mistake("source.transport", "is given; expected none, for a dir: source has no server")
    if source.transport == "rdma" and source.tls:
        raise mistake("source.transport", 'is "rdma" beside source.tls; expected "tcp", for RDMA does not encrypt')
    if source.tls_ca_file is not None and not source.tls:
        raise mistake("source.tls_ca_file", "is given without source.tls; expected source.tls = true beside it")
    _positive(source.timeout, "source.timeout", mistake)
    _check_token(source.token_file, "source.token_file", mistake)
    _check_readable(source.tls_ca_file, "source.tls_ca_file", mistake)
    _check_block_size(source.block_size, "source.block_size", mistake)
    if config.memory.limit == COMPUTED_SIZE:
        limit = default_memory_limit(room, least_bytes=BLOCKS_IN_MEMORY_MIN * source.block_size)
        config = msgspec.structs.replace(config, memory=MemoryConfig(limit=limit))
    if source.url.startswith("dir:"):  # of another source it is known, and checked, once it is reached
        _check_memory(config.memory.limit, "memory.limit", source.block_size, mistake)
    _positive(source.rescan, "source.rescan", mistake)
    _check_readahead(config, mistake)
    mount = config.mount
    if mount.request_timeout == COMPUTED_DURATION:
        mount = msgspec.structs.replace(mount, request_timeout=Duration(source.timeout + REQUEST_GRACE_S))
    elif mount.request_timeout < source.timeout:
        raise mistake(
            "mount.request_timeout",
            f"is {format_duration(mount.request_timeout)}; expected at least source.timeout, which is "
            f"{format_duration(source.timeout)}",
        )
    _check_channel(mount, mistake)
    _check_metrics(config.metrics, mistake)
    return _complete_tiers(msgspec.structs.replace(config, mount=mount), room, mistake)


def complete_serve(config: ServeConfig, mistake: Mistake) -> ServeConfig:
    """The configuration itself. Raises ConfigError where keys contradict each other."""
    server = config.server
    if not config.exports:
        raise mistake("exports", "is empty; expected a table [exports.NAME] for each directory")
    if (server.tls_cert_file is None) != (server.tls_key_file is None):
        missing, given = ("cert", "key") if server.tls_cert_file is None else ("key", "cert")
        raise mistake(f"server.tls_{missing}_file", f"is missing; expected it beside server.tls_{given}_file")
    _check_readable(server.tls_cert_file, "server.tls_cert_file", mistake)
    _check_readable(server.tls_key_file, "server.tls_key_file", mistake)
    _check_token(server.token_file, "server.token_file", mistake)
    _check_metrics(config.metrics, mistake)
    open_address = _check_listen(server.listen, mistake)
    for name, export in config.exports.items():
        prefix = f"exports.{name}."
        if name and not valid_export_name(name):
            raise mistake(
                f"exports.{name}", "is no name; expected up to 128 letters, digits, and . _ - after the first"
            )
        _check_export(export, prefix, server.state_dir, mistake)
        _check_memory(server.memory_limit, "server.memory_limit", export.block_size, mistake)
        if open_address is not None and export.token_file is None and server.token_file is None:
            raise mistake(
                "server.listen",
                f'has "{open_address}", which other machines can reach; expected a loopback address, or '
                f"server.token_file or {prefix}token_file",
            )
    return config


def _check_listen(listen: tuple[str, ...], mistake: Mistake) -> str | None:
    """The first address that other machines can reach, or None."""
    open_address = None
    for text in listen:
        try:
            address = parse_listen(text)
        except ConfigError as error:
            raise mistake("server.listen", f'has "{text}"; expected "tcp://HOST:PORT"') from error
        if open_address is None and not address.loopback:
            open_address = text
    return open_address


def _check_export(export: ExportConfig, prefix: str, state_dir: Path, mistake: Mistake) -> None:
    if not export.path.is_dir():
        raise mistake(f"{prefix}path", f'is "{export.path}"; expected a directory that exists')
    if state_dir.resolve().is_relative_to(export.path.resolve()):
        raise mistake("server.state_dir", f'is "{state_dir}"; expected a directory outside of {prefix}path')
    _check_block_size(export.block_size, f"{prefix}block_size", mistake)
    _positive(export.rescan, f"{prefix}rescan", mistake)
    _check_token(export.token_file, f"{prefix}token_file", mistake)


def _check_channel(mount: KernelMountConfig, mistake: Mistake) -> None:
    if not 1 <= mount.restart_grace <= RESTART_GRACE_MAX_S:
        raise mistake(
            "mount.restart_grace", f"is {format_duration(mount.restart_grace)}; expected from 1s to one day (86400s)"
        )
    if mount.user is not None:
        if mount.mode == "direct":
            raise mistake("mount.user", 'is given with mount.mode = "direct"; expected none, for it needs the channel')
        try:
            number = pwd.getpwnam(mount.user).pw_uid
        except KeyError:
            raise mistake("mount.user", f'is "{mount.user}"; expected the name of a user') from None
        if number == 0:
            raise mistake("mount.user", f'is "{mount.user}"; expected a user without rights, or none')


def _check_metrics(metrics: MetricsConfig, mistake: Mistake) -> None:
    if metrics.listen is None:
        return
    try:
        parse_metrics_listen(metrics.listen)
    except ConfigError as error:
        raise mistake(
            "metrics.listen",
            f'is "{metrics.listen}"; expected "tcp://HOST:PORT", or "unix:/path" of at most 107 bytes',
        ) from error


def _check_readahead(config: MountConfig, mistake: Mistake) -> None:
    readahead = config.readahead
    if not 0 < readahead.window_min <= readahead.window_max:
        raise mistake(
            "readahead.window_min",
            f"is {format_bytes(readahead.window_min)}; expected more than 0 and at most readahead.window_max, "
            f"which is {format_bytes(readahead.window_max)}",
        )
    if config.mount.read_ahead < PAGE_BYTES:
        raise mistake("mount.read_ahead", f"is {format_bytes(config.mount.read_ahead)}; expected at least 4KiB")


def _complete_tiers(config: MountConfig, room: MemoryRoom, mistake: Mistake) -> MountConfig:
    hot, warm = config.hot, config.warm
    used: list[tuple[str, Path]] = []
    if hot is not None:
        used.append(("hot.path", hot.path))
    if warm is not None:
        if (warm.path is None) == (not warm.paths):
            found = "is missing" if warm.path is None else "is given beside warm.paths"
            raise mistake("warm.path", f"{found}; expected either warm.path or warm.paths")
        if not 0 < warm.low_watermark < warm.high_watermark:
            raise mistake(
                "warm.low_watermark",
                f"is {float(warm.low_watermark):g}; expected more than 0 and less than warm.high_watermark, "
                f"which is {float(warm.high_watermark):g}",
            )
        used += [("warm.path" if warm.path else "warm.paths", path) for path in warm.directories]
    for index, (key, path) in enumerate(used):
        for other_key, other in used[:index]:
            first, second = path.resolve(), other.resolve()
            if first.is_relative_to(second) or second.is_relative_to(first):
                raise mistake(key, f'has "{path}"; expected a directory apart from "{other}" of {other_key}')
    if hot is not None and hot.capacity == COMPUTED_SIZE:
        capacity = _default_capacity([hot.path], "hot.capacity", mistake)
        if on_tmpfs(hot.path):
            capacity = _within_memory(capacity, hot.path, config.memory.limit, room, mistake)
        hot = msgspec.structs.replace(hot, capacity=capacity)
    if warm is not None and warm.capacity == COMPUTED_SIZE:
        warm = msgspec.structs.replace(warm, capacity=_default_capacity(warm.directories, "warm.capacity", mistake))
    return msgspec.structs.replace(config, hot=hot, warm=warm)


def _default_capacity(directories: Iterable[Path], key: str, mistake: Mistake) -> Size:
    """90% of what is free on the directories' file systems, and of what they hold already.

    The part they hold is counted in, so that a restart with a full tier does not shrink it.
    """
    total = 0
    devices: set[int] = set()
    for directory in directories:
        try:
            total += _allocated_bytes(directory)
            existing = next(path for path in (directory, *directory.parents) if path.exists())
            if existing.stat().st_dev not in devices:
                devices.add(existing.stat().st_dev)
                space = os.statvfs(existing)
                total += space.f_bavail * space.f_frsize
        except OSError as error:
            raise mistake(key, f"is missing and {directory} cannot be measured ({error}); expected a size") from error
    capacity = int(total * CAPACITY_SHARE)
    if capacity < PAGE_BYTES:
        raise mistake(key, 'is missing and no space is free; expected a size such as "64GiB"')
    return Size(capacity)


def on_tmpfs(directory: Path) -> bool:
    """Whether what is written there takes memory. Raises OSError."""
    entry = mount_of(nearest_existing(directory), mounts())
    return entry is not None and entry.file_system in ("tmpfs", "ramfs")


def _within_memory(capacity: Size, directory: Path, buffers_bytes: int, room: MemoryRoom, mistake: Mistake) -> Size:
    """The capacity, or what memory has left beside the daemon's buffers where that is less: a tmpfs promises more."""
    free = min(room.available_bytes + _allocated_bytes(directory), room.limit_bytes) - buffers_bytes
    fitting = int(free * CAPACITY_SHARE)
    if fitting < PAGE_BYTES:
        raise mistake(
            "hot.capacity",
            f"is missing, and beside memory.limit ({format_bytes(buffers_bytes)}) {room.owner} has no memory left;"
            ' expected a size such as "64GiB", or no hot tier',
        )
    return Size(min(capacity, fitting))


def _allocated_bytes(directory: Path) -> int:
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a daemon that still runs may evict meanwhile
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total


def _positive(value: Duration, key: str, mistake: Mistake) -> None:
    if value <= 0:
        raise mistake(key, f"is {format_duration(value)}; expected more than 0")


def _check_block_size(block_bytes: Size, key: str, mistake: Mistake) -> None:
    if not PAGE_BYTES <= block_bytes <= BLOCK_BYTES_MAX or block_bytes % PAGE_BYTES:
        raise mistake(key, f"is {format_bytes(block_bytes)}; expected a multiple of 4KiB from 4KiB to 64MiB")


def _check_memory(limit_bytes: Size, key: str, block_bytes: Size, mistake: Mistake) -> None:
    least = BLOCKS_IN_MEMORY_MIN * block_bytes
    if limit_bytes < least:
        raise mistake(
            key,
            f"is {format_bytes(limit_bytes)}; expected at least {format_bytes(least)}, which is "
            f"{BLOCKS_IN_MEMORY_MIN} blocks of {format_bytes(block_bytes)}",
        )


def _check_token(path: Path | None, key: str, mistake: Mistake) -> None:
    if path is None:
        return
    try:
        load_token(path)
    except ConfigError as error:
        raise mistake(key, f'is "{path}"; expected a readable file with a token in it ({error})') from error


def _check_readable(path: Path | None, key: str, mistake: Mistake) -> None:
    if path is None:
        return
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise mistake(key, f'is "{path}"; expected a file that can be read ({error.strerror})') from error
