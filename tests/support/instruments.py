"""Fake Ray instruments that record values."""

from collections import defaultdict

from outrider.telemetry.instruments import Instrument
from outrider.telemetry.metrics import Metric


class Told:
    """Sums of counters and histograms, and last values of gauges, by name and by the label path, if any."""

    def __init__(self) -> None:
        self.values: defaultdict[tuple[str, str], float] = defaultdict(float)

    def instrument(self, metric: Metric) -> Instrument:
        return _Kept(metric, self.values)


class _Kept:
    def __init__(self, metric: Metric, values: defaultdict[tuple[str, str], float]) -> None:
        self._metric = metric
        self._values = values

    def inc(self, value: float, tags: dict[str, str]) -> None:
        self._values[self._key(tags)] += value

    def set(self, value: float, tags: dict[str, str]) -> None:
        self._values[self._key(tags)] = value

    def observe(self, value: float, tags: dict[str, str]) -> None:
        assert self._metric.kind == "histogram"
        self._values[self._key(tags)] += value

    def _key(self, tags: dict[str, str]) -> tuple[str, str]:
        assert tags.keys() == {*self._metric.labels}, f"{self._metric.name} has the labels {tags}"
        return self._metric.name, tags.get("path", "")
