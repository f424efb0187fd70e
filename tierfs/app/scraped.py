"""The metrics of a mount daemon or a server, where `metrics.listen` asks for them. mount.py and serve.py run it."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from tierfs.config.addresses import parse_metrics_listen
from tierfs.config.schema import MetricsConfig

if TYPE_CHECKING:  # neither process needs what the other one is made of
    from tierfs.control.commands import Daemon
    from tierfs.server.listener import Server
    from tierfs.tiers.interface import Source


def socket_of(config: MetricsConfig) -> Path | None:
    """The Unix socket it names, if it names one."""
    where = None if config.listen is None else parse_metrics_listen(config.listen)
    return where if isinstance(where, Path) else None


async def run(config: MetricsConfig, daemon: "Daemon") -> None:
    """Answer scrapes of a mount until cancelled; returns at once where none are asked for."""

    def page() -> bytes:
        from tierfs.control import metrics
        from tierfs.control.commands import figures

        return metrics.render(figures(daemon), daemon.requests.latencies)

    await _answer(config, "tierfs.control.metrics", page)


async def run_server(config: MetricsConfig, server: "Server", sources: "Mapping[str, Source]") -> None:
    """The same of a server; ``sources`` is what each export reads from."""
    started_s = trio.current_time()

    def page() -> bytes:
        from tierfs.control import server_metrics

        statistics = {name: source.statistics() for name, source in sources.items()}
        return server_metrics.render(server.statistics(), statistics, uptime_s=trio.current_time() - started_s)

    await _answer(config, "tierfs.control.server_metrics", page)


async def _answer(config: MetricsConfig, module: str, page: Callable[[], bytes]) -> None:
    if config.listen is None:
        return
    # Only here: other processes are spared the time and the memory of prometheus_client; in a thread, for readers may
    # be there already.
    await trio.to_thread.run_sync(import_module, module, limiter=trio.CapacityLimiter(1))
    from tierfs.control import exposition, scraping

    await scraping.serve(parse_metrics_listen(config.listen), page, content_type=exposition.CONTENT_TYPE)
