"""Metrics under Prometheus' names."""

from outrider.telemetry.metrics import Metric

ENDINGS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


def series_of(metric: Metric) -> tuple[str, ...]:
    """Returns the names of a metric's series in Ray's exporter."""
    return tuple(f"ray_{metric.name}{ending}" for ending in ENDINGS[metric.kind])
