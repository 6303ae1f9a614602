"""Measures what draft-ahead gives one stream: `python -m bench ahead`.

Draft and target are processes of their own behind real gRPC, as in the service; this process is the gateway.
Besides the small draft as it is there are drafts whose step is held to a share of the target's: a real draft
has memory of its own, and a larger draft here would slow the target. Each is run with draft-ahead and
without, at several fixed depths, in turns. The best depths of both sides are compared, in tokens per second,
medians of the repetitions, mean over the tasks. The bound charges each of the target's passes what a token of
plain decoding takes, and nothing else.
"""

import argparse
import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from bench.checkpoints import DRAFT, INFLATED, inflated_target
from bench.engine import CACHE_BYTES, requests_of
from bench.report import parser_of, save, table
from gateway.loop.factory import LoopFactory
from gateway.loop.stats import Stats
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence
from gateway.settings import GatewaySettings, Speculation
from gateway.workers.fleet import Fleet
from gateway.workers.streams import WorkerInfo
from outrider.demo.prompts import KINDS
from outrider.engine.offline.speculate import OfflineRequest
from outrider.pace.settings import PaceSettings
from tests.support.process_worker import worker_process
from tests.support.trust import TRUST

BRANCHES = 12
# Depths by the share of the draft's step in the target's.
DEPTHS = {0.0: (3, 4, 6), 0.2: (2, 3, 4), 0.45: (1, 2, 3)}
FAR_AHEAD_S = 3600.0  # seconds from now, the deadline of a request
PLAIN = Speculation(mode="off", drafter="model")
SETTINGS = GatewaySettings(model="m", tokenizer="t", propose_deadline_ms=1e6)

Requests = Sequence[tuple[str, OfflineRequest]]  # each with its task


@dataclass(frozen=True)
class AnswerRun:
    """Answer of one request."""

    seconds: float  # seconds from the first Verdict on: all modes read the prompt alike
    generated: tuple[int, ...]
    stats: Stats

    @property
    def rate(self) -> float:
        """Tokens per second, without the first token."""
        return (len(self.generated) - 1) / self.seconds


async def answer(workers: Sequence[WorkerInfo], request: OfflineRequest, depth: int) -> AnswerRun:
    """Answers a request through a gateway with its own connections. depth: 0 for plain decoding."""
    fleet = Fleet(lambda: workers, TRUST)
    sequence = GatewaySequence(request.prompt, request.sampling, request.noise_key)
    speculation = Speculation(mode="fixed", depth=depth, drafter="model") if depth else PLAIN
    deadline = asyncio.get_running_loop().time() + FAR_AHEAD_S
    rounds = LoopFactory(fleet, Paces(PaceSettings()), SETTINGS).of(sequence, speculation, deadline)
    times = [time.perf_counter() async for _ in rounds.steps()]
    ended = time.perf_counter()
    await fleet.close()
    return AnswerRun(ended - times[0], tuple(sequence.generated), rounds.stats)


@contextmanager
def drafts_of(step_s: float) -> Iterator[dict[bool, WorkerInfo]]:
    """Starts draft workers with draft-ahead (True) and without, whose steps take ``step_s`` at least."""
    settings: dict[str, Any] = {"dtype": "float32", "cache_memory": CACHE_BYTES, "shortest_step_s": step_s}
    with ExitStack() as stack:
        yield {
            ahead: stack.enter_context(
                worker_process("draft", DRAFT, threads=1, draft_ahead=BRANCHES * ahead, **settings)
            )
            for ahead in (False, True)
        }


class Comparison:
    """Runs of the same requests with draft-ahead and without, at several depths."""

    def __init__(self, target: WorkerInfo, drafts: Mapping[bool, WorkerInfo], depths: Sequence[int]) -> None:
        self._target = target
        self._drafts = drafts
        self._depths = depths
        # Runs by task, draft-ahead and depth.
        self.runs: dict[tuple[str, bool, int], list[AnswerRun]] = defaultdict(list)

    def run(self, requests: Requests) -> None:
        """Runs each request once with each draft and depth, in turns."""
        for task, request in requests:
            for depth in self._depths:
                for ahead, draft in self._drafts.items():
                    run = asyncio.run(answer([self._target, draft], request, depth))
                    self.runs[task, ahead, depth].append(run)

    def rate(self, ahead: bool, depth: int) -> float:
        """Returns tokens per second: the mean over the tasks of the medians."""
        return statistics.mean(
            statistics.median(run.rate for run in runs)
            for (_, side, at), runs in self.runs.items()
            if (side, at) == (ahead, depth)
        )

    def best(self, ahead: bool) -> int:
        """Returns the fastest depth."""
        return max(self._depths, key=lambda depth: self.rate(ahead, depth))

    def of(self, depth: int) -> list[AnswerRun]:
        """Returns the runs with draft-ahead at a depth."""
        return [run for (_, ahead, at), runs in self.runs.items() if ahead and at == depth for run in runs]


def row_of(comparison: Comparison, share: float, temperature: float, plain_step_s: float) -> dict[str, Any]:
    without, ahead = comparison.best(False), comparison.best(True)
    runs = comparison.of(ahead)
    passes = sum(run.stats.target_passes - 1 for run in runs)  # the first reads the prompt
    verdicts = max(sum(run.stats.prepared_for for run in runs), 1)  # verdicts that a Draft followed
    return {
        "draft / target step": share,
        "temperature": temperature,
        "depth without": without,
        "tokens/s without": comparison.rate(False, without),
        "depth with": ahead,
        "tokens/s with": comparison.rate(True, ahead),
        "with / without": comparison.rate(True, ahead) / comparison.rate(False, without),
        "foreseen": sum(run.stats.ahead_hits.total() for run in runs) / verdicts,
        "target had it": sum(run.stats.continued for run in runs) / passes,
        "share of the bound": passes * plain_step_s / sum(run.seconds for run in runs),
    }


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each share and temperature. Raises AssertionError if a text is not the plain one."""
    path = inflated_target(options.target)
    tokenizer = Tokenizer.from_file(str(DRAFT / "tokenizer.json"))
    asked: dict[float, Requests] = {
        temperature: [
            (kind, requests_of(kind, tokenizer, 1, options.tokens, temperature)[0]) for kind in KINDS
        ]
        for temperature in options.temperatures
    }
    rows = []
    with worker_process(
        "target", path, threads=options.threads, dtype="float32", cache_memory=CACHE_BYTES
    ) as target:
        plain = {
            temperature: {task: asyncio.run(answer([target], request, 0)) for task, request in requests}
            for temperature, requests in asked.items()
        }
        plain_step_s = statistics.median(1 / run.rate for runs in plain.values() for run in runs.values())
        for share in options.shares:
            with drafts_of(share * plain_step_s) as drafts:
                for temperature, requests in asked.items():
                    comparison = Comparison(target, drafts, DEPTHS[share])
                    comparison.run(requests[:1])  # opens connections
                    comparison.runs.clear()
                    for _ in range(options.repetitions):
                        comparison.run(requests)
                    for (task, _, _), runs in comparison.runs.items():
                        expected = plain[temperature][task].generated
                        assert all(run.generated == expected for run in runs), task
                    rows.append(row_of(comparison, share, temperature, plain_step_s))
                    print(table(rows[-1:]), flush=True)
    return rows


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("ahead", __doc__)
    parser.add_argument("--target", choices=INFLATED, default="190M")
    parser.add_argument("--threads", type=int, default=2, help="threads of the target; the draft has one")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--shares", type=float, nargs="+", default=[*DEPTHS], choices=[*DEPTHS])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    options = parser.parse_args(arguments)
    print(save("ahead", measure(options), threads=options.threads))
