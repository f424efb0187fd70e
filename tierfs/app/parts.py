"""The source and the tiers that a configuration names, built for the mount daemon."""

from pathlib import Path

from tierfs.app.places import source_directory
from tierfs.app.secrets import client_tls
from tierfs.blocks.errors import MountFailed, SourceUnavailable
from tierfs.blocks.units import format_bytes
from tierfs.cache.buffers import BufferPool
from tierfs.config.relations import load_token
from tierfs.config.schema import MountConfig
from tierfs.tiers.directory import DirectorySource
from tierfs.tiers.interface import Source
from tierfs.tiers.local import DirectoryTier
from tierfs.tiers.remote import RemoteSource
from tierfs.tiers.remote_rdma import RdmaReader
from tierfs.transport.rdma.pyverbs_device import PyVerbs
from tierfs.wire.channel import PARTS_MAX

_READ_BYTES = 256 * 4096  # the kernel's largest read: the channel asks for no more
_RDMA_TIMEOUT_S = 10.0  # of the READs of one block, at most


def make_source(config: MountConfig) -> Source:
    """The source the configuration names."""
    settings = config.source
    directory = source_directory(config)
    if directory is not None:
        return DirectorySource(
            directory,
            name=str(directory),
            block_bytes=int(settings.block_size),
            state_directory=None,
            rescan_s=settings.rescan,
            digest=False,
        )
    rdma, reason = None, ""
    if settings.transport == "tcp":
        reason = 'source.transport is "tcp"'
    elif settings.tls:
        reason = "source.tls is on, and RDMA does not encrypt"
    else:
        # Two tries, a lease and a READ each, and then TCP: all within the reader's deadline.
        rdma = RdmaReader(PyVerbs, source=settings.url, timeout_s=min(_RDMA_TIMEOUT_S, settings.timeout / 8))
    return RemoteSource(
        settings.url,
        rdma=rdma,
        rdma_only=settings.transport == "rdma",
        no_rdma_reason=reason,
        token=None if settings.token_file is None else load_token(settings.token_file),
        connections=settings.connections,
        tls=client_tls(enabled=settings.tls, ca_file=settings.tls_ca_file),
        # A silent server must be given up often enough for another try within the reader's deadline.
        request_timeout_s=min(15.0, settings.timeout / 2),
    )


async def offer_memory(source: Source, pool: BufferPool) -> None:
    """Let RDMA begin, where the source has it. Raises MountFailed where it is wanted alone and cannot be had."""
    if not isinstance(source, RemoteSource):
        return
    try:
        await source.use_memory(pool.memory, block_bytes=pool.block_bytes, key="memory.limit")
    except SourceUnavailable as error:
        raise MountFailed(
            f'source.transport is "rdma", which cannot be used: {error}; "auto" goes over TCP then'
        ) from error


def make_tiers(config: MountConfig, block_bytes: int, *, starts_without: bool) -> list[DirectoryTier]:
    """Hot, then warm, as far as they are configured. ``starts_without``: see DirectoryTier."""
    tiers: list[DirectoryTier] = []
    # Blocks that wait to be written hold buffers of the pool; a quarter of it is the most they may take.
    queue_limit = config.memory.limit // 4
    if config.hot:
        tiers.append(
            DirectoryTier(
                "hot",
                [Path(config.hot.path)],
                block_bytes=block_bytes,
                capacity_bytes=config.hot.capacity,
                write_queue_bytes=queue_limit,
                mapped=True,
                starts_without=starts_without,
            )
        )
    if config.warm:
        tiers.append(
            DirectoryTier(
                "warm",
                [Path(path) for path in config.warm.directories],
                block_bytes=block_bytes,
                capacity_bytes=config.warm.capacity,
                high_watermark=config.warm.high_watermark,
                low_watermark=config.warm.low_watermark,
                write_queue_bytes=min(config.warm.write_queue, queue_limit),
                mapped=False,
                starts_without=starts_without,
            )
        )
    return tiers


def check_largest_read(block_bytes: int, *, memory_limit_bytes: int) -> None:
    """Refuse blocks of which the kernel's largest read touches more than the channel takes in one reply, or than half
    of the memory (what requests under way may hold together) has twice. Raises MountFailed.
    """
    blocks = _READ_BYTES // block_bytes + 1
    if memory_limit_bytes < 4 * blocks * block_bytes:
        raise MountFailed(
            f"memory.limit is {format_bytes(memory_limit_bytes)}, but a read of the kernel touches {blocks} of the"
            f" export's blocks of {format_bytes(block_bytes)}: set at least {format_bytes(4 * blocks * block_bytes)}"
        )
    if blocks > PARTS_MAX:
        raise MountFailed(
            f"the export's blocks of {format_bytes(block_bytes)} are too small for the channel: serve it with larger"
            ' ones, or set mount.mode = "direct"'
        )
