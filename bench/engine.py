"""Tokens per second plain and speculative in one process: `python -m bench engine`.

Per kind of text, batch size and depth, on the demo target inflated to a realistic cost and the demo draft.
The bound charges each target pass what one measured plain step costs, and nothing for drafting; textbook is
the expected tokens per round (1 - a^(K+1)) / (1 - a) at the measured acceptance rate a, no bound because
acceptance is not independent. Plain and speculative runs alternate; ratios are medians over the repetitions.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer

from bench.checkpoints import DRAFT, INFLATED, inflated_target
from bench.report import save, table
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import KINDS, prompts
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.drafters.drafter import Drafter
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, Output, generate
from outrider.engine.settings import EngineSettings
from outrider.pace.acceptance import expected_tokens

CACHE_BYTES = 2**29


@dataclass(frozen=True)
class MeasuredRun:
    """Answers to the requests in one mode."""

    seconds: float
    outputs: Sequence[Output]
    draft_seconds: float  # inside the drafter
    passes: int  # steps of the target; a batch shares them

    @property
    def tokens(self) -> int:
        return sum(len(output.tokens) for output in self.outputs)


class TimedDrafter(DraftModel):
    """The draft model, and how long it took."""

    seconds = 0.0

    def propose(self, *arguments: Any) -> Any:
        """Times the draft model."""
        started = time.perf_counter()
        drafts = super().propose(*arguments)
        self.seconds += time.perf_counter() - started
        return drafts


def run(target: Engine, draft: Engine, requests: Sequence[OfflineRequest], depth: int) -> MeasuredRun:
    """Answers all requests at once; depth 0 is plain decoding."""
    timed = TimedDrafter(draft)
    drafter: Drafter | None = timed if depth else None
    started = time.perf_counter()
    outputs = generate(target, drafter, requests, depth)
    seconds = time.perf_counter() - started
    return MeasuredRun(seconds, outputs, timed.seconds, max(output.target_passes for output in outputs))


def requests_of(
    kind: str, tokenizer: Tokenizer, batch: int, tokens: int, temperature: float
) -> list[OfflineRequest]:
    """Held-out prompts of a kind; generation goes on after an end of sequence, so that batches stay full."""
    sampling = Sampling(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    encoded = [tuple(tokenizer.encode(prompt).ids) for prompt in prompts(kind, 20)]
    return [
        OfflineRequest(encoded[i % len(encoded)], sampling, noise_key(i, 0, encoded[i % len(encoded)]))
        for i in range(batch)
    ]


def row_of(
    kind: str, batch: int, depth: int, pairs: Sequence[tuple[MeasuredRun, MeasuredRun]]
) -> dict[str, Any]:
    """Returns a line of the table from (plain, speculative) runs of the same requests."""
    plain, speculative = pairs[0]
    plain_step = statistics.median(run.seconds / run.passes for run, _ in pairs)
    drafted = sum(output.drafted for output in speculative.outputs)
    accepted = sum(output.accepted for output in speculative.outputs)
    rounds = sum(output.target_passes for output in speculative.outputs)
    emitted_per_pass = speculative.tokens / rounds
    bound = plain.passes / speculative.passes
    ratio = statistics.median(before.seconds / after.seconds for before, after in pairs)
    verify_step = statistics.median((run.seconds - run.draft_seconds) / run.passes for _, run in pairs)
    rate = acceptance_rate(emitted_per_pass, depth)
    return {
        "kind": kind,
        "batch": batch,
        "depth": depth,
        "plain tokens/s": plain.tokens / statistics.median(run.seconds for run, _ in pairs),
        "tokens/s": speculative.tokens / statistics.median(run.seconds for _, run in pairs),
        "ratio": ratio,
        "bound": bound,
        "share of bound": ratio / bound,
        "tokens / pass": emitted_per_pass,
        "acceptance rate": rate,
        "accepted / drafted": accepted / drafted,
        "textbook": expected_tokens(rate, depth),
        "verify / plain step": verify_step / plain_step,
        "draft share": statistics.median(run.draft_seconds / run.seconds for _, run in pairs),
        "same tokens": sum(
            a.tokens == b.tokens for a, b in zip(plain.outputs, speculative.outputs, strict=True)
        ),
    }


def acceptance_rate(emitted_per_pass: float, depth: int) -> float:
    """Returns the rate per reached position, taken as equal at all positions: solved by bisection."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, depth) < emitted_per_pass else (low, middle)
    return low


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    target_path = inflated_target(arguments.target)
    target = engine_of(str(target_path), arguments)
    draft = engine_of(str(DRAFT), arguments)
    tokenizer = Tokenizer.from_file(str(target_path / "tokenizer.json"))
    rows: list[dict[str, Any]] = []
    for batch in arguments.batches:
        for kind in KINDS:
            groups = -(-arguments.requests // batch)
            requests = requests_of(kind, tokenizer, batch * groups, arguments.tokens, arguments.temperature)
            pairs: dict[int, list[tuple[MeasuredRun, MeasuredRun]]] = {
                depth: [] for depth in arguments.depths
            }
            run(target, draft, requests[:batch], 4)  # warms up
            for _ in range(arguments.repetitions):
                plain = in_groups(target, draft, requests, batch, 0)
                for depth in arguments.depths:
                    pairs[depth].append((plain, in_groups(target, draft, requests, batch, depth)))
            rows += (new := [row_of(kind, batch, depth, pairs[depth]) for depth in arguments.depths])
            print(table(new), flush=True)
    return rows


def in_groups(
    target: Engine, draft: Engine, requests: list[OfflineRequest], batch: int, depth: int
) -> MeasuredRun:
    """Answers all requests, ``batch`` at a time, as one run."""
    runs = [run(target, draft, requests[i : i + batch], depth) for i in range(0, len(requests), batch)]
    outputs = [output for part in runs for output in part.outputs]
    seconds, draft_seconds = sum(part.seconds for part in runs), sum(part.draft_seconds for part in runs)
    return MeasuredRun(seconds, outputs, draft_seconds, sum(part.passes for part in runs))


def engine_of(path: str, arguments: argparse.Namespace) -> Engine:
    return Engine.from_settings(
        EngineSettings(model=path, dtype=arguments.dtype, threads=arguments.threads, cache_memory=CACHE_BYTES)
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench engine", description=__doc__.partition("\n")[0])
    parser.add_argument("--target", choices=INFLATED, default="190M")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 3, 4, 6])
    parser.add_argument("--requests", type=int, default=4, help="per kind, rounded up to whole batches")
    parser.add_argument("--tokens", type=int, default=64, help="generated per request")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows = measure(options)
    print("\nmean over kinds\n" + table(means(rows)))
    print(save("engine", rows, means=means(rows)))


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ratio to plain, a mean over the kinds of text, by batch and depth."""
    by_shape: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        by_shape.setdefault((row["batch"], row["depth"]), []).append(row["ratio"])
    return [
        {"batch": batch, "depth": depth, "ratio": statistics.mean(ratios)}
        for (batch, depth), ratios in by_shape.items()
    ]
