"""Rates per second from two answers to GetLoads."""

import math
from collections import defaultdict
from dataclasses import dataclass, field

from protos import generation_pb2

Loads = generation_pb2.Loads
FORGOTTEN_S = 10.0  # seconds without an answer, after which a gateway is forgotten
TASK_FIELDS = generation_pb2.TaskTotals.DESCRIPTOR.fields
COUNTED = [field.name for field in TASK_FIELDS if field.cpp_type == field.CPPTYPE_DOUBLE]


@dataclass
class TaskRates:
    """Rates of one task label and drafter, over all gateways with two answers."""

    per_second: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0.0))

    def ratio(self, above: str, below: str) -> float | None:
        """Returns a ratio of rates; None if the denominator is 0."""
        return self.per_second[above] / self.per_second[below] if self.per_second[below] else None


class LoadHistory:
    """Newest answers of several gateways, each of which knows only its own load."""

    def __init__(self) -> None:
        self.newest: dict[str, Loads] = {}  # newest loads by gateway
        self._before: dict[str, Loads] = {}
        self._heard: dict[str, float] = {}  # time of the newest answer in seconds, by gateway

    def add(self, loads: Loads, now: float) -> None:
        """Adds an answer. now: seconds of a monotonic clock."""
        if loads.gateway in self.newest:
            self._before[loads.gateway] = self.newest[loads.gateway]
        self.newest[loads.gateway], self._heard[loads.gateway] = loads, now
        for gateway in [name for name, heard in self._heard.items() if now - heard > FORGOTTEN_S]:
            del self.newest[gateway], self._heard[gateway]
            self._before.pop(gateway, None)

    def rates(self) -> dict[tuple[str, str], TaskRates]:
        """Returns rates by task and drafter, between the two newest answers of each gateway."""
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
        """Returns the number of sequences and their mean depth, by the reason of the depth."""
        depths: dict[str, tuple[int, float]] = {}
        for depth in (depth for loads in self.newest.values() for depth in loads.depths):
            sequences, mean = depths.get(depth.reason, (0, 0.0))
            together = sequences + depth.sequences
            total = sequences * mean + depth.sequences * depth.mean_depth
            depths[depth.reason] = together, total / together
        return depths

    def workers(self) -> list[generation_pb2.WorkerLoad]:
        """Returns each worker, as reported by the gateway that heard from it most recently."""
        workers = [worker for loads in self.newest.values() for worker in loads.workers]
        workers.sort(
            key=lambda worker: worker.reply_age_s if worker.HasField("reply_age_s") else math.inf,
            reverse=True,
        )
        return list({worker.address: worker for worker in workers}.values())
