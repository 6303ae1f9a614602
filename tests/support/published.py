"""What a gateway publishes, kept."""

from collections import defaultdict

from outrider.telemetry.metrics import OF_GATEWAYS


class Published:
    """Stands in for Ray's instruments; refuses names that the table does not have."""

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
