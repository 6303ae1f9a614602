"""Drafts of a head united with what is found in the text: same text, the index's guesses, closing."""

from pathlib import Path
from typing import Any

import pytest

import outrider.engine.forward.graphs
from outrider.decoding.draft import Draft
from outrider.drafters.known_texts import KnownTexts
from outrider.drafters.occurrences import END
from outrider.drafters.union import PRIOR_RATES, DraftUnion, Role
from outrider.engine.drafters import unions
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import write_checkpoint
from tests.support.demo_pair import DRAFTERS, prompt_of
from tests.support.eagle3 import write_random_eagle3
from tests.support.gpu import gpu
from tests.support.simulated_cuda.install import needs_compiler
from tests.support.target_drafters import (
    Drafted,
    drafted_texts,
    drafters_with,
    engine_with,
    plain_texts,
    rounds,
)

DEPTH = 3
UNION = "eagle3+suffix"


@pytest.fixture(scope="module")
def target() -> Engine:
    return engine_with("eagle3", DRAFTERS / "eagle3", self_check=False)


@pytest.fixture(scope="module")
def repeating(target: Engine) -> tuple[int, ...]:
    """Returns a prompt, its answer, and the prompt once more."""
    prompt = prompt_of("prose")
    return (*prompt, *rounds(target, [prompt], 0.0, DEPTH)[0].tokens, *prompt)


def drafts_of(found: list[Drafted]) -> list[Draft]:
    return [draft for drafted in found for draft in drafted.drafts]


@pytest.mark.parametrize("company", [1, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_text_with_united_drafts_is_that_of_plain_decoding(
    target: Engine, temperature: float, company: int
) -> None:
    found = drafted_texts(target, temperature, DEPTH, company, 2, drafter=UNION, least_survival=0.05)
    assert [drafted.tokens for drafted in found] == plain_texts(temperature)
    assert max(draft.depth for draft in drafts_of(found)) > DEPTH  # the index guesses further
    assert any(not draft.is_chain for draft in drafts_of(found))


def test_united_drafts_of_repeated_text_take_fewer_rounds(target: Engine, repeating: tuple[int, ...]) -> None:
    alone = rounds(target, [repeating], 0.0, DEPTH)[0]
    union = rounds(target, [repeating], 0.0, DEPTH, drafter=UNION, least_survival=0.05)[0]
    assert union.tokens == alone.tokens
    assert union.rounds < alone.rounds


def test_prediction_of_an_edited_answer_makes_united_drafts_take_fewer_rounds(target: Engine) -> None:
    prompt = prompt_of("prose")
    alone = rounds(target, [prompt], 0.7, DEPTH)[0]
    edited = (*alone.tokens[:8], 1, 2, *alone.tokens[12:])
    found, wrong = (
        rounds(
            target,
            [prompt],
            0.7,
            DEPTH,
            drafter="eagle3+prediction",
            least_survival=0.05,
            texts=KnownTexts(prediction),
        )[0]
        for prediction in (edited, (1, 2))
    )
    assert found.tokens == wrong.tokens == alone.tokens
    assert 2 * found.rounds < alone.rounds
    assert found.deepest > DEPTH


def test_past_answer_makes_united_drafts_take_fewer_rounds(target: Engine) -> None:
    prompt = prompt_of("prose")
    alone = rounds(target, [prompt], 0.7, DEPTH)[0]
    texts = KnownTexts(past=(*alone.tokens, END))
    name = "eagle3+prediction+suffix+ngram"
    known = rounds(target, [prompt], 0.7, DEPTH, drafter=name, least_survival=0.05, texts=texts)[0]
    assert known.tokens == alone.tokens
    assert known.rounds < 0.8 * alone.rounds
    assert known.deepest > DEPTH


def test_drafts_of_a_head_without_the_nodes_that_do_not_pay_say_the_same_with_fewer_nodes(
    target: Engine,
) -> None:
    whole, cut = (
        drafted_texts(target, 0.7, 5, 6, 2, drafter="eagle3", least_survival=least) for least in (0.0, 0.2)
    )
    assert [text.tokens for text in cut] == plain_texts(0.7)
    of_whole, of_cut = (sum(map(len, drafts_of(found))) for found in (whole, cut))
    rounds_of_whole, rounds_of_cut = (sum(text.rounds for text in found) for found in (whole, cut))
    assert of_cut < 0.75 * of_whole
    assert rounds_of_cut < 1.15 * rounds_of_whole
    assert len({draft.chain_length for draft in drafts_of(cut)}) > 3  # short and deep in turn


def test_united_drafts_without_further_nodes_are_as_deep_as_was_asked_for(
    target: Engine, repeating: tuple[int, ...]
) -> None:
    found = rounds(target, [repeating], 0.7, DEPTH, drafter=UNION)
    assert 0 < max(map(len, drafts_of(found))) <= DEPTH


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drafts_under_another_rule_are_those_of_the_head(
    target: Engine, rule: str, repeating: tuple[int, ...]
) -> None:
    alone, union = (
        rounds(target, [repeating], 0.7, DEPTH, drafter=name, least_survival=0.01, verification=rule)
        for name in ("eagle3", UNION)
    )
    assert drafts_of(union) == drafts_of(alone)
    assert any(drafts_of(alone))


def test_head_of_united_drafts_is_judged_by_its_own_guesses(
    target: Engine, repeating: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head whose guesses are never correct is disabled, however good those of the index are."""
    in_use = target._drafting._in_use["eagle3"]
    wrong = Draft.chain([target.vocab_size - 1] * DEPTH)
    monkeypatch.setattr(in_use.drafter, "propose", lambda requests: [wrong for _ in requests])
    monkeypatch.setitem(PRIOR_RATES, Role.CHAIN, 0.01)  # so that a Draft begins with the index's path
    target._drafting._unions._rates.clear()
    monkeypatch.setattr(in_use, "_reached", 0)
    monkeypatch.setattr(in_use, "_accepted", 0)
    found = rounds(target, [repeating], 0.0, DEPTH, drafter=UNION, least_survival=0.05)
    assert found[0].accepted > 0
    assert (in_use._accepted, in_use._reached > 0) == (0, True)


def test_prompts_of_all_sequences_enter_their_indices_by_the_tokens_of_one_step(
    target: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unions, "TAKEN_IN", 10)
    taken: list[int] = []
    take_in = DraftUnion.take_in

    def counted(self: DraftUnion, text: list[int], most: int) -> int:
        taken.append(take_in(self, text, most))
        return taken[-1]

    monkeypatch.setattr(DraftUnion, "take_in", counted)
    prompts = [prompt_of("prose"), prompt_of("code")]
    rounds(target, prompts, 0.7, DEPTH, drafter=UNION, max_tokens=4)
    assert max(map(len, prompts)) > 10
    assert sum(taken[:2]) == 10


def test_closed_sequence_leaves_no_union(target: Engine, repeating: tuple[int, ...]) -> None:
    rounds(target, [repeating], 0.0, DEPTH, drafter=UNION)
    assert not target._drafting._unions._unions


@pytest.mark.slow  # Triton's interpreter takes its time
@needs_compiler
def test_united_drafts_on_a_gpu_are_those_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outrider.engine.forward.graphs, "CAPTURED_SIZES", (1, 4, 16))
    model = write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=2)
    head = write_random_eagle3(tmp_path / "head", model)
    named = {"model": str(model), **drafters_with("eagle3", head)}
    given = {**named, "cache_memory": 2**21, "block_size": 8, "self_check": False, "dtype": "float32"}

    def drafted(device: str) -> list[Drafted]:
        engine = Engine.from_settings(EngineSettings.model_validate({**given, "device": device}))
        prompts = [(5, 9, 33, 5, 9, 33, 5, 9), (77, 12, 4)]
        few: dict[str, Any] = {
            "allowed_token_ids": [5, 9, 33],
            "max_tokens": 12,
        }  # so that the text repeats itself
        return rounds(engine, prompts, 0.7, DEPTH, drafter=UNION, least_survival=0.01, **few)

    expected = drafted("cpu")
    assert max(draft.depth for draft in drafts_of(expected)) > DEPTH
    assert any(not draft.is_chain for draft in drafts_of(expected))
    with gpu():
        found = drafted("cuda")
    assert [(text.tokens, text.drafts) for text in found] == [(text.tokens, text.drafts) for text in expected]
