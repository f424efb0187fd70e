"""Figures as Prometheus reads them: from nested mappings to the text exposition format 0.0.4. Pure.

metrics.py (a mount) and server_metrics.py (a server) have the tables and call this for each scrape.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from tierfs.blocks.histogram import BOUNDS_S, Histogram

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


@dataclass(frozen=True)
class Figure:
    """One metric. ``at`` is its place among the values, where each ``*`` is a key that becomes the next of ``labels``.

    With ``states`` the text found there is one of these: a sample for each of them, 1 for the one that is so, and its
    name is the last label.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    at: str
    help: str
    labels: tuple[str, ...] = ()
    states: tuple[str, ...] = ()


def render(families: Iterable[Metric]) -> bytes:
    """The page with these families."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    """What prometheus_client asks for the families of one scrape."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def describe(self) -> Iterator[Metric]:
        return iter(())  # registering need not collect

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def info(figure: Figure, values: Mapping[str, object]) -> Metric:
    """1, with the labels of the figure as they are in ``values``."""
    family = GaugeMetricFamily(figure.name, figure.help, labels=figure.labels)
    family.add_metric([_text(values[label]) for label in figure.labels], 1)
    return family


def histograms(figure: Figure, by_label: Mapping[str, Histogram]) -> Metric:
    """A histogram for each value of the figure's one label."""
    family = HistogramMetricFamily(figure.name, figure.help, labels=figure.labels)
    for label, histogram in by_label.items():
        family.add_metric([label], _buckets(histogram), histogram.total_s)
    return family


def family_of(figure: Figure, values: Mapping[str, Any]) -> Metric:
    """What lies at the figure's place; nothing there, no sample."""
    kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily = kind(figure.name, figure.help, labels=figure.labels)
    for labels, value in _found(values, figure.at.split(".")):
        if figure.states:
            for state in figure.states:
                family.add_metric([*labels, state], float(value == state))
        else:
            family.add_metric(labels, float(value))
    return family


def _found(value: Any, keys: Sequence[str]) -> Iterator[tuple[list[str], Any]]:
    """What lies there, with the keys that the stars stand for. The key of one in a list is its ``path``."""
    if not keys:
        yield [], value
        return
    if isinstance(value, list):
        value = {str(one["path"]): one for one in value}
    if not isinstance(value, Mapping):
        return
    first, rest = keys[0], keys[1:]
    if first == "*":
        for key, inner in value.items():
            for labels, found in _found(inner, rest):
                yield [_text(key), *labels], found
    elif first in value:
        yield from _found(value[first], rest)


def _text(value: object) -> str:
    """As a label may be: a path can have bytes that are no text."""
    return str(value).encode(errors="backslashreplace").decode()


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Counts of at most each bound."""
    running = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip([*map(str, BOUNDS_S), "+Inf"], histogram.counts, strict=True):
        running += count
        buckets.append((bound, running))
    return buckets
