"""Two answers to GetLoads, some time apart, as numbers per second."""

import math
from collections import defaultdict
from dataclasses import dataclass, field

from protos import generation_pb2

Loads = generation_pb2.Loads
FORGOTTEN_S = 10.0  # after which a gateway that was not heard is gone
COUNTED = ("tokens", "target_passes", "rounds", "drafted", "verified", "accepted", "fallbacks", "reopenings")


@dataclass
class TaskRates:
    """Of one task label and drafter, over all gateways that were heard twice."""

    per_second: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0.0))

    def ratio(self, above: str, below: str) -> float | None:
        """None where nothing happened."""
        return self.per_second[above] / self.per_second[below] if self.per_second[below] else None


class LoadHistory:
    """Each of several gateways knows only its own; whichever answers is taken in."""

    def __init__(self) -> None:
        self.newest: dict[str, Loads] = {}  # by gateway
        self._before: dict[str, Loads] = {}
        self._heard: dict[str, float] = {}

    def add(self, loads: Loads, now: float) -> None:
        """now: seconds, of any clock that goes on."""
        if loads.gateway in self.newest:
            self._before[loads.gateway] = self.newest[loads.gateway]
        self.newest[loads.gateway], self._heard[loads.gateway] = loads, now
        for gateway in [name for name, heard in self._heard.items() if now - heard > FORGOTTEN_S]:
            del self.newest[gateway], self._heard[gateway]
            self._before.pop(gateway, None)

    def rates(self) -> dict[tuple[str, str], TaskRates]:
        """By task and drafter, since the answer before the newest one of each gateway."""
        rates: defaultdict[tuple[str, str], TaskRates] = defaultdict(TaskRates)
        for gateway, before in self._before.items():
            newest = self.newest[gateway]
            seconds = newest.uptime_s - before.uptime_s
            known = {(task.task, task.drafter): task for task in before.tasks}
            for task in newest.tasks:
                old = known.get((task.task, task.drafter), generation_pb2.TaskTotals())
                of_task = rates[task.task, task.drafter]
                for name in COUNTED:
                    of_task.per_second[name] += (getattr(task, name) - getattr(old, name)) / seconds
        return dict(rates)

    def depths(self) -> dict[str, tuple[int, float]]:
        """By what decides them: sequences, and their mean depth."""
        depths: dict[str, tuple[int, float]] = {}
        for depth in (depth for loads in self.newest.values() for depth in loads.depths):
            sequences, mean = depths.get(depth.reason, (0, 0.0))
            together = sequences + depth.sequences
            total = sequences * mean + depth.sequences * depth.mean_depth
            depths[depth.reason] = together, total / together
        return depths

    def workers(self) -> list[generation_pb2.WorkerLoad]:
        """Each as the gateway tells it that heard it last."""
        told = [worker for loads in self.newest.values() for worker in loads.workers]
        told.sort(key=lambda worker: worker.heard_s if worker.HasField("heard_s") else math.inf, reverse=True)
        return list({worker.address: worker for worker in told}.values())
