"""Draft-then-verify rounds for many requests in a single process, without the service."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.decoding.draft import Draft
from outrider.decoding.settings import Sampling
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.drafters.drafter import Drafter
from outrider.engine.loop.engine import Engine
from outrider.engine.sequence import EngineSequence
from outrider.engine.work import NONE_ASKED, AskedAdapter, Decode, Decoded, plain_decoding


@dataclass(frozen=True)
class OfflineRequest:
    """Prompt, sampling settings and noise key of one generation."""

    prompt: tuple[int, ...]
    sampling: Sampling
    noise_key: int
    adapter: AskedAdapter = NONE_ASKED


@dataclass(frozen=True)
class Output:
    """Generated tokens of a request, and counts of its Drafts."""

    tokens: tuple[int, ...]
    finish: str | None  # "stop" or "length"
    drafted: int  # number of drafted tokens, including alternatives
    accepted: int
    target_passes: int  # number of steps of the target that gave it tokens


def generate(
    target: Engine,
    drafter: Drafter | None,
    requests: Sequence[OfflineRequest],
    depth: int,
    alternatives: int = 0,
) -> list[Output]:
    """Answers all requests in one batch, with rounds of a fixed depth. No drafter: plain decoding."""
    if drafter is None:
        return _plain(target, requests)
    runs = [_open(target, request) for request in requests]
    while active := [run for run in runs if run.finish is None]:
        drafts = drafter.propose(
            [DraftRequest(run.generation, depth, alternatives, run.generation.round) for run in active]
        )
        _verify(target, active, drafts)
    for run in runs:
        drafter.forget(run.generation)
        target.close(run.sequence)
    return [run.output() for run in runs]


@dataclass(eq=False)
class OfflineGeneration:
    """Sequence of a request; ``tokens`` are committed, prompt included."""

    prompt_length: int
    noise_key: int
    sampling: Sampling
    tokens: list[int]
    round: int = 0
    matcher: None = None  # each engine compiles the grammar for itself


@dataclass
class _Run:
    """Request under way."""

    generation: OfflineGeneration
    sequence: EngineSequence
    finish: str | None = None
    drafted: int = 0
    accepted: int = 0

    def output(self) -> Output:
        tokens = tuple(self.generation.tokens[self.generation.prompt_length :])
        return Output(tokens, self.finish, self.drafted, self.accepted, self.generation.round)


def _open(target: Engine, request: OfflineRequest) -> _Run:
    length = len(request.prompt)
    return _Run(
        OfflineGeneration(length, request.noise_key, request.sampling, list(request.prompt)),
        target.open(length, request.noise_key, request.sampling, adapter=request.adapter),
    )


def _verify(target: Engine, runs: Sequence[_Run], drafts: Sequence[Draft]) -> None:
    """Runs a round for every request."""
    of_sequence = {run.sequence.number: run for run in runs}
    for run, draft in zip(runs, drafts, strict=True):
        base = len(run.sequence.tokens)
        tokens = tuple(run.generation.tokens[base:])
        target.submit(Decode(run.sequence.number, base, tokens, draft, run.generation.round))
        run.drafted += len(draft)
    while target.has_work:
        for result in target.step():
            if isinstance(result, Decoded):
                run = of_sequence[result.sequence]
                run.generation.tokens += result.verdict.tokens
                run.generation.round += 1
                run.accepted += len(result.verdict.accepted)
                run.finish = result.finish


def _plain(target: Engine, requests: Sequence[OfflineRequest]) -> list[Output]:
    runs = [_open(target, request) for request in requests]
    for run, request in zip(runs, requests, strict=True):
        target.submit(plain_decoding(run.sequence.number, 0, request.prompt, request.sampling.max_tokens))
    of_sequence = {run.sequence.number: run for run in runs}
    while target.has_work:
        for result in target.step():
            if isinstance(result, Decoded):
                run = of_sequence[result.sequence]
                run.generation.tokens += result.verdict.tokens
                run.generation.round += 1
                run.finish = result.finish
    for run in runs:
        target.close(run.sequence)
    return [run.output() for run in runs]
