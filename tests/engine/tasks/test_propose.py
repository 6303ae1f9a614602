"""A step drafts several positions: the Drafts are those that are made position by position."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from outrider.decoding.settings import Sampling
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Failed, Propose, Proposed, Result
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.demo_pair import DRAFTERS
from tests.support.model import forward_of, model_of

Interrupted = Callable[[], bool]

LIMIT = 60  # tokens
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "top-k": {"temperature": 1.1, "top_k": 7},
    "top-p": {"temperature": 0.9, "top_p": 0.8},
    "min-p": {"temperature": 1.5, "min_p": 0.05},
    "all": {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "noise_scope": "seed"},
    "bias": {"temperature": 0.7, "logit_bias": {7: 3.0, 9: 4.0}},
    "ends": {"temperature": 1.0, "ignore_eos": False, "stop_token_ids": tuple(range(3, 90))},
    "min_tokens": {"min_tokens": 4, "ignore_eos": False, "stop_token_ids": tuple(range(3, 90))},
    "penalty": {"temperature": 0.6, "repetition_penalty": 1.5},
}


def always() -> bool:
    return True


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=1)
    settings = EngineSettings(model=str(folder), block_size=8, cache_memory=2**20, self_check=False)
    return Engine.from_settings(settings)


def run(engine: Engine, is_interrupted: Interrupted | None = None) -> tuple[list[Result], int]:
    """Results of all work, and the steps that it took."""
    results, steps = list[Result](), 0
    while engine.has_work:
        results += engine.step(is_interrupted)
        steps += 1
    return results, steps


def rounds(
    engine: Engine, samplings: list[Sampling], depths: list[int], is_interrupted: Interrupted | None
) -> list[Any]:
    """Drafts of two rounds of sequences with these settings, and what each sequence then holds of them."""
    rng, told = random.Random(3), list[Any]()
    sequences = [engine.open(6, number, sampling) for number, sampling in enumerate(samplings)]
    texts = [tuple(rng.choices(range(3, VOCAB_SIZE), k=6)) for _ in sequences]
    for _ in range(2):
        for sequence, text, depth in zip(sequences, texts, depths, strict=True):
            base = len(sequence.tokens)
            engine.submit(Propose(sequence.number, base, text[base:], depth, base, alternatives=3))
        results, _ = run(engine, is_interrupted)
        drafts = {one.sequence: one.draft for one in results if isinstance(one, Proposed)}
        for place, sequence in enumerate(sequences):
            draft = drafts[sequence.number]
            told.append((draft, sequence.pending, sequence.draft.top_tokens))
            accepted = draft.tokens[: rng.randrange(draft.chain_length + 1)]
            texts[place] += (*accepted, rng.randrange(3, VOCAB_SIZE))
    for sequence in sequences:
        engine.close(sequence)
    return told


@pytest.mark.parametrize("name", SAMPLINGS)
def test_drafts_of_several_positions_are_those_of_single_positions(engine: Engine, name: str) -> None:
    samplings = [
        Sampling(**{"max_tokens": LIMIT, "ignore_eos": True, **SAMPLINGS[one]})
        for one in (name, name, "plain")
    ]
    expected = rounds(engine, samplings, [5, 3, 5], always)
    assert rounds(engine, samplings, [5, 3, 5], None) == expected


@pytest.mark.parametrize(("name", "steps"), [("plain", 2), ("bias", 2), ("penalty", 5)])
def test_step_drafts_as_many_positions_as_the_shortest_chain_has_left(
    engine: Engine, name: str, steps: int
) -> None:
    """Chains of three and of five tokens take two steps. Penalties need the host after each position."""
    sampling = Sampling(max_tokens=LIMIT, ignore_eos=True, **SAMPLINGS[name])
    opened = [engine.open(6, number, sampling) for number in range(2)]
    for sequence, depth in zip(opened, (3, 5), strict=True):
        engine.submit(Propose(sequence.number, 0, (sequence.number,) * 6, depth, 0))
    results, taken = run(engine)
    timings = [one.timings for one in results if isinstance(one, Proposed)]
    assert (taken, [one.steps for one in timings]) == (steps, [3, 5])
    for sequence in opened:
        engine.close(sequence)


def test_step_that_is_interrupted_ends_with_the_position_under_way(engine: Engine) -> None:
    sampling = Sampling(max_tokens=LIMIT, ignore_eos=True)
    sequence = engine.open(6, 1, sampling)
    engine.submit(Propose(sequence.number, 0, tuple(range(3, 9)), 5, 0))
    answers = iter([False, True])
    assert engine.step(lambda: next(answers)) == []
    assert len(sequence.draft.top_tokens) == 2
    newcomer = engine.open(6, 2, sampling)
    engine.submit(Propose(newcomer.number, 0, tuple(range(13, 19)), 3, 0))
    results = engine.step()
    assert [(one.sequence, len(one.draft)) for one in results if isinstance(one, Proposed)] == [
        (sequence.number, 5),
        (newcomer.number, 3),
    ]
    for one in (sequence, newcomer):
        engine.close(one)


@pytest.mark.parametrize("harm", ["NaN", "raises"])
def test_harmful_token_within_a_step_fails_its_sequence_alone(engine: Engine, harm: str) -> None:
    """The other sequence's Draft is what it is alone, and the cache is left finite."""
    sampling = Sampling(max_tokens=LIMIT, ignore_eos=True, temperature=0.0)

    def draft(*prompts: tuple[int, ...]) -> list[Result]:
        opened = [engine.open(6, 1, sampling) for _ in prompts]
        for sequence, prompt in zip(opened, prompts, strict=True):
            engine.submit(Propose(sequence.number, 0, prompt, 5, 0))
        results, _ = run(engine)
        for sequence in opened:
            engine.close(sequence)
        return sorted(results, key=lambda one: one.sequence)

    prompts = (3, 4, 5, 6, 7, 8), (20, 21, 22, 23, 24, 25)
    alone = [draft(prompt)[0] for prompt in prompts]
    assert all(isinstance(one, Proposed) for one in alone)
    first, second = (one.draft for one in alone if isinstance(one, Proposed))
    poison = next(token for token in second.tokens[1:3] if token not in {*first.tokens, *sum(prompts, ())})
    harmed = draft_with_poison(engine, harm, poison, lambda: draft(*prompts))
    assert isinstance(harmed[0], Proposed)
    assert harmed[0].draft == first
    assert isinstance(harmed[1], Failed)
    stored = [*engine._cache.keys.values(), *engine._cache.values.values()]
    again = draft(*prompts)
    assert [one.draft for one in again if isinstance(one, Proposed)] == [first, second]
    assert all(one.isfinite().all() for one in stored)


def draft_with_poison(
    engine: Engine, harm: str, poison: int, draft: Callable[[], list[Result]]
) -> list[Result]:
    """Results while this token's embedding is NaN, or while a pass raises that feeds it."""
    embedding = model_of(engine).get_input_embeddings()
    with pytest.MonkeyPatch.context() as patched:
        if harm == "NaN":
            weight = embedding.weight.detach().clone()
            weight[poison] = float("nan")
            patched.setattr(embedding.weight, "data", weight)
            return draft()
        forward = forward_of(engine)
        run_pass = forward.run

        def raising(batch: Any, chosen: Any = None) -> Any:
            if (batch.token_ids == poison).any():
                raise IndexError("harmed")
            return run_pass(batch, chosen)

        patched.setattr(forward, "run", raising)
        return draft()


def test_parallel_draft_of_several_guesses_takes_one_step() -> None:
    settings = EngineSettings(model=str(DRAFTERS / "parallel"), cache_memory=2**24, self_check=False)
    engine = Engine.from_settings(settings)
    sequence = engine.open(6, 1, Sampling(max_tokens=20))
    engine.submit(Propose(sequence.number, 0, tuple(range(3, 9)), 4, 1))
    (proposed,), steps = run(engine)
    assert isinstance(proposed, Proposed)
    assert len(proposed.draft) == 4
    assert steps == proposed.timings.steps == 1
