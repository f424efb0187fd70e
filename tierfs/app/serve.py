"""The server process: one directory source for each export, and the listener that sends their blocks."""

import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import trio

from tierfs.app import notify, scraped
from tierfs.app.limits import raise_descriptor_limit
from tierfs.app.secrets import server_tls
from tierfs.blocks.errors import TierfsError, first
from tierfs.config.addresses import Address
from tierfs.config.relations import load_token
from tierfs.config.schema import ServeConfig
from tierfs.server.limits import ServerLimits
from tierfs.server.listener import Server
from tierfs.server.rdma import RdmaService
from tierfs.tiers.directory import DirectorySource
from tierfs.transport.rdma.pyverbs_device import PyVerbs

log = logging.getLogger(__name__)

_PROGRESS_S = 10.0


def serve(config: ServeConfig, *, ready_file: Path | None) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP reads the certificate again. ``ready_file`` gets the URL of each export,
    one a line, once connections may come.

    Raises ConfigError (an export without a token on an address others can reach, an address in use).
    """
    raise_descriptor_limit()
    try:
        trio.run(_serve, config, ready_file)
    except* TierfsError as group:
        raise first(group) from group


async def _serve(config: ServeConfig, ready_file: Path | None) -> None:
    sources = {
        name: DirectorySource(
            export.path,
            name=name,
            block_bytes=int(export.block_size),
            state_directory=config.server.state_dir / "exports",
            settle_s=export.settle,
            rescan_s=export.rescan,
            digest_workers=export.digest_workers,
            digest=export.digest,
        )
        for name, export in config.exports.items()
    }
    token_files = {name: export.token_file or config.server.token_file for name, export in config.exports.items()}
    tokens = {name: None if path is None else load_token(path) for name, path in token_files.items()}
    server = Server(
        sources,
        listen=config.server.listen,
        tokens=tokens,
        tls=server_tls(config.server.tls_cert_file, config.server.tls_key_file),
        limits=ServerLimits(
            connections=config.server.max_connections,
            connections_per_address=max(8, config.server.max_connections // 4),
            in_flight_bytes=config.server.memory_limit,
        ),
        rdma=RdmaService(PyVerbs, memory_bytes=config.server.rdma_memory) if config.server.rdma_memory else None,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_signals, nursery.cancel_scope, server, config)
        for source in sources.values():
            await nursery.start(_run_source, source)
        addresses: Sequence[Address] = await nursery.start(server.run)
        if ready_file is not None:
            urls = [f"tierfs://{address.host_port}/{name}" for address in addresses for name in sources]
            temporary = ready_file.with_name(ready_file.name + ".new")
            temporary.write_text("".join(url + "\n" for url in urls))
            temporary.replace(ready_file)
        notify.ready(f"serving on {', '.join(address.host_port for address in addresses)}")
        nursery.start_soon(_report_progress, sources)
        nursery.start_soon(scraped.run_server, config.metrics, server, sources)


async def _run_source(source: DirectorySource, *, task_status: "trio.TaskStatus[None]") -> None:
    await source.run(task_status=task_status)


async def _signals(scope: trio.CancelScope, server: Server, config: ServeConfig) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as received:
        async for number in received:
            if number == signal.SIGHUP:
                _renew_certificate(server, config)
                continue
            log.info("stopping signal=%d pid=%d", number, os.getpid())
            scope.cancel()


def _renew_certificate(server: Server, config: ServeConfig) -> None:
    """Read the certificate's files again; with a mistake in them the old one stays."""
    cert_file = config.server.tls_cert_file
    try:
        renewed = server_tls(cert_file, config.server.tls_key_file)
    except TierfsError as error:
        log.error("certificate_not_renewed reason=%s", error)
        return
    if renewed is not None:
        server.renew_tls(renewed)
        log.info("certificate_renewed file=%s", cert_file)


async def _report_progress(sources: dict[str, DirectorySource]) -> None:
    last: dict[str, int] = {}
    while True:
        await trio.sleep(_PROGRESS_S)
        for name, source in sources.items():
            statistics = source.statistics()
            done, total = statistics.digested_bytes, statistics.digest_total_bytes
            if last.get(name) != done:
                log.info("digesting export=%s done_bytes=%d total_bytes=%d", name or "/", done, total)
                last[name] = done
