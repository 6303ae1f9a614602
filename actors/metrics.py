"""Metrics of a worker: figures of its engine, and names of the metrics by which Serve scales."""

from collections import Counter, defaultdict

from actors.messages import EngineReport, Stepped
from outrider.engine.step_timings import Path
from outrider.engine.work import Failed
from outrider.telemetry.instruments import Instruments

# Metrics for Serve's autoscaler.
SEQUENCES = "sequences"  # open sequences: running, waiting, between two rounds
CACHE_IN_USE = "cache_in_use"  # share of the cache blocks in use
FIRST_TOKEN = "first_token_s"  # p90 of recent times to first token; targets only


class EngineMetrics:
    """Sums the figures of steps, and publishes the sums on request."""

    def __init__(self, instruments: Instruments, role: str, device: str) -> None:
        """device: device of the engine, as torch names it."""
        self._instruments = instruments
        self._role = role
        self._on_gpu = device != "cpu"
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._gpu_steps: Counter[Path] = Counter()
        self._unpublished: list[float] = []  # seconds of steps; a histogram needs each value

    def stepped(self, stepped: Stepped) -> None:
        """Counts the results and the steps of a message."""
        totals = self._totals
        for result in stepped.results:
            if isinstance(result, Failed):
                totals["outrider_blamed_sequences"] += 1
                continue
            totals["outrider_works"] += 1
            totals["outrider_work_queue_seconds"] += result.timings.queue
        for step in stepped.steps:
            totals["outrider_steps"] += 1
            totals["outrider_busy_seconds"] += step.total
            totals["outrider_forward_seconds"] += step.forward
            totals["outrider_sample_seconds"] += step.sample
            totals["outrider_step_tokens"] += step.tokens
            if self._on_gpu:
                self._gpu_steps[step.path] += 1
            self._unpublished.append(step.total)

    def publish(self, report: EngineReport) -> None:
        for name, total in self._totals.items():
            self._instruments.total(name, total, role=self._role)
        for path, steps in self._gpu_steps.items():
            self._instruments.total("outrider_gpu_steps", steps, role=self._role, path=path)
        for seconds in self._unpublished:
            self._instruments.observe("outrider_step_seconds", seconds, role=self._role)
        self._unpublished.clear()
        load = report.load
        gauges = {
            "outrider_sequences_running": load.running,
            "outrider_sequences_waiting": load.waiting,
            "outrider_cache_blocks_used": load.total_blocks - load.free_blocks,
            "outrider_cache_blocks_free": load.free_blocks,
            "outrider_device_memory_free_bytes": report.free_memory,
        }
        for name, value in gauges.items():
            self._instruments.set(name, value, role=self._role)
