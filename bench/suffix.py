"""Tokens per pass of the target with drafters that have no model: `python -m bench suffix`.

Per kind of text, on the demo target at temperature 0.7 and a fixed depth: n-grams, suffixes of the request's
own text, and suffixes of past answers besides. The past answers are those to other prompts of the same kind.
Counts, not times.
"""

import argparse
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer

from bench.report import save, table
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO, KINDS, prompts
from outrider.drafters.index import Index
from outrider.drafters.ngram import NgramIndex
from outrider.drafters.past_answers import PastAnswers, Scope
from outrider.drafters.suffix import SuffixIndex
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.index import IndexDrafter
from outrider.engine.offline.speculate import Request, generate
from outrider.engine.settings import EngineSettings

SCOPE = Scope("this bench")


def asked(kind: str, count: int, tokens: int) -> list[Request]:
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    requests = []
    for number, text in enumerate(prompts(kind, count)):
        prompt = tuple(tokenizer.encode(text).ids)
        sampling = Sampling(max_tokens=tokens, temperature=0.7, seed=number)
        requests.append(Request(prompt, sampling, noise_key(number, 0, prompt)))
    return requests


def measure(target: Engine, requests: Sequence[Request], past: PastAnswers, depth: int) -> dict[str, float]:
    """Tokens per pass, by what drafts."""
    indices: dict[str, Callable[[], Index]] = {
        "n-grams": NgramIndex,
        "suffixes": SuffixIndex,
        "suffixes and past answers": lambda: SuffixIndex(past, SCOPE),
    }
    row = {}
    for name, index in indices.items():
        outputs = generate(target, IndexDrafter(index), requests, depth)
        row[name] = sum(len(output.tokens) for output in outputs) / sum(
            output.target_passes for output in outputs
        )
    return row


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench suffix", description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--prompts", type=int, default=12, help="of each kind")
    parser.add_argument("--past-answers", type=int, default=20, help="to other prompts of that kind")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--depth", type=int, default=6)
    options = parser.parse_args(arguments)
    settings = EngineSettings(model=str(DEMO / "target"), dtype="float32", threads=1, cache_memory=2**28)
    target, rows = Engine.from_settings(settings), []
    for kind in options.kinds:
        requests = asked(kind, options.prompts + options.past_answers, options.tokens)
        past = PastAnswers(2**18)
        for output in generate(target, None, requests[options.prompts :], 0):
            past.add(SCOPE, output.tokens)
        rows.append({"kind": kind, **measure(target, requests[: options.prompts], past, options.depth)})
        print(table(rows[-1:]), flush=True)
    print(save("suffix", rows, **{name: value for name, value in vars(options).items() if name != "kinds"}))
