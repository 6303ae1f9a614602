"""Values to Ray's own exporter, from which each node serves them as Prometheus text."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Protocol

from outrider.telemetry.metrics import Metric

Labels = tuple[tuple[str, str], ...]


class Instrument(Protocol):
    """The part in use of Ray's counters, gauges and histograms."""

    def inc(self, value: float, tags: dict[str, str]) -> None: ...
    def set(self, value: float, tags: dict[str, str]) -> None: ...
    def observe(self, value: float, tags: dict[str, str]) -> None: ...


def ray_instrument(metric: Metric) -> Any:
    """Inside of a Serve replica its series carry deployment, replica and application besides."""
    from ray.serve import metrics  # takes a second, and is for replicas only

    if metric.kind == "histogram":
        return metrics.Histogram(metric.name, metric.meaning, list(metric.buckets), metric.labels)
    kind = metrics.Counter if metric.kind == "counter" else metrics.Gauge
    return kind(metric.name, metric.meaning, metric.labels)


class Instruments:
    """One process's metrics. Recording takes microseconds: for requests and once a second, not for tokens."""

    def __init__(self, metrics: Iterable[Metric], make: Any = ray_instrument) -> None:
        self._instruments: dict[str, Instrument] = {metric.name: make(metric) for metric in metrics}
        self._told: defaultdict[tuple[str, Labels], float] = defaultdict(float)

    def total(self, name: str, value: float, **labels: str) -> None:
        """A counter stands at ``value`` now."""
        key = name, tuple(labels.items())
        more = value - self._told[key]
        if more > 0.0:
            self._told[key] = value
            self._instruments[name].inc(more, labels)

    def set(self, name: str, value: float, **labels: str) -> None:
        """A gauge; one that is not set again within two reports of Ray's disappears."""
        self._instruments[name].set(value, labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """One more value of a histogram."""
        self._instruments[name].observe(value, labels)
