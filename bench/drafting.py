"""A target in this process and what drafts for it, and what comes of their rounds."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.checkpoints import inflated_head, inflated_input_of, inflated_target
from gateway.drafters.mixed import Promises
from outrider.decoding.draft import Draft, Verdict
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO, DRAFTERS
from outrider.drafters.index import Index, ScoredIndex
from outrider.drafters.ngram import NgramIndex
from outrider.drafters.occurrences import Guess
from outrider.drafters.past_answers import PastAnswers, Scope
from outrider.drafters.suffix import SuffixIndex
from outrider.engine.choosing.asked import Asked, Text
from outrider.engine.drafters.beside_target import beside_target
from outrider.engine.drafters.drafter import Drafter
from outrider.engine.forward.forward_pass import ForwardPass
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.runner import ModelRunner
from outrider.engine.offline.draft_model import DraftModel
from outrider.engine.offline.index import IndexDrafter
from outrider.engine.offline.speculate import Generation, Request
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Verified, Verify

SEED = 7
SCOPE = Scope("this bench")
PLAIN = "plain"
DRAFTS = ("propose", "take_in", "watch")  # methods of a drafter that take time


@dataclass
class Tally:
    """Of the rounds of some requests: one that takes a prompt in or ends a text counts for nothing."""

    depth: int
    rounds: int = 0
    drafts: int = 0  # rounds that had one
    tokens: int = 0
    reached: list[int] = field(default_factory=list)  # by position
    accepted: list[int] = field(default_factory=list)
    texts: dict[int, tuple[int, ...]] = field(
        default_factory=dict
    )  # of requests that have ended, by noise key
    seconds: float = 0.0  # since every stream had a token, as all that follows
    tokens_since: int = 0
    passes: int = 0
    drafting_s: float = 0.0

    def __post_init__(self) -> None:
        self.reached, self.accepted = [0] * self.depth, [0] * self.depth

    def count(self, draft: Draft, verdict: Verdict) -> None:
        """A round. What stands beside the chain is among its tokens, and in no position's acceptance."""
        self.rounds += 1
        self.drafts += len(draft) > 0
        self.tokens += len(verdict.accepted) + 1
        accepted = sum(node < draft.chain_length for node in verdict.accepted)
        for position in range(min(accepted + 1, draft.chain_length)):
            self.reached[position] += 1
            self.accepted[position] += position < accepted

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / max(self.rounds, 1)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens_since / self.seconds


class Stopwatch:
    """Adds up the seconds that some methods of an object take."""

    def __init__(self, timed: object, methods: Iterable[str]) -> None:
        self.seconds = 0.0
        for name in methods:
            if hasattr(timed, name):
                setattr(timed, name, partial(self._timed, getattr(timed, name)))

    def _timed(self, method: Callable[..., Any], *arguments: Any) -> Any:
        begun = time.perf_counter()
        try:
            return method(*arguments)
        finally:
            self.seconds += time.perf_counter() - begun


@dataclass
class Pair:
    """The target, and what drafts for it; None: what stands beside the target, if anything does."""

    target: Engine
    drafter: Drafter | None
    stopwatch: Stopwatch = field(default_factory=lambda: Stopwatch(None, ()))

    def tally(
        self,
        requests: Iterable[Request],
        depth: int,
        streams: int | None = None,
        tokens: int | None = None,
        leaves: int = 0,
    ) -> Tally:
        """
        Args:
            depth: of every Draft; 0: plain decoding.
            streams: requests at a time: when one ends the next begins; None: all at once.
            tokens: after which it stops; None: once all requests are answered.
            leaves: nodes beside each chain.
        """
        coming = iter(requests)
        texts = dict(self._open(request, depth, leaves) for request in islice(coming, streams))
        drafts, tally, waiting = dict.fromkeys(texts, Draft()), Tally(depth), {*texts}
        begun = time.perf_counter()
        while texts and (tokens is None or tally.tokens_since < tokens):
            going_on = []
            tally.passes += 1
            for result in self.target.step():
                assert isinstance(result, Verified)
                number, text = result.sequence, texts[result.sequence]
                tally.tokens_since += len(result.verdict.tokens)
                text.tokens += result.verdict.tokens
                text.round += 1
                if result.finish is not None:
                    tally.texts[text.noise_key] = tuple(text.tokens)
                    self._close(number, texts.pop(number))
                    opened = dict(self._open(request, depth, leaves) for request in islice(coming, 1))
                    texts |= opened
                    drafts |= dict.fromkeys(opened, Draft())
                elif text.round > 1:
                    tally.count(drafts[number], result.verdict)
                if number in waiting:
                    waiting.remove(number)
                    if not waiting:
                        tally.tokens_since = tally.passes = 0
                        self.stopwatch.seconds, begun = 0.0, time.perf_counter()
                if number in texts:
                    going_on.append(result)
            asked = [
                Asked(texts[result.sequence], depth, leaves, texts[result.sequence].round)
                for result in going_on
            ]
            for result, draft in zip(going_on, self._drafts(asked, going_on), strict=True):
                number = result.sequence
                drafts[number], base = draft, len(self.target.sequence(number).tokens)
                turn = texts[number].round
                self.target.submit(Verify(number, base, (), draft, turn, *self._next(depth, leaves)))
        tally.seconds, tally.drafting_s = time.perf_counter() - begun, self.stopwatch.seconds
        for number, text in texts.items():
            self._close(number, text)
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
        return self.drafter.propose(asked) if asked else []

    def _close(self, number: int, text: Generation) -> None:
        self.target.close(self.target.sequence(number))
        if self.drafter is not None:
            self.drafter.forget(text)


class Mixed(Drafter):
    """A drafter and an index, for a batch, as in a gateway for each sequence: gateway/drafters/mixed.py."""

    def __init__(self, other: Drafter, index: Callable[[], ScoredIndex]) -> None:
        """index: makes one for a text."""
        self._other, self._index = other, index
        self._promises = Promises()
        self._indices: dict[Text, ScoredIndex] = {}
        self._newest: dict[Text, tuple[int, Guess, Draft]] = {}  # after so many tokens

    def propose(self, asked: Sequence[Asked]) -> list[Draft]:
        """The other drafter is asked for those that the index promises less of."""
        drafts = [self._of_index(one) for one in asked]
        others = [index for index, draft in enumerate(drafts) if draft is None]
        for index, draft in zip(others, self._other.propose([asked[i] for i in others]), strict=True):
            drafts[index] = draft
            text = asked[index].text
            self._newest[text] = (*self._newest[text][:2], draft)
        return [draft or Draft() for draft in drafts]

    def _of_index(self, asked: Asked) -> Draft | None:
        text, depth = asked.text, asked.depth
        index = self._indices.setdefault(text, self._index())
        index.append(text.tokens[len(index) :])
        if text in self._newest:
            base, guess, draft = self._newest[text]
            self._promises.observe_index(guess, text.tokens[base:])
            self._promises.observe_other(draft, text.tokens[base:])
        guess = index.guess(depth)
        self._newest[text] = (len(text.tokens), guess, Draft())
        promises_more = self._promises.of_index(guess) > self._promises.of_other(depth)
        return Draft.chain(guess.tokens) if promises_more else None

    def forget(self, text: Text) -> None:
        self._other.forget(text)
        self._indices.pop(text, None)
        self._newest.pop(text, None)


NO_PAST = PastAnswers()
Drafting = Callable[[PastAnswers], Pair]


@dataclass
class Pairs:
    """The demo target, or that inflated, with one drafter after another. What was loaded last is kept."""

    size: str | None  # of bench.checkpoints.INFLATED; None: the demo target itself
    threads: int
    _plain: Engine | None = None
    _loaded: tuple[str, Drafting] | None = None

    def of(self, name: str, past: PastAnswers = NO_PAST) -> Pair:
        """
        Args:
            name: of DRAFTED_BY, or PLAIN.
            past: answers, for those that remember.
        """
        if name == PLAIN:
            return Pair(self._target(), None)
        if self._loaded is None or self._loaded[0] != name:
            self._loaded = None  # before another is loaded
            self._loaded = (name, DRAFTED_BY[name](self))
        return self._loaded[1](past)

    def beside(self, name: str, **settings: Any) -> Drafting:
        head = DRAFTERS / name if self.size is None else inflated_head(name, self.size)
        pair = beside(self._settings(self._folder, drafter=name, head=str(head), **settings))
        return lambda past: pair

    def after(self, layers: int) -> Drafting:
        """Leaving after so many layers of the demo target, or where they are when it is inflated."""
        after = layers if self.size is None else inflated_input_of(layers, self.size)
        return self.beside("early_exit", early_exit=after)

    def model(self, folder: Path) -> Drafting:
        draft = Engine.from_settings(self._settings(folder))
        return lambda past: self._with(DraftModel(draft))

    def index(self, index: Callable[[PastAnswers], Index]) -> Drafting:
        return lambda past: self._with(IndexDrafter(lambda: index(past)))

    def mixed(self) -> Drafting:
        draft = Engine.from_settings(self._settings(DEMO / "draft"))
        return lambda past: self._with(Mixed(DraftModel(draft), lambda: SuffixIndex(past, SCOPE)))

    def _with(self, drafter: Drafter) -> Pair:
        return Pair(self._target(), drafter, Stopwatch(drafter, DRAFTS))

    def _target(self) -> Engine:
        if self._plain is None:
            self._plain = Engine.from_settings(self._settings(self._folder))
        return self._plain

    @property
    def _folder(self) -> Path:
        return DEMO / "target" if self.size is None else inflated_target(self.size)

    def _settings(self, folder: Path, **settings: Any) -> EngineSettings:
        return settings_of(folder, self.threads, **settings)


DRAFTED_BY: dict[str, Callable[[Pairs], Drafting]] = {
    "model": lambda pairs: pairs.model(DEMO / "draft"),
    "parallel": lambda pairs: pairs.model(DRAFTERS / "parallel"),
    "eagle3": lambda pairs: pairs.beside("eagle3"),
    "medusa": lambda pairs: pairs.beside("medusa"),
    **{f"exit after {layers}": partial(Pairs.after, layers=layers) for layers in (1, 2, 3, 4)},
    "ngram": lambda pairs: pairs.index(lambda past: NgramIndex()),
    "suffix": lambda pairs: pairs.index(lambda past: SuffixIndex(past, SCOPE)),
    "model+suffix": Pairs.mixed,
}


def settings_of(folder: Path, threads: int, **settings: Any) -> EngineSettings:
    """Of a model that counts and times are taken with."""
    given = {"dtype": "float32", "threads": threads, "cache_memory": 2**29, "self_check": False}
    return EngineSettings.model_validate({"model": str(folder), **given, **settings})


def beside(settings: EngineSettings) -> Pair:
    """A target, and the drafter that these settings put beside it."""
    drafter = beside_target(settings)
    engine = Engine(ModelRunner(ForwardPass(settings, None, drafter), None), drafter)
    return Pair(engine, None, Stopwatch(drafter, DRAFTS))


def leaving_early(folder: Path, layers: int, threads: int) -> Pair:
    """A target that drafts with so many layers of its own, its own norm and its own head."""
    return beside(settings_of(folder, threads, drafter="early_exit", early_exit=layers))


def with_draft(folder: Path) -> Pair:
    """The demo target and that draft."""
    return Pairs(None, threads=1).model(folder)(NO_PAST)


def asked_of(
    texts: Sequence[str], temperature: float, tokens: int, ignore_eos: bool = False
) -> list[Request]:
    """tokens: of an answer at most."""
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    sampling = Sampling(max_tokens=tokens, temperature=temperature, ignore_eos=ignore_eos)
    found = [tuple(tokenizer.encode(text).ids) for text in texts]
    return [Request(prompt, sampling, noise_key(SEED, 0, prompt)) for prompt in found]
