"""The schema of both configuration files. It is also the text of docs/CONFIGURATION.md (see document.py).

Made by load.py, read by ``app``. A field's annotation carries its one line of documentation and its bounds; relations
between keys are checked in load.py. What load.py returns is complete: a field whose default depends on the machine
(a tier's capacity, ``mount.request_timeout``) has its real value there.
"""

import os
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from tierfs.blocks.units import Duration, Rate, Share, Size
from tierfs.config.addresses import DEFAULT_PORT

COMPUTED_SIZE = Size(0)  # replaced by load.py
COMPUTED_DURATION = Duration(0)  # replaced by load.py

MIB = 1 << 20
_Id = Annotated[int, Meta(ge=0, le=2**32 - 2)]  # the highest means "no change" to the kernel
BLOCK_BYTES = Size(4 * MIB)
TEXT_DEFAULTS = {  # what the documentation says where a default is computed
    "hot.capacity": "90% of what its file system has for it, and on a tmpfs of what the machine and its cgroups have",
    "warm.capacity": "90% of what its file systems have for it",
    "memory.limit": "1GiB, but at most a quarter of what the machine and its cgroups have",
    "mount.request_timeout": "source.timeout and 30 s",
    "mount.uid": "the owner of the daemon",
    "mount.gid": "the group of the daemon",
    "state_dir": "/var/lib/tierfs as root, else $XDG_STATE_HOME/tierfs",
    "server.state_dir": "/var/lib/tierfs as root, else $XDG_STATE_HOME/tierfs",
}


def default_state_dir() -> Path:
    """``/var/lib/tierfs`` for root, the XDG state directory for others."""
    if os.geteuid() == 0:
        return Path("/var/lib/tierfs")
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local/state") / "tierfs"


class LogConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is logged, and where to."""

    level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="the least severe line kept")] = (
        "info"
    )
    file: Annotated[
        Path | None,
        Meta(description="append to this file; else standard error, or `STATE_DIR/log/` for a mount in the background"),
    ] = None
    format: Annotated[Literal["text", "json"], Meta(description="one line of text or one JSON object per event")] = (
        "text"
    )


class SourceConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where blocks come from when no tier has them."""

    url: Annotated[
        str, Meta(description="`tierfs://HOST:PORT/EXPORT`, or `dir:/path` for a directory (NFS, Lustre, a disk)")
    ]
    token_file: Annotated[Path | None, Meta(description="file with the export's shared token")] = None
    timeout: Annotated[
        Duration, Meta(description="how long a missing block is retried before its reader gets an I/O error")
    ] = Duration(30)
    connections: Annotated[int, Meta(ge=1, le=64, description="parallel connections to the server")] = 4
    transport: Annotated[
        Literal["auto", "rdma", "tcp"],
        Meta(
            description="how blocks come: `rdma`, `tcp`, or `auto`: RDMA while both ends have it, else TCP"
            " (`tierfs status` says why). RDMA pins `memory.limit` (docs/RDMA.md)"
        ),
    ] = "auto"
    tls: Annotated[bool, Meta(description="speak TLS with the server")] = False
    tls_ca_file: Annotated[
        Path | None, Meta(description="PEM certificates to trust instead of the system's; needs `tls`")
    ] = None
    rescan: Annotated[Duration, Meta(description="for `dir:`, how often the tree is looked at again")] = Duration(2)
    block_size: Annotated[
        Size, Meta(description="for `dir:`, the unit of caching: a multiple of 4KiB, up to 64MiB")
    ] = BLOCK_BYTES


class HotConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hot tier: memory. Without this table there is none."""

    path: Annotated[Path, Meta(description="directory on a DAX file system or a tmpfs; needed in this table")]
    capacity: Annotated[Size, Meta(description="most bytes the tier may hold")] = COMPUTED_SIZE
    admit: Annotated[
        Literal["first", "second", "pinned"],
        Meta(
            description="what enters by being loaded: `first` everything, `second` what is loaded a second time,"
            " `pinned` what is pinned (`tierfs warm` and `tierfs pin` with `--tier hot` bring models in whatever this"
            " says). A model that is warm already is brought as a whole, once its load is over"
        ),
    ] = "first"


class WarmConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The warm tier: local disks. Without this table there is none."""

    path: Annotated[Path | None, Meta(description="directory on a local file system")] = None
    paths: Annotated[tuple[Path, ...], Meta(description="several directories, one per device, instead of `path`")] = ()
    capacity: Annotated[Size, Meta(description="most bytes the tier may hold, over all its directories")] = (
        COMPUTED_SIZE
    )
    high_watermark: Annotated[Share, Meta(description="eviction begins above this share of the capacity")] = Share(0.95)
    low_watermark: Annotated[Share, Meta(description="and ends below this one")] = Share(0.90)
    write_queue: Annotated[Size, Meta(description="most bytes waiting to be written; more skip the tier")] = Size(
        256 * MIB
    )

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories of the tier, whichever key named them."""
        return self.paths if self.path is None else (self.path,)


class MemoryConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The daemon's buffers."""

    limit: Annotated[Size, Meta(description="most bytes of buffers; at least 16 blocks")] = COMPUTED_SIZE


class ReadaheadConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far ahead of a sequential reader blocks are fetched."""

    window_max: Annotated[Size, Meta(description="largest window of one stream")] = Size(256 * MIB)
    window_min: Annotated[Size, Meta(description="smallest window of one stream; never under one block")] = BLOCK_BYTES
    rate_max: Annotated[
        Rate | None, Meta(description="most bytes a second that prefetch may fetch, demand not counted; else no limit")
    ] = None
    streams_max: Annotated[int, Meta(ge=1, le=4096, description="sequential streams followed at once")] = 64


class KernelMountConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The mount as the kernel sees it. It is always read-only, nosuid and nodev."""

    mode: Annotated[
        Literal["auto", "channel", "direct"],
        Meta(
            description="`channel`: `tierfs-channel` owns the mount, which outlives its daemon and reads at native"
            " speed; `direct`: the daemon does; `auto`: the channel where it is installed"
        ),
    ] = "auto"
    restart_grace: Annotated[
        Duration,
        Meta(description="under a channel, how long readers wait for a new daemon; whole seconds, up to a day"),
    ] = Duration(60)
    user: Annotated[
        str | None,
        Meta(
            description="under a channel, the user the daemon runs as; needs root, and owns tiers and state afterwards"
        ),
    ] = None
    allow_other: Annotated[bool, Meta(description="let other users read (unprivileged: see fuse.conf)")] = True
    uid: Annotated[_Id | None, Meta(description="owner of every file")] = None
    gid: Annotated[_Id | None, Meta(description="group of every file")] = None
    metadata_ttl: Annotated[Duration, Meta(description="how long the kernel may keep names and attributes")] = Duration(
        5
    )
    read_ahead: Annotated[Size, Meta(description="the kernel's own read-ahead; larger than 128KiB needs root")] = (
        BLOCK_BYTES
    )
    max_background: Annotated[
        int, Meta(ge=1, le=65535, description="requests the kernel may have under way; more than 12 needs root")
    ] = 64
    request_timeout: Annotated[
        Duration, Meta(description="longest time until any request is answered; not under `source.timeout`")
    ] = COMPUTED_DURATION


class MetricsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures for Prometheus. See [METRICS.md](METRICS.md)."""

    listen: Annotated[
        str | None,
        Meta(
            description="`unix:/path` or `tcp://HOST:PORT`: answer `GET /metrics` there, to whoever can reach it;"
            " without it nothing listens"
        ),
    ] = None


class MountConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``tierfs mount CONFIG MOUNTPOINT`` reads."""

    source: SourceConfig
    hot: HotConfig | None = None
    warm: WarmConfig | None = None
    memory: MemoryConfig = MemoryConfig()
    readahead: ReadaheadConfig = ReadaheadConfig()
    mount: KernelMountConfig = KernelMountConfig()
    metrics: MetricsConfig = MetricsConfig()
    log: LogConfig = LogConfig()
    state_dir: Annotated[
        Path, Meta(description="what the daemon remembers: the last catalog, inode numbers; and its log")
    ] = field(default_factory=default_state_dir)


class ServerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server, for all its exports."""

    listen: Annotated[
        tuple[str, ...],
        Meta(min_length=1, description="addresses to listen on; one that others can reach needs a token per export"),
    ] = (f"tcp://127.0.0.1:{DEFAULT_PORT}",)
    token_file: Annotated[Path | None, Meta(description="file with the token of exports without their own")] = None
    tls_cert_file: Annotated[Path | None, Meta(description="PEM certificate chain; turns TLS on")] = None
    tls_key_file: Annotated[Path | None, Meta(description="PEM private key of that certificate")] = None
    state_dir: Annotated[Path, Meta(description="remembered digests and catalogs; outside every export")] = field(
        default_factory=default_state_dir
    )
    max_connections: Annotated[int, Meta(ge=1, le=65535, description="connections at once; more are refused")] = 1024
    memory_limit: Annotated[Size, Meta(description="most bytes of buffers; at least 16 blocks")] = Size(512 * MIB)
    rdma_memory: Annotated[
        Size, Meta(description="most bytes of pinned buffers, beside these, for clients with RDMA; 0 offers no RDMA")
    ] = Size(512 * MIB)


class ExportConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One exported directory; NAME is what follows the slash in `tierfs://HOST:PORT/NAME`."""

    path: Annotated[Path, Meta(description="the directory; needed in this table")]
    settle: Annotated[Duration, Meta(description="keep a file out until it has been still this long")] = Duration(0)
    rescan: Annotated[Duration, Meta(description="how often the tree is looked at again")] = Duration(2)
    block_size: Annotated[Size, Meta(description="the unit of caching: a multiple of 4KiB, up to 64MiB")] = BLOCK_BYTES
    digest_workers: Annotated[int, Meta(ge=1, le=256, description="files digested at once")] = 2
    digest: Annotated[bool, Meta(description="digest files in the background, so that equal files are one")] = True
    token_file: Annotated[Path | None, Meta(description="file with the token of this export")] = None


class ServeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``tierfs serve CONFIG`` reads."""

    exports: dict[str, ExportConfig]
    server: ServerConfig = ServerConfig()
    metrics: MetricsConfig = MetricsConfig()
    log: LogConfig = LogConfig()
