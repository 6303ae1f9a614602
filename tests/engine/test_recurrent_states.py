"""Models with recurrent states: the same seed gives the same text, however it came about."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.decoding.draft import Draft
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.mamba2 import Mamba2
from outrider.engine.forward.recurrent_layer import RecurrentLayer
from outrider.engine.forward.recurrent_layers import use_recurrent_layers
from outrider.engine.held_state import RECORDS
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Decode, Decoded, plain_decoding
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_runs import run
from tests.support.hybrid import TOKENS, Asked, chain, in_rounds, plain, requests, tree

FEW = 4  # requests of quick tests
SMALL = 20 * 4096  # bytes of a cache with 20 blocks


@pytest.fixture(
    scope="module", params=["qwen3_5_text", "nemotron_h", pytest.param("qwen3_next", marks=pytest.mark.slow)]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def engine_with(folder: Path) -> Callable[..., Engine]:
    @cache
    def made(**settings: Any) -> Engine:
        given = {"block_size": 8, "cache_memory": 2**22, "max_sequences": 8, "threads": 1} | settings
        return Engine.from_settings(EngineSettings(model=str(folder), self_check=False, **given))

    return made


@pytest.fixture(scope="module")
def texts(engine_with: Callable[..., Engine]) -> Callable[[int], list[tuple[int, ...]]]:
    """Texts of requests, each alone in plain decoding."""

    @cache
    def of(count: int) -> list[tuple[int, ...]]:
        return [plain(engine_with(), asked) for asked in requests(count)]

    return of


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_text_of_a_prompt_cut_into_chunks_stays(
    engine_with: Callable[..., Engine], texts: Callable[[int], list[tuple[int, ...]]], chunk: int
) -> None:
    cut = engine_with(prefill_chunk=chunk, block_size=1)
    assert [plain(cut, asked) for asked in requests(FEW)[:2]] == texts(FEW)[:2]


@pytest.mark.parametrize("correct", range(5))
def test_draft_of_which_a_part_is_refused_changes_no_token(
    engine_with: Callable[..., Engine], texts: Callable[[int], list[tuple[int, ...]]], correct: int
) -> None:
    asked, expected = requests(FEW)[1], texts(FEW)[1]
    for draft in (lambda rest: chain(rest, correct, 4 - correct), lambda rest: tree(rest, correct)):
        assert rounds(engine_with(), asked, expected, draft) == expected


def rounds(
    engine: Engine, asked: Asked, expected: Sequence[int], draft_of: Callable[[Sequence[int]], Draft]
) -> tuple[int, ...]:
    """The text of a request in rounds, whose first Draft comes with the prompt."""
    sequence = engine.open(len(asked.prompt), asked.noise_key, asked.sampling)
    text, tokens, finish, number = tuple[int, ...](), asked.prompt, None, 0
    while finish is None:
        draft = draft_of(expected[len(text) :])
        engine.submit(Decode(sequence.number, len(sequence.tokens), tokens, draft, number))
        (decoded,) = run(engine)
        assert isinstance(decoded, Decoded)
        text, tokens, finish, number = (*text, *decoded.verdict.tokens), (), decoded.finish, number + 1
    engine.close(sequence)
    return text


def test_draft_of_more_nodes_than_records_changes_no_token(
    engine_with: Callable[..., Engine], texts: Callable[[int], list[tuple[int, ...]]]
) -> None:
    asked, expected = requests(FEW)[2], texts(FEW)[2]
    nodes = tuple(range(3, 3 + 2 * RECORDS))
    wide = Draft(nodes, (-1,) * len(nodes))
    assert rounds(engine_with(), asked, expected, lambda _: wide) == expected


@pytest.mark.parametrize("back", [1, 7, 20])  # tokens of an answer of 8 so far, and of its prompt
def test_sequence_that_goes_back_goes_on_with_the_same_text(
    engine_with: Callable[..., Engine], back: int
) -> None:
    engine, given = engine_with(), requests(FEW)[0]
    asked = replace(given, prompt=tuple(range(3, 3 + RECORDS + 16)))
    whole = (*asked.prompt, *plain(engine, asked))
    sequence = engine.open(len(asked.prompt), asked.noise_key, asked.sampling)
    engine.submit(plain_decoding(sequence.number, 0, asked.prompt, 8))
    run(engine)
    end = len(sequence.tokens)
    told = whole[end - back : end]
    other = (told[0] + 1) % 256
    engine.submit(plain_decoding(sequence.number, end - back, (other, *told[1:]), 2, round=1))
    run(engine)
    engine.submit(plain_decoding(sequence.number, end - back, told, TOKENS - 8, round=2))
    run(engine)
    engine.close(sequence)
    assert tuple(sequence.tokens) == whole


def test_sequences_that_lose_cache_and_slots_to_each_other_keep_their_texts(
    engine_with: Callable[..., Engine], texts: Callable[[int], list[tuple[int, ...]]]
) -> None:
    small = engine_with(cache_memory=SMALL, max_sequences=3, prefill_chunk=16)
    answers, preemptions = in_rounds(small, requests(FEW), texts(FEW), seed=0)
    assert answers == texts(FEW)
    assert preemptions > 1


@pytest.mark.slow
def test_500_requests_with_drafts_refusals_preemption_and_kills_keep_their_texts(
    engine_with: Callable[..., Engine], texts: Callable[[int], list[tuple[int, ...]]]
) -> None:
    asked, expected = requests(500), texts(500)
    engines = [
        engine_with(cache_memory=2**17, max_sequences=sequences, prefill_chunk=chunk)
        for sequences, chunk in ((3, 7), (8, 16), (16, 64))
    ]
    preempted = 0
    for number, first in enumerate(range(0, 500, 20)):
        part = slice(first, first + 20)
        answers, preemptions = in_rounds(engines[number % 3], asked[part], expected[part], seed=number)
        assert answers == expected[part]
        preempted += preemptions
    assert preempted > 100


def test_state_of_a_closed_sequence_reaches_no_other(
    engine_with: Callable[..., Engine], texts: Callable[[int], list[tuple[int, ...]]]
) -> None:
    engine = engine_with(max_sequences=1)
    states = engine._cache.states
    assert states is not None
    for of_layer in states.layers.values():
        for tensor in (of_layer.states, of_layer.tails, of_layer.records):
            tensor.fill_(torch.nan)
    assert plain(engine, requests(FEW)[0]) == texts(FEW)[0]


@torch.inference_mode()
def token_by_token(layer: RecurrentLayer, rows: torch.Tensor) -> torch.Tensor:
    """The output of a layer for rows [1, num_tokens, hidden_size]."""
    state, tail = torch.zeros(layer.shape.state), torch.zeros(layer.shape.tail)
    found = []
    records, gate = layer._projected(rows)
    for record in records:
        state, tail, output = layer._step(record, state, tail)
        found.append(output)
    normed = layer._normed(torch.stack(found), gate)
    output = layer.theirs.out_proj(normed.view(1, len(found), -1))
    assert isinstance(output, torch.Tensor)
    return output


def test_recurrent_layer_computes_what_transformers_computes(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    rows = torch.randn(1, 70, model.config.hidden_size)
    assert use_recurrent_layers(model)
    layer = next(module for module in model.modules() if isinstance(module, RecurrentLayer))
    torch.testing.assert_close(token_by_token(layer, rows), layer.theirs(rows), atol=1e-5, rtol=1e-4)


def test_time_steps_of_all_tokens_are_limited_as_transformers_limits_those_of_prompts(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "nemotron_h", time_step_min=0.1)
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval().model.layers[0].mixer
    rows = torch.randn(1, 3, theirs.hidden_size)
    limited, expected = token_by_token(Mamba2(theirs), rows), theirs(rows)
    torch.testing.assert_close(limited, expected, atol=1e-5, rtol=1e-4)
    theirs.time_step_limit = (0.0, torch.inf)
    assert not torch.allclose(theirs(rows), expected, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"batch_invariant": True}, "steps that are not cut into passes"),
        ({"is_draft": True}, "give another model as the draft"),
        ({"drafters": {"early_exit": {}}}, "its layers keep recurrent states"),
    ],
)
def test_setting_that_passes_the_states_by_is_refused(
    folder: Path, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        Engine.from_settings(EngineSettings(model=str(folder), **settings))
