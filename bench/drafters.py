"""Measures target drafters on kinds of text, in one process: `python -m bench drafters`.

The demo target at 190 M parameters goes on by itself under a lease, with each drafter and plainly in turn.
Texts are the kinds of the demo pair, and SPEED-Bench's shapes of load: prompts of about 1,000 tokens, of
text that is easy to guess, hard, or both. SPEED-Bench calls this low, high and mixed entropy. Code is also
answered with predictions, which are the answers with edits.
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from tokenizers import Tokenizer

from bench.engine import CACHE_BYTES, requests_of
from bench.report import parser_of, save, table
from outrider.decoding.draft import Draft
from outrider.decoding.lease import Lease
from outrider.demo import written_out
from outrider.demo.prompts import DEMO
from outrider.drafters.known_texts import NO_TEXTS, KnownTexts
from outrider.drafters.registry import drafter, split_name
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Decode, Decoded

CHECKPOINTS = {"colocated": DEMO / "draft"}  # all others are written out beside the target
DEPTHS = {"medusa": 4}  # heads that it has; all others draft ``--depth`` tokens
TEXTS = {kind: (kind,) for kind in ("code", "prose", "json", "arithmetic")}
SHAPES = {
    "low": ("json", "stories"),
    "mixed": ("json", "prose", "arithmetic", "code"),
    "high": ("prose", "code"),
}
UNITED = "eagle3+suffix+ngram"
PREDICTED = "eagle3+prediction+suffix+ngram"
MIN_SURVIVAL = 0.2  # probability: a node's price, between its price at one stream and at eight streams
EDITED = 3  # tokens of an edit of a prediction
PERIODS = (12, 24)  # tokens from one edit to the next
MAX_SEARCHED = 64  # answers to all requests; a drafter that does not draft by then has found no layers
SHAPE_TOKENS = 1000  # tokens of a prompt, SPEED-Bench's shortest


@dataclass
class LeasedRun:
    """Answers to requests under one lease, from the moment when each has a token: prompts do not count."""

    seconds: float = 0.0
    tokens: int = 0
    passes: int = 0  # passes of the target, counted for each sequence
    target_s: list[float] = field(default_factory=list)  # seconds of the target's steps
    draft_s: list[float] = field(default_factory=list)  # seconds of Drafts
    accepted: list[int] = field(default_factory=lambda: [0] * 16)  # correct guesses by position
    reached: list[int] = field(default_factory=lambda: [0] * 16)  # judged guesses by position

    @property
    def rate(self) -> float:
        """Tokens per second of all sequences together."""
        return self.tokens / self.seconds

    def count(self, result: Decoded, judged: Draft, drafted_in: float) -> None:
        """Counts a Verdict. drafted_in: steps of a Draft of the drafter."""
        correct = len(result.verdict.accepted)
        self.tokens += len(result.verdict.tokens)
        self.passes += 1
        for position in range(min(correct + 1, judged.depth)):
            self.reached[position] += 1
            self.accepted[position] += position < correct
        if judged:
            self.target_s.append(result.timings.last_step.seconds)
        if result.draft_step is not None:
            self.draft_s.append(drafted_in * result.draft_step.seconds)


def run(
    engine: Engine,
    requests: Sequence[OfflineRequest],
    name: str,
    depth: int,
    least: float,
    texts: Sequence[KnownTexts] | None = None,
) -> LeasedRun:
    """Answers all requests at once, with texts that indices know.

    Args:
        depth: tokens of Drafts; 0: plain decoding.
        least: survival of a node, as in ``Lease.least_survival``.
    """
    found, started = LeasedRun(), time.perf_counter()
    drafts, opened = dict[int, Draft](), []
    row = drafter(split_name(name)[0])
    drafted_in = row.steps_per_draft + depth * row.steps_per_token
    for request, known in zip(requests, texts or [NO_TEXTS] * len(requests), strict=True):
        sequence = engine.open(len(request.prompt), request.noise_key, request.sampling, texts=known)
        opened.append(sequence)
        lease = Lease(sequence.limit, depth, 0, name if depth else "", least)
        engine.submit(Decode(sequence.number, 0, request.prompt, Draft(), 1, lease))
    while engine.has_work:
        if len(drafts) < len(requests):
            found, started = LeasedRun(), time.perf_counter()
        for result in engine.step():
            assert isinstance(result, Decoded)
            found.count(result, drafts.get(result.sequence, Draft()), drafted_in)
            drafts[result.sequence] = result.draft or Draft()
            if result.finish is not None:
                engine.close(engine.sequence(result.sequence))
    found.seconds = time.perf_counter() - started
    for sequence in opened:
        engine.close(sequence)
    return found


def search(engine: Engine, requests: Sequence[OfflineRequest], name: str, depth: int) -> None:
    """Decodes plainly until the drafter drafts: early exit looks for the layers that pay on text.

    Raises:
        RuntimeError: it has not drafted after ``MAX_SEARCHED`` answers.
    """
    for _ in range(MAX_SEARCHED):
        if any(run(engine, requests, name, depth, 0.0).reached):
            return
        run(engine, requests, name, 0, 0.0)
    raise RuntimeError(f"{name} did not draft after {MAX_SEARCHED} answers to {len(requests)} requests")


def texts_of(
    kinds: Sequence[str], tokenizer: Tokenizer, streams: int, tokens: int, temperature: float, least: int
) -> list[OfflineRequest]:
    """Returns requests of these kinds in turn. least: tokens of prompts, filled up with other prompts."""
    of_kinds = [requests_of(kind, tokenizer, 20, tokens, temperature) for kind in kinds]
    requests = [of_kinds[number % len(kinds)][number // len(kinds)] for number in range(streams)]
    for place, request in enumerate(requests):
        others, prompt = of_kinds[place % len(kinds)], request.prompt
        while len(prompt) < least:
            prompt = (*others[len(prompt) % len(others)].prompt, *prompt)
        requests[place] = replace(request, prompt=prompt)
    return requests


def row_of(name: str, pairs: Sequence[tuple[LeasedRun, LeasedRun]]) -> dict[str, Any]:
    """Returns the figures of a drafter from pairs of plain and drafted answers."""
    _, drafted = pairs[0]
    reached = [count for count in drafted.reached if count]
    rates = [accepted / count for accepted, count in zip(drafted.accepted, reached, strict=False)]
    return {
        "drafter": name,
        "acceptance": [round(rate, 2) for rate in rates],
        "tokens / pass": drafted.tokens / drafted.passes,
        "Draft / target step": statistics.median(drafted.draft_s) / statistics.median(drafted.target_s),
        "plain tokens/s": statistics.median(plain.rate for plain, _ in pairs),
        "to plain": statistics.median(each.rate / plain.rate for plain, each in pairs),
    }


def edited(tokenizer: Tokenizer, streams: int, depth: int) -> list[dict[str, Any]]:
    """Returns the passes that code takes whose answers are predicted, but for edits."""
    engine, rows = engine_with(UNITED), list[dict[str, Any]]()
    asked = texts_of(("code",), tokenizer, streams, 128, 0.7, 0)
    answers = [output.tokens for output in generate(engine, None, asked, 0)]
    for period in PERIODS:
        texts = [
            KnownTexts(tuple(0 if place % period < EDITED else token for place, token in enumerate(answer)))
            for answer in answers
        ]
        for name in (UNITED.partition("+")[0], UNITED, PREDICTED):
            found = run(engine, asked, name, depth, MIN_SURVIVAL, texts)
            point = {"edited": f"{EDITED} of {period} tokens", "drafter": name}
            rows.append({**point, "tokens": found.tokens, "passes": found.passes})
    return rows


def engine_with(name: str) -> Engine:
    name, _ = split_name(name)
    checkpoint = CHECKPOINTS.get(name, written_out.target().with_name(name))
    given = {
        "model": str(written_out.target()),
        "dtype": "float32",
        "threads": 1,
        "cache_memory": CACHE_BYTES,
        "drafters": {name: {"checkpoint": str(checkpoint)}},
    }
    return Engine.from_settings(EngineSettings.model_validate(given))


def measured(name: str, tokenizer: Tokenizer, options: Namespace) -> list[dict[str, Any]]:
    """Returns the rows of a drafter: by kind of text, temperature and streams.

    A union leaves out nodes that cost more than they bring, so its head is measured at that price too.
    """
    engine, depth, rows = engine_with(name), DEPTHS.get(name, options.depth), list[dict[str, Any]]()
    every = [kind for kinds in TEXTS.values() for kind in kinds]
    search(engine, texts_of(every, tokenizer, 2 * len(every), options.tokens, 0.7, 0), name, depth)
    own, indices = split_name(name)
    least = MIN_SURVIVAL if indices else 0.0
    for text, temperature, streams in product(options.texts, options.temperatures, options.streams):
        prompt = SHAPE_TOKENS * (text in SHAPES)
        asked = texts_of({**TEXTS, **SHAPES}[text], tokenizer, streams, options.tokens, temperature, prompt)
        point = {"text": text, "temperature": temperature, "streams": streams}
        for each in dict.fromkeys((own, name)):
            pairs = [
                (run(engine, asked, each, 0, 0.0), run(engine, asked, each, depth, least))
                for _ in range(options.repetitions)
            ]
            rows.append({**point, "depth": depth, "least survival": least, **row_of(each, pairs)})
    return rows


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("drafters", __doc__)
    drafters = ["eagle3", "dflash", "medusa", "early_exit", "colocated", UNITED]
    parser.add_argument("--drafters", nargs="+", default=drafters)
    parser.add_argument("--texts", nargs="+", choices=[*TEXTS, *SHAPES], default=[*TEXTS, *SHAPES])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--repetitions", type=int, default=1)
    options = parser.parse_args(arguments)
    written_out.write_out(str(written_out.target()))
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    rows: list[dict[str, Any]] = []
    for name in options.drafters:
        rows += (found := measured(name, tokenizer, options))
        print(table(found), flush=True)
    predictions = edited(tokenizer, max(options.streams), options.depth)
    print(table(predictions), save("drafters", rows, threads=1, predictions=predictions), sep="\n")
