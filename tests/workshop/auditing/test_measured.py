"""What an audit costs, and how soon it notices what: the figures of docs/receipts.md, printed with -s."""

import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import int16

from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO
from outrider.demo.written_out import target, write_out
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Audit, Audited
from outrider.receipts.verdict import EXACT_TOLERANCE, judged
from tests.support.demo_pair import prompt_of

KINDS, ANSWERS, COUNT = ("prose", "code", "stories", "question_answer"), 20, 500
SAMPLING = Sampling(max_tokens=COUNT, ignore_eos=True, temperature=0.7)
LAYER = "model.layers.2"
# The weight in the middle of each tensor is flipped.
TENSORS = {
    "attention": f"{LAYER}.self_attn.q_proj.weight",
    "MLP": f"{LAYER}.mlp.down_proj.weight",
    "norm": f"{LAYER}.input_layernorm.weight",
    "embedding": "model.embed_tokens.weight",
}
BITS = {"sign": 15, "highest of the exponent": 14, "lowest of the exponent": 7, "lowest of the mantissa": 0}


def engine_of(model: Path | str = DEMO / "target", **settings: str) -> Engine:
    asked = {"dtype": "float32", "self_check": False, "cache_memory": 2**28, "threads": 1, **settings}
    return Engine.from_settings(EngineSettings.model_validate({"model": str(model), **asked}))


def requests(sampling: Sampling = SAMPLING, count: int = ANSWERS) -> list[OfflineRequest]:
    prompts = [prompt_of(KINDS[number % len(KINDS)], number // len(KINDS)) for number in range(count)]
    return [OfflineRequest(prompt, sampling, noise_key(9, 0, prompt)) for prompt in prompts]


def answers_of(engine: Engine, asked: Sequence[OfflineRequest]) -> list[tuple[int, ...]]:
    return [output.tokens for output in generate(engine, None, asked, 0)]


def margins_of(engine: Engine, asked: OfflineRequest, answer: tuple[int, ...]) -> list[float]:
    sequence = engine.open(len(asked.prompt), asked.noise_key, asked.sampling)
    engine.submit(Audit(sequence.number, 0, (*asked.prompt, *answer)))
    found: list[float] = []
    while engine.has_work:
        for result in engine.step():
            found += result.margins if isinstance(result, Audited) else [math.inf]  # numbers not finite
    engine.close(sequence)
    return found


def noticed(
    engine: Engine, asked: Sequence[OfflineRequest], answers: Sequence[tuple[int, ...]]
) -> tuple[int | None, int, float]:
    """Tokens until the first wrong token, all answers in a row; tokens that are wrong; the largest margin."""
    margins = [margin for pair in zip(asked, answers, strict=True) for margin in margins_of(engine, *pair)]
    verdict = judged(margins, SAMPLING, EXACT_TOLERANCE)
    return None if verdict.first is None else verdict.first + 1, verdict.wrong, max(margins)


@pytest.fixture(scope="module")
def honest() -> tuple[Engine, list[tuple[int, ...]]]:
    engine = engine_of()
    return engine, answers_of(engine, requests())


@pytest.mark.slow
def test_audits_of_honest_answers_raise_no_alarm(honest: tuple[Engine, list[tuple[int, ...]]]) -> None:
    engine, answers = honest
    found = noticed(engine, requests(), answers)
    print(f"\nhonest: {sum(map(len, answers))} tokens, wrong {found[1]}, largest margin {found[2]:.2g} nats")
    assert found[:2] == (None, 0)


@pytest.mark.slow
def test_audits_of_honest_batch_invariant_bfloat16_find_every_token_chosen() -> None:
    engine, asked = engine_of(dtype="bfloat16", batch_invariant="true"), requests(count=4)
    answers = answers_of(engine, asked)
    _, wrong, margin = noticed(engine, asked, answers)
    print(f"\nbatch-invariant bfloat16: {sum(map(len, answers))} tokens, wrong {wrong}, margin {margin:g}")
    assert margin == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "answering"),
    [
        ("int8 for float32", lambda: answers_of(engine_of(quantization="int8"), requests())),
        (
            "temperature 0.75 for 0.7",
            lambda: answers_of(engine_of(), requests(SAMPLING.model_copy(update={"temperature": 0.75}))),
        ),
    ],
)
def test_audits_notice_another_model_and_other_settings(
    honest: tuple[Engine, list[tuple[int, ...]]],
    name: str,
    answering: Callable[[], list[tuple[int, ...]]],
) -> None:
    first, wrong, margin = noticed(honest[0], requests(), answering())
    print(f"\n{name}: noticed after {first} tokens, {wrong} wrong, largest margin {margin:.2g}")
    assert first is not None


@pytest.mark.slow
@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("bit", BITS)
def test_audits_notice_a_flipped_bit_of_one_weight_that_is_large(
    honest: tuple[Engine, list[tuple[int, ...]]], tmp_path: Path, tensor: str, bit: str
) -> None:
    """The auditing engine has the flipped bit, and the answers are honest: it is as in the reverse case."""
    shutil.copytree(DEMO / "target", tmp_path / "flipped")
    file = tmp_path / "flipped" / "model.safetensors"
    weights = load_file(file)
    values = weights[TENSORS[tensor]].view(int16).flatten()
    mask = 1 << BITS[bit]
    values[len(values) // 2] ^= mask - 2**16 if mask == 2**15 else mask
    save_file(weights, file, {"format": "pt"})
    asked = requests()[:2]
    first, wrong, margin = noticed(engine_of(tmp_path / "flipped"), asked, honest[1][:2])
    print(f"\n{bit} bit, {tensor}: noticed after {first} tokens, {wrong} wrong, largest margin {margin:.2g}")
    if bit == "highest of the exponent":
        assert first is not None


@pytest.mark.slow
@pytest.mark.parametrize("model", [DEMO / "target", target()], ids=["4 M parameters", "190 M parameters"])
def test_audit_of_a_thousand_tokens_costs_a_part_of_their_answer(model: Path) -> None:
    """Times are those of the processor, so that other work on the machine does not count."""
    write_out(str(model))
    engine = engine_of(model)
    (asked,) = requests(SAMPLING.model_copy(update={"max_tokens": 1000}), 1)
    started = time.process_time()
    (answer,) = answers_of(engine, [asked])
    answered = time.process_time()
    margins = margins_of(engine, asked, answer)
    audited = time.process_time()
    share = (audited - answered) / (answered - started)
    spent = f"answer {answered - started:.1f} s, audit {audited - answered:.2f} s"
    print(f"\ncost, {model.parent.name}: {spent}, {share:.1%}")
    assert not any(margins)
    assert share < 0.5
