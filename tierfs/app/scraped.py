"""The metrics of a mount daemon, where `metrics.listen` asks for them. Run by mount.py beside the session."""

from importlib import import_module
from pathlib import Path

import trio

from tierfs.config.addresses import parse_metrics_listen
from tierfs.config.schema import MetricsConfig
from tierfs.control.commands import Daemon, figures


def socket_of(config: MetricsConfig) -> Path | None:
    """The Unix socket it names, if it names one."""
    where = None if config.listen is None else parse_metrics_listen(config.listen)
    return where if isinstance(where, Path) else None


async def run(config: MetricsConfig, daemon: Daemon) -> None:
    """Answer scrapes until cancelled; returns at once where none are asked for."""
    if config.listen is None:
        return
    # Only here: other daemons are spared the time and the memory of prometheus_client; in a thread, for readers may be
    # there already.
    await trio.to_thread.run_sync(import_module, "tierfs.control.metrics", limiter=trio.CapacityLimiter(1))
    from tierfs.control import metrics, scraping

    await scraping.serve(
        parse_metrics_listen(config.listen),
        lambda: metrics.render(figures(daemon), daemon.requests.latencies),
        content_type=metrics.CONTENT_TYPE,
    )
