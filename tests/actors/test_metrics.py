"""What a worker counts of its engine's steps."""

import pytest

from actors.messages import EngineReport, Stepped
from actors.metrics import EngineMetrics
from outrider.engine.step_timings import Path, StepTimings
from outrider.engine.work import EngineLoad
from outrider.telemetry.instruments import Instruments
from outrider.telemetry.metrics import OF_WORKERS
from tests.support.instruments import Told

LOAD = EngineLoad(decoding=0, running=0, waiting=0, free_blocks=3, total_blocks=4)
PATHS: tuple[Path, ...] = ("graph", "gathered", "graph", "kernels")


def counted(device: str) -> Told:
    """Totals of two looks at an engine, each after a step by each path."""
    told = Told()
    metrics = EngineMetrics(Instruments(OF_WORKERS, told.instrument), "target", device)
    steps = tuple(StepTimings(0.1, 0.2, 0.3, 0.6, 1, 5, path) for path in PATHS)
    for _ in range(2):
        metrics.stepped(Stepped((), (), LOAD, 0, steps))
        metrics.publish(EngineReport(LOAD, 0))
    return told


def test_steps_on_a_gpu_are_counted_by_their_path() -> None:
    values = counted("cuda:0").values
    of_path = {path: values["outrider_gpu_steps", path] for path in PATHS}
    assert of_path == {"graph": 4, "gathered": 2, "kernels": 2}
    assert sum(of_path.values()) == values["outrider_steps", ""]


def test_metrics_of_a_cpu_count_no_gpu_step() -> None:
    values = counted("cpu").values
    assert values["outrider_steps", ""] == 8
    assert values["outrider_busy_seconds", ""] == pytest.approx(8 * 0.6)
    assert values["outrider_step_seconds", ""] == pytest.approx(8 * 0.6)
    assert not any(name == "outrider_gpu_steps" for name, _ in values)
