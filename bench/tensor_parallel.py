"""What it costs a step to be coordinated between two processes: `python -m bench tensor_parallel`.

The demo target inflated to 190 M parameters, float32: in one process, and shared by two over gloo on the same
machine, each with the same number of threads. Beside the steps, one exchange of each kind alone.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from transformers import AutoConfig

from bench.checkpoints import inflated_target
from bench.report import save, table
from bench.step import BATCHES, TOKENS, Stopwatch
from outrider.engine.forward.forward_pass import ForwardPass
from outrider.engine.loop.engine import Engine
from outrider.engine.parallel.follower import follow
from outrider.engine.parallel.rank_group import FRAME, RankGroup
from outrider.engine.settings import EngineSettings
from workshop.advice.steps import Steps

RANKS = 2
ALONE = 200  # repetitions of an exchange without a step around it
SHAPES = [(1, tokens) for tokens in TOKENS] + [(batch, 1) for batch in BATCHES]
EXCHANGES = ("broadcast", "all_reduce", "gather")


def settings_of(model: Path, threads: int, ranks: int) -> EngineSettings:
    return EngineSettings(
        model=str(model), dtype="float32", threads=threads, cache_memory=2**29, tensor_parallel=ranks
    )


def step_rows(engine: Engine, repetitions: int) -> list[dict[str, float]]:
    """By shape: milliseconds of a step, and of it inside each kind of exchange, medians."""
    watches = {name: Stopwatch() for name in EXCHANGES}
    originals = {name: getattr(dist, name) for name in EXCHANGES}
    for name, watch in watches.items():
        setattr(dist, name, watch.wrap(originals[name]))
    rows = []
    for shape in SHAPES:
        steps = Steps(engine, *shape)
        taken: dict[str, list[float]] = {name: [] for name in ("step", *EXCHANGES)}
        for _ in range(repetitions + 1):
            before = {name: watch.seconds for name, watch in watches.items()}
            taken["step"].append(steps.take())
            for name, watch in watches.items():
                taken[name].append(watch.seconds - before[name])
        steps.close()
        rows.append({name: statistics.median(times[1:]) * 1e3 for name, times in taken.items()})
    for name, original in originals.items():
        setattr(dist, name, original)
    return rows


def exchanges_alone(hidden: int, vocabulary: int, rank: int) -> dict[str, float]:
    """Milliseconds of one exchange of each kind as one token needs it, both ranks ready."""
    frame, rows = torch.zeros(FRAME, dtype=torch.int64), torch.zeros(1, 1, hidden)
    part = torch.zeros(1, 1, vocabulary // RANKS)
    parts = None if rank else [torch.empty_like(part) for _ in range(RANKS)]
    return {
        "broadcast": _alone(lambda: dist.broadcast(frame, 0)),
        "all_reduce": _alone(lambda: dist.all_reduce(rows)),
        "gather": _alone(lambda: dist.gather(part, parts)),
    }


def _alone(exchange: Callable[[], Any]) -> float:
    times = []
    for _ in range(ALONE):
        dist.barrier()
        begun = time.perf_counter()
        exchange()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e3


def part_of_rank(group: RankGroup, settings: EngineSettings, repetitions: int) -> Any:
    """Rank 0 answers with rows, and with the exchanges alone."""
    if group.rank:
        follow(ForwardPass(settings, group), group)
        return exchanges_alone(*group_sizes(settings), group.rank)
    engine = Engine.from_settings(settings, group)
    rows = step_rows(engine, repetitions)
    engine.shut_down()
    return rows, exchanges_alone(*group_sizes(settings), group.rank)


def group_sizes(settings: EngineSettings) -> tuple[int, int]:
    """Hidden size and vocabulary of the model."""
    config = AutoConfig.from_pretrained(settings.model).get_text_config()
    return config.hidden_size, config.vocab_size


def on_ranks(part: Callable[..., Any], *arguments: Any) -> Any:
    """What rank 0 answers, where each of RANKS processes does a part, which takes its group first."""
    spawn = multiprocessing.get_context("spawn")
    store, answer = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), spawn.SimpleQueue()
    processes = [
        spawn.Process(target=_run_rank, args=(rank, store.port, part, arguments, answer))
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    answered = answer.get()
    for process in processes:
        process.join()
    return answered


def _run_rank(rank: int, port: int, part: Callable[..., Any], arguments: Sequence[Any], answer: Any) -> None:
    done = part(RankGroup(TCPStore("127.0.0.1", port), rank, RANKS, torch.device("cpu")), *arguments)
    if not rank:
        answer.put(done)


def measure(threads: int, repetitions: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows by shape of the step, and the exchanges alone, in milliseconds."""
    model = inflated_target("190M")
    two, alone = on_ranks(part_of_rank, settings_of(model, threads, RANKS), repetitions)
    one = step_rows(Engine.from_settings(settings_of(model, threads, 1)), repetitions)
    rows = []
    for (sequences, tokens), single, double in zip(SHAPES, one, two, strict=True):
        exchanged = sum(double[name] for name in EXCHANGES)
        rows.append(
            {
                "sequences": sequences,
                "tokens each": tokens,
                "one process, ms": single["step"],
                "two processes, ms": double["step"],
                "two / one": double["step"] / single["step"],
                "of it broadcast, ms": double["broadcast"],
                "all-reduces, ms": double["all_reduce"],
                "gather, ms": double["gather"],
                "exchange / step": exchanged / double["step"],
            }
        )
    return rows, alone


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench tensor_parallel", description="What a tensor-parallel step costs."
    )
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--repetitions", type=int, default=20)
    options = parser.parse_args(arguments)
    rows, alone = measure(options.threads, options.repetitions)
    print(table(rows))
    print(table([{f"{name} alone, ms": ms for name, ms in alone.items()}]))
    print(save("tensor_parallel", rows, threads_of_each_process=options.threads, alone_ms=alone))
