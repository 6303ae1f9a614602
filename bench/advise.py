"""What `outrider advise` foretells beside what is then measured: `python -m bench advise`.

The demo target as it is, and inflated to two sizes, each with the demo draft. The target answers prompts of
a few kinds in this process, the draft is judged on these answers, and steps are measured. Then workers as in
the service, behind real gRPC, answer the same prompts, one at a time: plainly and at each depth in turns.
Speed counts from the first token on.
"""

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from bench.answers import Run, answer
from bench.checkpoints import DRAFT, INFLATED, inflated_target
from bench.report import save, table
from cluster.arguments import read_settings
from cluster.devices import memories
from cluster.settings import DEFAULT_DRAFT, Settings
from gateway.workers.streams import WorkerInfo
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO, KINDS, prompts
from outrider.drafters.registry import drafter
from outrider.engine.offline.speculate import Request
from tests.support.process_worker import worker_process
from workshop.advice.advice import Judgement
from workshop.advice.advise import Adviser
from workshop.advice.answers import Prompt
from workshop.advice.candidates import DraftCandidate
from workshop.advice.settings import AdviceSettings
from workshop.advice.speed import expected_at

DEMO_SIZE = "demo"
CACHE_BYTES = 2**28


def foretold(settings: Settings, asked: AdviceSettings, given: Sequence[Prompt]) -> Judgement:
    """Of the demo draft."""
    found = memories(settings)
    assert found is not None
    adviser = Adviser(settings, asked, found)
    advice = adviser.advise(given, [DraftCandidate("draft", drafter("model"), str(DRAFT))])
    return advice.judgements[0]


async def measured(
    workers: Sequence[WorkerInfo], requests: Sequence[Request], depths: Sequence[int]
) -> dict[int, list[Run]]:
    """Answers to all requests by depth, 0 for plain decoding. All depths take a request before the next."""
    runs: dict[int, list[Run]] = {depth: [] for depth in (0, *depths)}
    await answer(workers, requests[0], max(depths))  # the first finds nothing warm
    for request in requests:
        for depth, of_depth in runs.items():
            of_depth.append(await answer(workers, request, depth))
    return runs


def rows_of(size: str, judgement: Judgement, runs: dict[int, list[Run]]) -> list[dict[str, Any]]:
    """One for each depth, over all kinds of text."""
    plain = rate(runs[0])
    rows = []
    for depth, of_depth in runs.items():
        if not depth:
            continue
        counts = [finding.by_depth[depth] for finding in judgement.findings]
        said = [expected_at(one, judgement.costs, 1) for one in counts]
        # Together: the tokens of all rounds by the time of all rounds.
        tokens = sum(one.tokens for one in counts)
        seconds = sum(one.tokens / found.tokens_per_s for one, found in zip(counts, said, strict=True))
        speedup = tokens / seconds * judgement.costs.target.seconds(1, 1)
        passes = sum(run.stats.target_passes - 1 for run in of_depth)
        rows.append(
            {
                "target": size,
                "depth": depth,
                "tokens / pass, foretold": tokens / sum(one.rounds for one in counts),
                "tokens / pass": sum(run.tokens for run in of_depth) / passes,
                "to plain, foretold": speedup,
                "to plain": rate(of_depth) / plain,
            }
        )
    return rows


def rate(runs: Sequence[Run]) -> float:
    """Tokens per second."""
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)


def measure(size: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    path = DEMO / "target" if size == DEMO_SIZE else inflated_target(size)
    settings = read_settings(
        {
            "target": str(path),
            "target.dtype": "float32",
            "draft": str(DRAFT),
            f"drafts.{DEFAULT_DRAFT}.dtype": "float32",
            "target.cache_memory": CACHE_BYTES,
            f"drafts.{DEFAULT_DRAFT}.cache_memory": CACHE_BYTES,
        }
    ).with_gpus(0)
    asked = AdviceSettings(
        temperatures=(options.temperature,),
        tokens=options.tokens,
        depth=max(options.depths),
        streams=(1,),
        round_ms=options.round_ms,
        repetitions=options.repetitions,
    )
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    given = [
        Prompt(kind, tuple(tokenizer.encode(text).ids))
        for kind in options.kinds
        for text in prompts(kind, options.prompts)
    ]
    judgement = foretold(settings, asked, given)
    sampling = Sampling(temperature=options.temperature, max_tokens=options.tokens, seed=asked.seed)
    requests = [Request(one.tokens, sampling, noise_key(asked.seed, 0, one.tokens)) for one in given]
    target, draft = settings.target_engine(), settings.draft_engine(DEFAULT_DRAFT)
    with (
        worker_process("target", path, **target.model_dump(exclude={"model"})) as target_worker,
        worker_process("draft", DRAFT, **draft.model_dump(exclude={"model"})) as draft_worker,
    ):
        runs = asyncio.run(measured([target_worker, draft_worker], requests, options.depths))
    return rows_of(size, judgement, runs)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench advise", description=__doc__.partition("\n")[0])
    sizes = (DEMO_SIZE, *INFLATED)
    parser.add_argument("--targets", nargs="+", choices=sizes, default=list(sizes))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["code", "json", "stories"])
    parser.add_argument("--prompts", type=int, default=2, help="of each kind")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("--round-ms", type=float, default=AdviceSettings().round_ms)
    parser.add_argument("--repetitions", type=int, default=5, help="measured steps of each size")
    options = parser.parse_args(arguments)
    rows = []
    for size in options.targets:
        rows += (new := measure(size, options))
        print(table(new), flush=True)
    off = [abs(row["to plain, foretold"] / row["to plain"] - 1.0) for row in rows]
    print(f"speed is off by {statistics.median(off):.0%}, median, and {max(off):.0%} at most")
    print(save("advise", rows, round_ms=options.round_ms))
