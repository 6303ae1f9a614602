"""An engine's numbers to its instruments. Everything here runs in the engine's thread."""

from collections import defaultdict
from collections.abc import Iterable

from outrider.engine.engine import Engine
from outrider.engine.runner import StepTimings
from outrider.engine.work import Failed, Result
from outrider.telemetry.instruments import Instruments


class EngineMetrics:
    """What every step adds is summed here, and published now and then."""

    def __init__(self, engine: Engine, instruments: Instruments, role: str) -> None:
        self._engine = engine
        self._instruments = instruments
        self._role = role
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._newest: StepTimings | None = None  # that was counted

    def stepped(self, results: Iterable[Result]) -> None:
        """After a step that answered with these."""
        step, totals = self._engine.last_step, self._totals
        for result in results:
            if isinstance(result, Failed):
                totals["outrider_blamed_sequences"] += 1
                continue
            totals["outrider_works"] += 1
            totals["outrider_work_queue_seconds"] += result.timings.queue
        if step is None or step is self._newest:
            return  # what was answered took no step
        self._newest = step
        totals["outrider_steps"] += 1
        totals["outrider_busy_seconds"] += step.total
        totals["outrider_forward_seconds"] += step.forward
        totals["outrider_sample_seconds"] += step.sample
        totals["outrider_step_tokens"] += step.tokens
        self._instruments.observe("outrider_step_seconds", step.total, role=self._role)

    def publish(self) -> None:
        for name, total in self._totals.items():
            self._instruments.total(name, total, role=self._role)
        load = self._engine.load()
        gauges = {
            "outrider_sequences_running": load.running,
            "outrider_sequences_waiting": load.waiting,
            "outrider_cache_blocks_used": load.total_blocks - load.free_blocks,
            "outrider_cache_blocks_free": load.free_blocks,
            "outrider_device_memory_free_bytes": self._engine.free_memory(),
        }
        for name, value in gauges.items():
            self._instruments.set(name, value, role=self._role)
