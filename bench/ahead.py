"""Measures what draft-ahead gives, and where a round's time goes: `python -m bench ahead`.

Draft and target are processes of their own behind real gRPC, as in the service; this process is the gateway,
one stream at a time. Besides the small draft as it is there are drafts whose step is held to a share of the
target's: a real draft has memory of its own, and a larger one here would slow the target. Each is run with
draft-ahead and without, at several fixed depths, in turns; compared are the best depths of both sides, in
tokens per second, medians of the repetitions, mean over the tasks.

The time line adds up to the time between two Verdicts: the target's and the draft's steps, waiting for a step
to begin, the wire with the event loops at its ends, and the gateway (RoundParts of bench/answers.py). The
bound charges each of the target's passes what a plain step costs, and nothing else.
"""

import argparse
import asyncio
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from bench.answers import AnswerRun, answer, answer_all, mean_round
from bench.checkpoints import DRAFT, INFLATED, inflated_target
from bench.distance import at_distance
from bench.engine import CACHE_BYTES, requests_of
from bench.report import save, table
from bench.simulate import predicted
from gateway.workers.streams import WorkerInfo
from outrider.demo.prompts import KINDS
from outrider.engine.offline.speculate import OfflineRequest
from tests.support.process_worker import worker_process

BRANCHES = 12
DEPTHS = {
    0.0: (3, 4, 6),
    0.2: (2, 3, 4),
    0.45: (1, 2, 3),
}  # depths by the share of the draft's step in the target's
DELAY_MS = 2.0
CROWD, CROWD_DEPTHS = 32, (1, 2)
HOPS = 4  # hops of a round


@contextmanager
def drafts_of(step_s: float, dtype: str) -> Iterator[dict[bool, WorkerInfo]]:
    """Draft workers with draft-ahead (True) and without, a step held to take so long."""
    with ExitStack() as stack:
        yield {
            ahead: stack.enter_context(
                worker_process(
                    "draft",
                    DRAFT,
                    threads=1,
                    dtype=dtype,
                    cache_memory=CACHE_BYTES,
                    draft_ahead=BRANCHES * ahead,
                    shortest_step_s=step_s,
                )
            )
            for ahead in (False, True)
        }


class Comparison:
    """Runs of the same requests with draft-ahead and without, at several depths."""

    def __init__(self, target: WorkerInfo, drafts: dict[bool, WorkerInfo], depths: Sequence[int]) -> None:
        self._workers = {ahead: [target, draft] for ahead, draft in drafts.items()}
        self._depths = depths
        self.runs: dict[tuple[str, bool, int], list[AnswerRun]] = defaultdict(
            list
        )  # runs by (task, ahead, depth)

    def run(self, requests: Sequence[tuple[str, OfflineRequest]], delay_ms: float = 0.0) -> None:
        """Once each, in turns."""
        with ExitStack() as stack:
            workers = {
                ahead: stack.enter_context(at_distance(pair, delay_ms))
                for ahead, pair in self._workers.items()
            }
            for task, request in requests:
                for depth in self._depths:
                    for ahead, pair in workers.items():
                        run = asyncio.run(answer(pair, request, depth))
                        self.runs[task, ahead, depth].append(run)

    def rate(self, ahead: bool, depth: int) -> float:
        """Tokens per second, mean over the tasks of the medians."""
        return statistics.mean(
            statistics.median(run.rate for run in runs)
            for (_, side, at), runs in self.runs.items()
            if (side, at) == (ahead, depth)
        )

    def best(self, ahead: bool) -> int:
        """The best depth."""
        return max(self._depths, key=lambda depth: self.rate(ahead, depth))

    def of(self, ahead: bool, depth: int, task: str | None = None) -> list[AnswerRun]:
        """Returns the runs so far: of one task, or of all tasks."""
        return [
            run
            for (name, side, at), runs in self.runs.items()
            if (side, at) == (ahead, depth) and task in (None, name)
            for run in runs
        ]


def foreseen_share(runs: Sequence[AnswerRun]) -> float:
    """Share of foreseen verdicts among those after which a Draft was asked for."""
    verdicts = sum(run.stats.prepared_for for run in runs)
    return sum(run.stats.ahead_hits.total() for run in runs) / max(verdicts, 1)


def row_of(comparison: Comparison, share: float, temperature: float, plain_step_s: float) -> dict[str, Any]:
    without, ahead = comparison.best(False), comparison.best(True)
    runs = comparison.of(True, ahead)
    tokens, passes = sum(run.tokens for run in runs), sum(len(run.rounds) for run in runs)
    bound = tokens / (passes * plain_step_s)
    return {
        "draft / target step": share,
        "temperature": temperature,
        "depth without": without,
        "tokens/s without": comparison.rate(False, without),
        "depth with": ahead,
        "tokens/s with": comparison.rate(True, ahead),
        "with / without": comparison.rate(True, ahead) / comparison.rate(False, without),
        "predicted": predicted_gain(comparison, plain_step_s),
        "foreseen": foreseen_share(runs),
        "target had it": sum(run.stats.continued for run in runs) / passes,
        "share of the bound": tokens / sum(run.seconds for run in runs) / bound,
    }


def predicted_gain(comparison: Comparison, plain_step_s: float) -> float:
    """Ratio of speeds with draft-ahead to without, by the simulator (bench/simulate.py), mean over the tasks.

    It is given what was measured: steps, hops, acceptance and the share of verdicts foreseen.
    """
    without, ahead = comparison.best(False), comparison.best(True)
    gains = []
    for task in dict.fromkeys(task for task, _, _ in comparison.runs):
        runs, alone = comparison.of(True, ahead, task), comparison.of(False, without, task)
        per_round = mean_round(alone)
        per_token = max(per_round["target"] - plain_step_s, 0.0) / without
        hop_s = (per_round["wire"] + per_round["gateway"]) / HOPS
        reached = sum(run.stats.reached for run in (*runs, *alone))
        acceptance = sum(run.stats.accepted for run in (*runs, *alone)) / max(reached, 1)
        rates = [
            predicted(
                partial(_step_s, plain_step_s, per_token),
                per_round["draft"] / without,
                hop_s,
                acceptance,
                foreseen_share(runs),
                depth,
                is_ahead,
            )
            for is_ahead, depth in ((True, ahead), (False, without))
        ]
        gains.append(rates[0] / rates[1])
    return statistics.mean(gains)


def _step_s(plain_step_s: float, per_token_s: float, tokens: float) -> float:
    return plain_step_s + per_token_s * (tokens - 1.0)


def lines_of(comparison: Comparison, share: float, temperature: float, plain_step_s: float) -> list[Any]:
    """Milliseconds of a round per task, with draft-ahead and without, at the best depths."""
    lines = []
    for ahead in dict.fromkeys(ahead for _, ahead, _ in comparison.runs):
        depth = comparison.best(ahead)
        for task in dict.fromkeys(task for task, _, _ in comparison.runs):
            runs = comparison.of(ahead, depth, task)
            rounds = sum(len(run.rounds) for run in runs)
            lines.append(
                {
                    "draft / target step": share,
                    "temperature": temperature,
                    "task": task,
                    "draft-ahead": ahead,
                    "depth": depth,
                    "tokens per round": sum(run.tokens for run in runs) / rounds,
                    **{part: 1e3 * seconds for part, seconds in mean_round(runs).items()},
                    "bound": 1e3 * plain_step_s,
                }
            )
    return lines


def plain_step(target: WorkerInfo, requests: Sequence[tuple[str, OfflineRequest]]) -> float:
    """Seconds of a plain step of one stream, median over the tasks."""
    runs = [asyncio.run(answer([target], request, 0)) for _, request in requests]
    return statistics.median(mean_round([run])["target"] for run in runs)


def measure(options: argparse.Namespace) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Comparisons, time lines, distance, many streams."""
    path = inflated_target(options.target)
    tokenizer = Tokenizer.from_file(str(DRAFT / "tokenizer.json"))
    rows, lines, far, many = [], [], [], []
    with worker_process(
        "target", path, threads=options.threads, dtype=options.dtype, cache_memory=CACHE_BYTES
    ) as target:
        asked = {
            temperature: [
                (kind, requests_of(kind, tokenizer, 1, options.tokens, temperature)[0])
                for kind in options.tasks
            ]
            for temperature in options.temperatures
        }
        plain_step_s = plain_step(target, next(iter(asked.values())))
        for share in options.shares:
            with drafts_of(share * plain_step_s, options.dtype) as drafts:
                for temperature, requests in asked.items():
                    comparison = Comparison(target, drafts, DEPTHS[share])
                    comparison.run(requests[:1])  # opens connections
                    comparison.runs.clear()
                    for _ in range(options.repetitions):
                        comparison.run(requests)
                    expected = {task: asyncio.run(answer([target], request, 0)) for task, request in requests}
                    for (task, _, _), runs in comparison.runs.items():
                        assert all(run.generated == expected[task].generated for run in runs), task
                    rows.append(row_of(comparison, share, temperature, plain_step_s))
                    lines += lines_of(comparison, share, temperature, plain_step_s)
                    print(table(rows[-1:]), flush=True)
                    if share == 0.0:
                        far.append(distance(target, drafts, requests, comparison, temperature, options))
                        print(table(far[-1:]), flush=True)
                if share == 0.0:
                    many.append(crowd(target, drafts, tokenizer, options))
                    print(table(many), flush=True)
    return rows, lines, far, many


def crowd(
    target: WorkerInfo, drafts: dict[bool, WorkerInfo], tokenizer: Tokenizer, options: argparse.Namespace
) -> dict[str, Any]:
    """Measures many streams: then the draft has hardly any time to spare."""
    requests = [
        request
        for kind in options.tasks
        for request in requests_of(kind, tokenizer, -(-CROWD // len(options.tasks)), options.tokens, 0.7)
    ][:CROWD]
    rates: dict[bool, dict[int, list[float]]] = {
        ahead: {depth: [] for depth in CROWD_DEPTHS} for ahead in drafts
    }
    for _ in range(options.repetitions):
        for depth in CROWD_DEPTHS:
            for ahead, draft in drafts.items():
                rates[ahead][depth].append(asyncio.run(answer_all([target, draft], requests, depth)))
    best = {ahead: max(map(statistics.median, of_depths.values())) for ahead, of_depths in rates.items()}
    return {
        "streams": len(requests),
        "tokens/s without": best[False],
        "tokens/s with": best[True],
        "with / without": best[True] / best[False],
    }


def distance(
    target: WorkerInfo,
    drafts: dict[bool, WorkerInfo],
    requests: Sequence[tuple[str, OfflineRequest]],
    near: Comparison,
    temperature: float,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Measures the loss by a longer way to both workers, at the depths that are best without delay."""
    row: dict[str, Any] = {"temperature": temperature, "delay per hop, ms": DELAY_MS}
    for ahead, name in ((False, "loss without"), (True, "loss with")):
        depth = near.best(ahead)
        far = Comparison(target, {ahead: drafts[ahead]}, [depth])
        for _ in range(options.repetitions):
            far.run(requests, DELAY_MS)
        row[name] = 1.0 - far.rate(ahead, depth) / near.rate(ahead, depth)
    return row | {"with / without": row["loss with"] / row["loss without"]}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench ahead", description=__doc__.partition("\n")[0])
    parser.add_argument("--target", choices=INFLATED, default="190M")
    parser.add_argument("--threads", type=int, default=2, help="of the target; the draft has one")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=64, help="generated per request, one request per task")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--shares", type=float, nargs="+", default=[*DEPTHS], choices=[*DEPTHS])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    options = parser.parse_args(arguments)
    rows, lines, far, many = measure(options)
    print(table(lines))
    print(save("ahead", rows, threads=options.threads, time_lines=lines, distance=far, crowd=many))
