"""Audits: an answer is judged in one pass exactly as decoding has chosen it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Audit, Audited, Decoded, plain_decoding
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.demo_pair import prompt_of

BLOCK, CHUNK, KEY, COUNT = 4, 16, 77, 40
PROMPT = tuple(range(5, 26))
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "truncated": {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "lists": {"logit_bias": {9: 2.0}, "bad_token_ids": (7, 8), "min_tokens": 30},
    "allowed": {"allowed_token_ids": tuple(range(10, 40))},
    "logprobs": {"logprobs": 3},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")
    return engine_of(folder)


def engine_of(folder: Path, **settings: Any) -> Engine:
    asked = {"cache_memory": 2**22, "prefill_chunk": CHUNK, "block_size": BLOCK, **settings}
    return Engine.from_settings(EngineSettings(model=str(folder), **asked))


def answered(engine: Engine, sampling: Sampling, prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    (output,) = generate(engine, None, [OfflineRequest(prompt, sampling, KEY)], 0)
    return output.tokens


def sampling_of(**settings: Any) -> Sampling:
    return Sampling(**{"max_tokens": COUNT, "ignore_eos": True, **settings})


def audited(
    engine: Engine, sampling: Sampling, answer: tuple[int, ...], prompt: tuple[int, ...] = PROMPT
) -> list[float]:
    sequence = engine.open(len(prompt), KEY, sampling)
    engine.submit(Audit(sequence.number, 0, (*prompt, *answer)))
    found: list[float] = []
    while engine.has_work:
        for result in engine.step():
            assert isinstance(result, Audited)
            assert result.start == len(prompt) + len(found)
            found += result.margins
    engine.close(sequence)
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_audit_of_a_decoded_answer_finds_every_token_chosen(engine: Engine, name: str) -> None:
    sampling = sampling_of(**SETTINGS[name])
    answer = answered(engine, sampling)
    assert len(answer) == COUNT
    assert audited(engine, sampling, answer) == [0.0] * COUNT


def test_audit_judges_on_behind_a_wrong_token(engine: Engine) -> None:
    sampling = sampling_of()
    answer = answered(engine, sampling)
    wrong = (answer[4] + 1) % VOCAB_SIZE
    found = audited(engine, sampling, (*answer[:4], wrong, *answer[5:]))
    assert found[:4] == [0.0] * 4
    assert found[4] > 0.0
    assert len(found) == COUNT


def test_audit_under_another_temperature_finds_wrong_tokens(engine: Engine) -> None:
    answer = answered(engine, sampling_of(temperature=1.0))
    assert any(audited(engine, sampling_of(temperature=0.5), answer))


def test_audit_of_tokens_behind_an_end_finds_them_infinitely_far(engine: Engine) -> None:
    answer = answered(engine, sampling_of())
    found = audited(engine, sampling_of(stop_token_ids=(answer[10],)), answer)
    first = answer.index(answer[10])
    assert found[: first + 1] == [0.0] * (first + 1)
    assert found[first + 1 :] == [math.inf] * (COUNT - first - 1)


def test_audit_follows_the_grammar_of_the_answer() -> None:
    engine = engine_of(DEMO / "target", cache_memory=2**26, block_size=16)
    grammar = json.dumps({"grammars": [{"json_schema": {"type": "object"}}]})
    sampling, prompt = Sampling(max_tokens=20, temperature=1.0, grammar=grammar), prompt_of("json")
    answer = answered(engine, sampling, prompt)
    assert audited(engine, sampling, answer, prompt) == [0.0] * len(answer)
    refused = audited(engine, sampling, (answer[0], prompt[0], *answer[2:]), prompt)
    assert refused[0] == 0.0
    assert math.inf in refused[1:3]


def test_audit_work_without_an_answer_is_refused(engine: Engine) -> None:
    sequence = engine.open(len(PROMPT), KEY, sampling_of())
    with pytest.raises(ValueError, match="must be 22 to 61"):
        engine.submit(Audit(sequence.number, 0, PROMPT))
    engine.close(sequence)


def test_audit_beside_a_sequence_that_decodes_feeds_a_block_a_step(engine: Engine) -> None:
    sampling = sampling_of()
    answer = answered(engine, sampling)
    alone = engine.open(5, KEY, sampling)
    engine.submit(plain_decoding(alone.number, 0, PROMPT[:5], COUNT))
    engine.step()
    sequence = engine.open(len(PROMPT), KEY, sampling)
    engine.submit(Audit(sequence.number, 0, (*PROMPT, *answer)))
    sizes, decoded = [], 1
    while engine.has_work:
        results = engine.step()
        if any(isinstance(result, Decoded) for result in results):
            decoded += 1
            assert engine.last_step is not None
            sizes.append(engine.last_step.tokens)
    engine.close(alone)
    engine.close(sequence)
    assert decoded == COUNT
    assert max(sizes) == 1 + BLOCK, "a token of the sequence, and a block of the audit"


def test_audit_gives_its_cache_up_to_an_older_and_to_a_younger_sequence(engine: Engine) -> None:
    """Neither waits, and the audit is repeated and complete."""
    sampling = sampling_of()
    answer = answered(engine, sampling)
    folder = Path(engine.settings.model)
    needed = len(PROMPT) + COUNT
    tight = engine_of(folder, cache_memory=_bytes(engine) * (needed // BLOCK + 3))
    sequence = tight.open(len(PROMPT), KEY, sampling)
    tight.submit(Audit(sequence.number, 0, (*PROMPT, *answer)))
    tight.step()
    younger = tight.open(len(PROMPT), KEY, sampling)
    tight.submit(plain_decoding(younger.number, 0, PROMPT, COUNT))
    found: list[float] = []
    steps = tokens = 0
    while tight.has_work:
        for result in tight.step():
            if isinstance(result, Audited):
                found += result.margins
            elif isinstance(result, Decoded):
                tokens += 1
        if tokens == COUNT:
            tight.close(younger)
        steps += 1
    assert tokens == COUNT
    assert not any(found)


def _bytes(engine: Engine) -> int:
    """Bytes of a block of its cache."""
    return 2**22 // engine.load().total_blocks
