"""What recording costs the processes that do the work, with Ray's own instruments: `python -m bench metrics`.

Sequences and engine are stand-ins that hold numbers; what is timed is the code of
gateway/observe/metrics.py and actors/metrics.py, and Ray's.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import ray

from actors.messages import Report, Stepped
from actors.metrics import EngineMetrics
from bench.report import save, table
from gateway.generation.totals import Totals
from gateway.loop.stats import Stats
from gateway.observe.metrics import publish
from gateway.settings import Speculation
from outrider.engine.loop.step_timings import StepTimings
from outrider.engine.work import Load
from outrider.telemetry.instruments import Instruments
from outrider.telemetry.metrics import OF_GATEWAYS, OF_WORKERS

REPETITIONS = 2000
SEQUENCES, TASKS = 64, 8
SPECULATION = Speculation(drafter="model")
LOAD = Load(decoding=8, running=8, waiting=0, free_blocks=900, total_blocks=1000)


def measure() -> list[dict[str, Any]]:
    """A row per thing that is recorded; microseconds, medians."""
    of_worker = EngineMetrics(Instruments(OF_WORKERS), "target", "cuda:0")
    results: Any = (SimpleNamespace(timings=SimpleNamespace(queue=1e-4)),) * 8
    timings = StepTimings(1e-4, 1e-2, 1e-4, 1.02e-2, 8, 40, "graph")
    stepped, report = Stepped(results, (1,) * 8, LOAD, 0, (timings,)), Report(LOAD, 10**9)

    totals, of_gateway = Totals(), Instruments(OF_GATEWAYS)
    generation: Any = SimpleNamespace(
        totals=totals,
        admission=SimpleNamespace(running=SEQUENCES, waiting=0),
        settings=SimpleNamespace(model="m"),
        plain_rate=lambda: 100.0,
    )
    all_stats = [
        Stats(drafted=1, accepted_lengths=Counter({8: 1}), transitions=Counter({("on", "measured"): 1}))
        for _ in range(SEQUENCES)
    ]
    under_way = ExitStack()  # without it they would be over at once
    for number, stats in enumerate(all_stats):
        rounds: Any = SequenceStandIn(stats)
        under_way.enter_context(totals.counting(rounds, f"task {number % TASKS}", SPECULATION))

    def second(requests: int) -> None:
        for stats in all_stats:  # every counter has something new to tell
            stats.rounds += 1
            stats.target_passes += 1
            stats.accepted_lengths[8] += 1
        for _ in range(requests):
            with totals.timing("chat") as timing:
                timing.has_turn()
                timing.add(8)
        publish(generation, of_gateway)

    assert sum(one.sequences for one in totals.in_force().values()) == SEQUENCES
    quiet = _microseconds(lambda: second(0), REPETITIONS // 10)
    busy = _microseconds(lambda: second(10), REPETITIONS // 10)
    of_step = _microseconds(lambda: of_worker.stepped(stepped))
    of_second = _microseconds(lambda: of_worker.publish(report))
    return [
        {"of": "target worker", "what": "a step with eight answers", "microseconds": of_step},
        {"of": "target worker", "what": "once a second", "microseconds": of_second},
        {
            "of": "gateway",
            "what": f"once a second, {SEQUENCES} sequences, {TASKS} tasks",
            "microseconds": quiet,
        },
        {"of": "gateway", "what": "a request", "microseconds": (busy - quiet) / 10},
    ]


class SequenceStandIn:
    reason, depth = "measured", 4

    def __init__(self, stats: Stats) -> None:
        self.stats = stats


def _microseconds(record: Callable[[], None], repetitions: int = REPETITIONS) -> float:
    taken = []
    for _ in range(repetitions):
        begun = time.perf_counter()
        record()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken) * 1e6


def main(arguments: Sequence[str]) -> None:
    argparse.ArgumentParser(prog="python -m bench metrics", description="What recording costs.").parse_args(
        arguments
    )
    ray.init(include_dashboard=False, log_to_driver=False)
    rows = measure()
    print(table(rows))
    print(save("metrics", rows))
