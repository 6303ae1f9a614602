"""Fake instruments that record what a gateway publishes."""

from collections import defaultdict

from outrider.telemetry.metrics import OF_GATEWAYS


class Published:
    """Stub of Ray's instruments, which accepts only names and labels of the table of metrics."""

    def __init__(self):
        self._labels = {metric.name: {*metric.labels} for metric in OF_GATEWAYS}
        self.totals, self.gauges, self.observed = {}, {}, defaultdict(list)

    def _key(self, name, labels):
        assert labels.keys() == self._labels[name]
        return (name, *labels.values())

    def total(self, name, value, **labels):
        self.totals[self._key(name, labels)] = value

    def add(self, name, value, **labels):
        key = self._key(name, labels)
        self.totals[key] = self.totals.get(key, 0) + value

    def set(self, name, value, **labels):
        self.gauges[self._key(name, labels)] = value

    def observe(self, name, value, **labels):
        self._key(name, labels)
        self.observed[name].append((value, labels))
