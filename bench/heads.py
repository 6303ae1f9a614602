"""Acceptance and tokens per pass of the drafters trained for the demo target: `python -m bench heads`.

Through the engine, by kind of text, temperature and position, at a fixed depth on held-out prompts. Counts,
not times. A round counts if it had a Draft and did not end the text.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.report import save, table
from outrider.decoding.draft import Draft, Verdict
from outrider.decoding.noise_key import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO, DRAFTERS, KINDS, prompts
from outrider.engine.asked import Asked
from outrider.engine.drafters.draft_model import DraftModel
from outrider.engine.drafters.drafter import Drafter
from outrider.engine.engine import Engine
from outrider.engine.settings import EngineSettings
from outrider.engine.speculate import Generation, Request
from outrider.engine.work import Verified, Verify

SEED = 7
TEMPERATURES = (0.7, 1.0)


@dataclass
class Tally:
    """Of all rounds of some requests."""

    depth: int
    rounds: int = 0
    tokens: int = 0
    reached: list[int] = field(default_factory=list)  # by position
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reached, self.accepted = [0] * self.depth, [0] * self.depth

    def count(self, draft: Draft, verdict: Verdict) -> None:
        """A round. What stands beside the chain is among its tokens, and in no position's acceptance."""
        self.rounds += 1
        self.tokens += len(verdict.accepted) + 1
        accepted = sum(node < draft.chain_length for node in verdict.accepted)
        for position in range(min(accepted + 1, draft.chain_length)):
            self.reached[position] += 1
            self.accepted[position] += position < accepted

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / max(self.rounds, 1)

    @property
    def acceptance(self) -> list[float | None]:
        """By position, of those that were reached."""
        pairs = zip(self.accepted, self.reached, strict=True)
        return [accepted / reached if reached else None for accepted, reached in pairs]


@dataclass
class Pair:
    """The target, and what drafts for it; None: what stands beside the target."""

    target: Engine
    drafter: Drafter | None

    def tally(self, requests: Sequence[Request], depth: int, leaves: int = 0) -> Tally:
        """Of all requests at once."""
        texts = dict(self._open(request, depth, leaves) for request in requests)
        drafts, tally = dict.fromkeys(texts, Draft()), Tally(depth)
        while self.target.has_work:
            going_on = []
            for result in self.target.step():
                assert isinstance(result, Verified)
                text = texts[result.sequence]
                text.tokens += result.verdict.tokens
                text.round += 1
                if result.finish is not None:
                    self._close(result.sequence, text)
                    continue
                if draft := drafts[result.sequence]:
                    tally.count(draft, result.verdict)
                going_on.append(result)
            asked = [
                Asked(texts[result.sequence], depth, leaves, texts[result.sequence].round)
                for result in going_on
            ]
            for result, draft in zip(going_on, self._drafts(asked, going_on), strict=True):
                number = result.sequence
                drafts[number], base = draft, len(self.target.sequence(number).tokens)
                round = texts[number].round
                self.target.submit(Verify(number, base, (), draft, round, *self._next(depth, leaves)))
        return tally

    def _open(self, request: Request, depth: int, leaves: int) -> tuple[int, Generation]:
        prompt = request.prompt
        sequence = self.target.open(len(prompt), request.noise_key, request.sampling)
        self.target.submit(Verify(sequence.number, 0, prompt, Draft(), 0, *self._next(depth, leaves)))
        return sequence.number, Generation(len(prompt), request.noise_key, request.sampling, list(prompt))

    def _next(self, depth: int, leaves: int) -> tuple[int, int]:
        """Of the Draft that is to come with the Verdict."""
        return (0, 0) if self.drafter else (depth, leaves)

    def _drafts(self, asked: list[Asked], results: list[Verified]) -> list[Draft]:
        if self.drafter is None:
            return [result.draft or Draft() for result in results]
        return self.drafter.propose(asked)

    def _close(self, number: int, text: Generation) -> None:
        self.target.close(self.target.sequence(number))
        if self.drafter is not None:
            self.drafter.forget(text)


def beside(name: str, **settings: Any) -> Pair:
    return Pair(_engine(DEMO / "target", drafter=name, head=str(DRAFTERS / name), **settings), None)


def with_draft(folder: Path) -> Pair:
    return Pair(_engine(DEMO / "target"), DraftModel(_engine(folder)))


DRAFTED_BY: dict[str, Callable[[], Pair]] = {
    "model": lambda: with_draft(DEMO / "draft"),
    "eagle3": lambda: beside("eagle3"),
    "medusa": lambda: beside("medusa"),
    "parallel": lambda: with_draft(DRAFTERS / "parallel"),
    "exit after 3": lambda: beside("early_exit", early_exit=3),
    "exit after 4": lambda: beside("early_exit", early_exit=4),
}


def _engine(folder: Path, **settings: Any) -> Engine:
    given = {"dtype": "float32", "threads": 1, "cache_memory": 2**28, **settings}
    return Engine.from_settings(EngineSettings.model_validate({"model": str(folder), **given}))


def asked_of(texts: Sequence[str], temperature: float, tokens: int) -> list[Request]:
    """tokens: of an answer at most."""
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    sampling = Sampling(max_tokens=tokens, temperature=temperature)
    found = [tuple(tokenizer.encode(text).ids) for text in texts]
    return [Request(prompt, sampling, noise_key(SEED, 0, prompt)) for prompt in found]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench heads", description=__doc__.partition("\n")[0])
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTED_BY), choices=DRAFTED_BY)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--prompts", type=int, default=32, help="of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer at most")
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument(
        "--leaves",
        type=int,
        nargs="+",
        default=[0],
        help="nodes beside each chain; several: written as trees",
    )
    options = parser.parse_args(arguments)
    rows = []
    for name in options.drafters:
        pair = DRAFTED_BY[name]()
        for kind in options.kinds:
            for temperature, leaves in product(options.temperatures, options.leaves):
                asked = asked_of(prompts(kind, options.prompts), temperature, options.tokens)
                tally = pair.tally(asked, options.depth, leaves)
                row = {"drafter": name, "kind": kind, "temperature": temperature, "leaves": leaves}
                row["rounds"] = tally.rounds
                rows.append({**row, "tokens per pass": tally.tokens_per_pass, "acceptance": tally.acceptance})
                print(table(rows[-1:]), flush=True)
    told = {"prompts": options.prompts, "tokens": options.tokens, "depth": options.depth}
    print(save("heads" if options.leaves == [0] else "trees", rows, **told))
