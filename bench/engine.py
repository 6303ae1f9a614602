"""Measures plain and speculative decoding in one process: `python -m bench engine`.

The demo target, inflated to a realistic cost, and the demo draft answer greedily, by kind of text, batch size
and depth. The bound assumes that a verifying step costs as much as a plain step, and drafting nothing. Plain
and speculative runs alternate; ratios are medians over the repetitions.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer

from bench.checkpoints import DRAFT, INFLATED, target_path
from bench.report import parser_of, save, table
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import KINDS, prompts
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, Output, generate
from outrider.engine.settings import EngineSettings
from outrider.engine.work import plain_decoding

CACHE_BYTES = 2**29


@dataclass(frozen=True)
class MeasuredRun:
    """Answers to some requests in one mode."""

    seconds: float
    outputs: Sequence[Output]
    passes: int  # steps of the target, counted once for a whole batch

    @property
    def tokens(self) -> int:
        return sum(len(output.tokens) for output in self.outputs)


def run(target: Engine, draft: Engine | None, requests: Sequence[OfflineRequest], depth: int) -> MeasuredRun:
    """Answers all requests in one batch; without a draft or at depth 0 by plain decoding."""
    drafter = DraftModel(draft) if draft is not None and depth else None
    started = time.perf_counter()
    outputs = generate(target, drafter, requests, depth)
    seconds = time.perf_counter() - started
    return MeasuredRun(seconds, outputs, max(output.target_passes for output in outputs))


def requests_of(
    kind: str, tokenizer: Tokenizer, batch: int, tokens: int, temperature: float
) -> list[OfflineRequest]:
    """Returns requests with held-out prompts of a kind. End tokens are ignored, so batches stay full."""
    sampling = Sampling(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    encoded = [tuple(tokenizer.encode(prompt).ids) for prompt in prompts(kind, 20)]
    return [
        OfflineRequest(encoded[i % len(encoded)], sampling, noise_key(i, 0, encoded[i % len(encoded)]))
        for i in range(batch)
    ]


def row_of(
    kind: str, batch: int, depth: int, pairs: Sequence[tuple[MeasuredRun, MeasuredRun]]
) -> dict[str, Any]:
    """Returns a row of the table from (plain, speculative) runs of the same requests."""
    plain, speculative = pairs[0]
    rounds = sum(output.target_passes for output in speculative.outputs)
    bound = plain.passes / speculative.passes
    ratio = statistics.median(before.seconds / after.seconds for before, after in pairs)
    outputs = zip(plain.outputs, speculative.outputs, strict=True)
    return {
        "kind": kind,
        "batch": batch,
        "depth": depth,
        "plain tokens/s": plain.tokens / statistics.median(run.seconds for run, _ in pairs),
        "tokens/s": speculative.tokens / statistics.median(run.seconds for _, run in pairs),
        "ratio": ratio,
        "bound": bound,
        "share of bound": ratio / bound,
        "tokens / pass": speculative.tokens / rounds,
        "same tokens": sum(a.tokens == b.tokens for a, b in outputs),
    }


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    path = target_path(arguments.target)
    target, draft = (engine_of(str(model), arguments.threads) for model in (path, DRAFT))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    rows: list[dict[str, Any]] = []
    for batch in arguments.batches:
        for kind in KINDS:
            groups = -(-arguments.requests // batch)
            requests = requests_of(kind, tokenizer, batch * groups, arguments.tokens, 0.0)
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
    """Answers all requests in batches of ``batch``, and sums up the runs."""
    runs = [run(target, draft, requests[i : i + batch], depth) for i in range(0, len(requests), batch)]
    outputs = [output for part in runs for output in part.outputs]
    return MeasuredRun(sum(part.seconds for part in runs), outputs, sum(part.passes for part in runs))


def engine_of(path: str, threads: int) -> Engine:
    """Returns an engine in float32 with a cache of CACHE_BYTES."""
    settings = EngineSettings(model=path, dtype="float32", threads=threads, cache_memory=CACHE_BYTES)
    return Engine.from_settings(settings)


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("engine", __doc__)
    parser.add_argument("--target", choices=INFLATED, default="190M")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 3, 4, 6])
    parser.add_argument("--requests", type=int, default=4, help="number for each kind, in whole batches")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows = measure(options)
    print("\nmean over kinds\n" + table(means(rows)))
    print(save("engine", rows, means=means(rows)))


def prompt_seconds(engine: Engine, prompt: tuple[int, ...]) -> float:
    """Returns the seconds to the first token of an answer."""
    started = time.perf_counter()
    sequence = engine.open(len(prompt), 0, Sampling(temperature=0, max_tokens=1))
    engine.submit(plain_decoding(sequence.number, 0, prompt, 1))
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - started
    engine.close(sequence)
    return seconds


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the ratios to plain decoding by batch and depth, means over the kinds of text."""
    by_shape: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        by_shape.setdefault((row["batch"], row["depth"]), []).append(row["ratio"])
    return [
        {"batch": batch, "depth": depth, "ratio": statistics.mean(ratios)}
        for (batch, depth), ratios in by_shape.items()
    ]
