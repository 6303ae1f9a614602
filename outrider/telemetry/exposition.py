"""Metrics of one process as Prometheus text, in addition to Ray's exporter."""

from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from outrider.telemetry.instruments import Instrument, ray_instrument
from outrider.telemetry.metrics import Metric

GATEWAY = "gateway"  # label of every series: the gateway that recorded it
RAYS, VLLMS = "vllm_", "vllm:"  # prefixes of vLLM's names, as Ray accepts them and as vLLM writes them


class Exposition:
    """Prometheus text of one gateway's metrics, with vLLM's original names and without Ray's prefix."""

    def __init__(self, gateway: str) -> None:
        """gateway: unique name of the gateway."""
        # the additional ``_created`` series of each counter, which nothing reads
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._gateway = gateway
        self._registry = CollectorRegistry()

    def instrument(self, metric: Metric) -> Instrument:
        """Returns an instrument that records for the text and for Ray's exporter."""
        name, labels = metric.name.replace(RAYS, VLLMS, 1), (*metric.labels, GATEWAY)
        own: Any
        if metric.kind == "histogram":
            own = Histogram(name, metric.meaning, labels, registry=self._registry, buckets=metric.buckets)
        else:
            kind = Counter if metric.kind == "counter" else Gauge
            own = kind(name, metric.meaning, labels, registry=self._registry)
        return _RecordedTwice(own, ray_instrument(metric), self._gateway)

    def text(self) -> bytes:
        """Returns all series in Prometheus' text format."""
        return generate_latest(self._registry)


class _RecordedTwice:
    """Instrument that records both for the text and for Ray's exporter."""

    def __init__(self, own: Any, of_ray: Instrument, gateway: str) -> None:
        self._own, self._of_ray, self._gateway = own, of_ray, gateway

    def inc(self, value: float, tags: dict[str, str]) -> None:
        self._series(tags).inc(value)
        self._of_ray.inc(value, tags)

    def set(self, value: float, tags: dict[str, str]) -> None:
        self._series(tags).set(value)
        self._of_ray.set(value, tags)

    def observe(self, value: float, tags: dict[str, str]) -> None:
        self._series(tags).observe(value)
        self._of_ray.observe(value, tags)

    def _series(self, tags: dict[str, str]) -> Any:
        return self._own.labels(**tags, **{GATEWAY: self._gateway})
