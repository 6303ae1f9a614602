"""Metrics as Prometheus sees them."""

from outrider.telemetry.metrics import Metric

ENDINGS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


def series_of(metric: Metric) -> tuple[str, ...]:
    """Names of its series as Ray's exporter writes them."""
    return tuple(f"ray_{metric.name}{ending}" for ending in ENDINGS[metric.kind])
