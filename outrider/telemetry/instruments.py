"""Metrics through Ray's own exporter, which serves them on each node as Prometheus text."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Protocol

from outrider.telemetry.metrics import Metric

Labels = tuple[tuple[str, str], ...]


class Instrument(Protocol):
    """Methods of Ray's counters, gauges and histograms that are used here."""

    def inc(self, value: float, tags: dict[str, str]) -> None: ...
    def set(self, value: float, tags: dict[str, str]) -> None: ...
    def observe(self, value: float, tags: dict[str, str]) -> None: ...


def ray_instrument(metric: Metric) -> Any:
    """Returns an instrument; in a Serve replica it adds labels of deployment, replica and application."""
    from ray.serve import metrics  # the import takes a second; only replicas need it

    if metric.kind == "histogram":
        return metrics.Histogram(metric.name, metric.meaning, list(metric.buckets), metric.labels)
    kind = metrics.Counter if metric.kind == "counter" else metrics.Gauge
    return kind(metric.name, metric.meaning, metric.labels)


class Instruments:
    """Metrics of one process. Recording a value takes microseconds, which is too long for each token."""

    def __init__(self, metrics: Iterable[Metric], make: Any = ray_instrument) -> None:
        self._instruments: dict[str, Instrument] = {metric.name: make(metric) for metric in metrics}
        self._told: defaultdict[tuple[str, Labels], float] = defaultdict(float)

    def total(self, name: str, value: float, **labels: str) -> None:
        """Raises a counter to ``value``; a lower value is ignored."""
        key = name, tuple(labels.items())
        more = value - self._told[key]
        if more > 0.0:
            self._told[key] = value
            self._instruments[name].inc(more, labels)

    def add(self, name: str, value: float, **labels: str) -> None:
        """Adds to a counter; no-op if ``value`` is 0, which Ray refuses."""
        if value > 0.0:
            self._instruments[name].inc(value, labels)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Sets a gauge, which disappears unless it is set again within two report intervals of Ray."""
        self._instruments[name].set(value, labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Adds a value to a histogram."""
        self._instruments[name].observe(value, labels)
