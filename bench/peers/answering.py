"""Task, timing and result of a peer, equal for all peers. The only package it needs is psutil.

Each peer is a process in the environment in which it is installed. It reads a task, loads its models, answers
the task's prompts in batches and writes the measured times.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]


@dataclass(frozen=True)
class PeerTask:
    """Task of a peer.

    draft: None for plain decoding.
    prompts: token ids of each prompt.
    """

    target: str
    draft: str | None
    depth: int | None  # drafted tokens per round; None: the pace of a service decides
    threads: int
    streams: tuple[int, ...]
    prompts: list[list[int]]
    tokens: int  # length of every answer
    temperature: float  # temperature of a seeded answer
    seeded: int  # number of seeded answers
    repetitions: int
    result: str  # file that the peer writes


@dataclass(frozen=True)
class Answers:
    """Answers to some prompts.

    passes: passes of the target, summed over sequences; None: not reported.
    """

    token_ids: list[list[int]]
    passes: int | None


# Answers all prompts in one batch: greedily, or with one seed for each prompt.
Answer = Callable[[list[list[int]], Sequence[int] | None], Answers]


def answer_task(task: PeerTask, answer: Answer) -> None:
    """Answers the prompts of a task and writes its result."""
    rows = [_timed(task, streams, answer) for streams in task.streams]
    seeded = answer(task.prompts[: task.seeded], range(task.seeded)).token_ids
    Path(task.result).write_text(json.dumps({"rows": rows, "seeded": seeded}))


def _timed(task: PeerTask, streams: int, answer: Answer) -> dict[str, Any]:
    """Returns a row. Its ``cores`` are the mean number of busy cores of this process and its children."""
    prompts = [task.prompts[number % len(task.prompts)] for number in range(streams)]
    answer(prompts, None)  # warms up
    seconds, busy, passes, tokens = [], 0.0, 0, 0
    is_told = True
    for _ in range(task.repetitions):
        before, started = _spent(), time.perf_counter()
        answers = answer(prompts, None)
        seconds.append(time.perf_counter() - started)
        busy += _spent() - before
        tokens += sum(map(len, answers.token_ids))
        is_told = is_told and answers.passes is not None
        passes += answers.passes or 0
    return {
        "streams": streams,
        "rate": tokens / task.repetitions / statistics.median(seconds),
        "cores": busy / sum(seconds),
        "tokens_per_pass": tokens / passes if is_told else None,
    }


def _spent() -> float:
    """Returns the processor seconds of this process and its running children so far."""
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in [own, *own.children(recursive=True)])


def read_task() -> PeerTask:
    """Reads the task from the file that the first argument of this process names."""
    stored = json.loads(Path(sys.argv[1]).read_text())
    return PeerTask(**stored)
