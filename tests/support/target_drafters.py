"""Rounds of the demo target in this process, with Drafts of a target drafter."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from outrider.decoding.draft import Draft
from outrider.decoding.lease import Lease
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO
from outrider.drafters.known_texts import NO_TEXTS, KnownTexts
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Decode, Decoded, plain_decoding
from tests.support.demo_pair import engine, prompt_of

TOKENS = 32
KINDS = ("json", "stories", "code", "prose", "question_answer", "arithmetic")


@dataclass
class Drafted:
    """Result of one request."""

    tokens: tuple[int, ...] = ()
    accepted: int = 0
    rounds: int = 0  # rounds with a Draft
    deepest: int = 0
    drafts: list[Draft] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # length of the text before each Draft
    preemptions: int = 0
    ranks: list[int | None] = field(default_factory=list)  # rank of each Verdict
    of_host: int = field(default=0, compare=False)  # Drafts whose tokens the host of a GPU chose


def drafters_with(drafter: str, checkpoint: Path | None = None, **own: object) -> dict[str, Any]:
    """Returns the field of a target's settings that names this drafter alone."""
    given = {} if checkpoint is None else {"checkpoint": str(checkpoint)}
    return {"drafters": {drafter: {**given, **own}}}


def drafter_of(engine: Engine) -> Any:
    """Returns the only drafter of a target."""
    (in_use,) = engine._drafting._in_use.values()
    return in_use.drafter


def engine_with(
    drafter: str, checkpoint: Path | None = None, own: Mapping[str, object] | None = None, **settings: object
) -> Engine:
    """Returns the demo target with a drafter. own: further settings of the drafter."""
    given = {
        "dtype": "float32",
        "threads": 1,
        "cache_memory": 2**27,
        "model": str(DEMO / "target"),
        **settings,
    }
    drafters = drafters_with(drafter, checkpoint, **own or {})
    return Engine.from_settings(EngineSettings.model_validate({**drafters, **given}))


@cache
def plain_texts(temperature: float) -> list[tuple[int, ...]]:
    prompts = [prompt_of(kind) for kind in KINDS]
    settings = Sampling(max_tokens=TOKENS, ignore_eos=True, temperature=temperature)
    asked = [OfflineRequest(prompt, settings, noise_key(1, 0, prompt)) for prompt in prompts]
    return [output.tokens for output in generate(engine("target"), None, asked, 0)]


def drafted_texts(
    target: Engine, temperature: float, depth: int, company: int, alternatives: int = 0, **sampling: Any
) -> list[Drafted]:
    """Returns the answers to a prompt of each kind, in batches of ``company``."""
    prompts = [prompt_of(kind) for kind in KINDS]
    found: list[Drafted] = []
    for start in range(0, len(prompts), company):
        found += rounds(
            target, prompts[start : start + company], temperature, depth, alternatives, **sampling
        )
    return found


def rounds(
    target: Engine,
    prompts: list[tuple[int, ...]],
    temperature: float,
    depth: int,
    alternatives: int = 0,
    plain: tuple[int, int] = (0, 0),
    drafter: str = "",
    seed: int = 1,
    own: Sequence[Mapping[str, object]] = (),
    least_survival: float = 0.0,
    texts: KnownTexts = NO_TEXTS,
    **sampling: object,
) -> list[Drafted]:
    """Runs rounds as the gateway does: each Verdict comes with the Draft of the next round.

    Args:
        plain: range of generated tokens, first to end, in which decoding is plain.
        drafter: name of a target drafter; empty: the target's first.
        seed: seed of the first prompt, one more for each further prompt that equals it.
        own: further sampling settings of each prompt; empty: no further settings.
        least_survival: least probability at which a node pays; 0: unknown.
        texts: texts from which the indices of each sequence guess.
    """
    shared = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": temperature, **sampling}
    name = drafter or next(iter(target._drafting._in_use), "")
    lease = Lease(0, depth, alternatives, name, least_survival)
    found: dict[int, Drafted] = {}
    number_of_rounds: dict[int, int] = {}
    equal = Counter[tuple[int, ...]]()
    for prompt, of_prompt in zip(prompts, own or [{}] * len(prompts), strict=True):
        settings = Sampling.model_validate({**shared, **of_prompt})
        key = noise_key(seed + equal[prompt], 0, prompt)
        sequence = target.open(len(prompt), key, settings, texts=texts)
        equal[prompt] += 1
        found[sequence.number], number_of_rounds[sequence.number] = Drafted(), 1
        target.submit(Decode(sequence.number, 0, prompt, Draft(), 1, lease))
    while target.has_work:
        for result in target.step():
            assert isinstance(result, Decoded)
            drafted, sequence = found[result.sequence], target.sequence(result.sequence)
            drafted.tokens += result.verdict.tokens
            drafted.accepted += len(result.verdict.accepted)
            drafted.ranks.append(result.rank)
            drafted.of_host += result.is_draft_of_host
            drafted.preemptions += result.timings.preemptions
            if result.finish is not None:
                target.close(sequence)
                continue
            draft = result.draft or Draft()
            drafted.rounds += bool(draft)
            drafted.deepest = max(drafted.deepest, draft.depth)
            drafted.drafts.append(draft)
            drafted.lengths.append(len(sequence.tokens))
            number_of_rounds[result.sequence] += 1
            length, generated = len(sequence.tokens), len(drafted.tokens)
            if plain[0] <= generated < plain[1]:
                target.submit(plain_decoding(result.sequence, length, (), plain[1] - generated))
                while target.has_work:
                    for token in target.step():
                        assert isinstance(token, Decoded)
                        drafted.tokens += (token.verdict.tokens[-1],)
                length, draft = len(sequence.tokens), Draft()
            number = number_of_rounds[result.sequence]
            target.submit(Decode(result.sequence, length, (), draft, number, lease))
    return [*found.values()]


def check_no_gap(target: Engine) -> None:
    """Asserts that plain decoding between rounds does not change later Drafts."""
    always = rounds(target, [prompt_of("json")], 0.7, 4)[0]
    sometimes = rounds(target, [prompt_of("json")], 0.7, 4, plain=(10, 20))[0]
    assert sometimes.tokens == always.tokens
    drafted = dict(zip(always.lengths, always.drafts, strict=True))
    both = [
        (draft, drafted[length])
        for length, draft in zip(sometimes.lengths, sometimes.drafts, strict=True)
        if length in drafted
    ]
    assert len(both) > 5
    assert all(draft == other for draft, other in both)
