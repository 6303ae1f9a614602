"""The target's own layers as drafters: `python -m bench early_exit`.

In process, on the demo target inflated to 190 M, at temperature 0.7 and fixed depths, by streams: the exits
that ship for it, inflated alike, and its first half without training. Plain decoding is timed beside each.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoConfig

from bench.checkpoints import FOLDER, INFLATED, inflated_target
from bench.inflate import inflate_exits, size_of
from bench.report import table
from outrider.decoding.draft import Draft
from outrider.decoding.noise_key import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO, KINDS, prompts
from outrider.engine.drafters.trained_exits import TrainedExits
from outrider.engine.engine import Engine
from outrider.engine.settings import EngineSettings
from outrider.engine.speculate import Request, generate
from outrider.engine.work import Verified, Verify

SIZE = "190M"
TRAINED = DEMO.parent / "drafters" / "early_exit"


def inflated_exits() -> Path:
    """Those that ship for the demo target, for it inflated."""
    folder = FOLDER / f"exits-{SIZE}"
    if not folder.exists():
        old = size_of(AutoConfig.from_pretrained(DEMO / "target"))
        inflate_exits(TRAINED, folder, old, INFLATED[SIZE])
    return folder


def engine(**settings: Any) -> Engine:
    given = {"dtype": "float32", "cache_memory": 2**28, "self_check": False, **settings}
    return Engine.from_settings(EngineSettings.model_validate({"model": str(inflated_target(SIZE)), **given}))


def asked_of(kind: str, count: int, tokens: int) -> list[Request]:
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    sampling = Sampling(max_tokens=tokens, temperature=0.7, ignore_eos=True)
    found = [tuple(tokenizer.encode(text).ids) for text in prompts(kind, count)]
    return [Request(prompt, sampling, noise_key(1, 0, prompt)) for prompt in found]


def plain_rate(target: Engine, requests: list[Request]) -> float:
    """Tokens per second of plain decoding."""
    begun = time.perf_counter()
    outputs = generate(target, None, requests, 0)
    return sum(len(output.tokens) for output in outputs) / (time.perf_counter() - begun)


def drafted_rate(target: Engine, requests: list[Request], depth: int) -> tuple[float, float]:
    """Tokens per second, and tokens per pass of a text, with Drafts that come with the verdicts."""
    begun, tokens, passes = time.perf_counter(), 0, 0
    for request in requests:
        sequence = target.open(len(request.prompt), request.noise_key, request.sampling)
        target.submit(Verify(sequence.number, 0, request.prompt, Draft(), 0, depth))
    while target.has_work:
        for result in target.step():
            assert isinstance(result, Verified)
            sequence = target.sequence(result.sequence)
            tokens, passes = tokens + len(result.verdict.tokens), passes + 1
            if result.finish is not None:
                target.close(sequence)
                continue
            draft = result.draft or Draft()
            target.submit(Verify(sequence.number, len(sequence.tokens), (), draft, result.round + 1, depth))
    return tokens / (time.perf_counter() - begun), tokens / passes


def measure(target: Engine, told: dict[str, Any], options: argparse.Namespace) -> None:
    """Prints a row for each number of streams and depth."""
    for streams in options.streams:
        requests = asked_of(options.kind, streams, options.tokens)
        plain = plain_rate(target, requests)
        for depth in options.depths:
            rate, per_pass = drafted_rate(target, requests, depth)
            row = {**told, "streams": streams, "depth": depth, "tokens per pass": per_pass}
            times = {"tokens/s": rate, "plain tokens/s": plain, "times plain": rate / plain}
            print(table([{**row, **times}]), flush=True)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench early_exit", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--kind", default="code", choices=KINDS)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    options = parser.parse_args(arguments)
    layers = INFLATED[SIZE].layers
    parts: list[dict[str, Any]] = [{"exit": "untrained", "early_exit": layers // 2, "head": None}]
    exits = str(inflated_exits())
    for number in _numbers(exits):
        parts.append({"exit": "trained", "early_exit": number, "head": exits})
    for part in parts:
        told = {"exit": part.pop("exit"), "layers": part["early_exit"], "of": layers}
        measure(engine(drafter="early_exit", **part), told, options)


def _numbers(exits: str) -> list[int]:
    return TrainedExits(
        EngineSettings(model=str(inflated_target(SIZE)), drafter="early_exit", head=exits)
    ).numbers
