"""A model's context length, and rotations that stay what they are whatever is in a batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.decoding.settings import Sampling
from outrider.engine.loading.context import context_because, context_length, fix_rotations
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import differences, reference, write_checkpoint

ORIGINAL, LONGEST = 32, 256
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + number for number in range(8)],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONG = tuple(3 + number % 200 for number in range(3 * ORIGINAL))
SHORT = LONG[: ORIGINAL // 2]
COUNT = 12


@pytest.fixture(scope="module", params=["llama", "phi3"])  # with layers of ours, and of transformers
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields: dict[str, Any] = {"max_position_embeddings": LONGEST, "rope_parameters": LONG_ROPE}
    fields["original_max_position_embeddings"] = ORIGINAL
    return write_checkpoint(tmp_path_factory.mktemp("longrope"), request.param, **fields)


def engine_of(folder: Path) -> Engine:
    fields = {"model": str(folder), "dtype": "float32", "device": "cpu", "cache_memory": 2**22, "threads": 1}
    return Engine.from_settings(EngineSettings.model_validate(fields))


def texts(engine: Engine, *prompts: tuple[int, ...]) -> list[list[int]]:
    asked = [OfflineRequest(prompt, Sampling(temperature=0.0, max_tokens=COUNT), 0) for prompt in prompts]
    return [list(output.tokens) for output in generate(engine, None, asked, 0)]


def test_long_text_with_longrope_is_that_of_transformers(folder: Path) -> None:
    assert not differences(reference(folder, [list(LONG)], COUNT), texts(engine_of(folder), LONG))


@pytest.mark.slow_beyond_first
def test_short_text_with_longrope_does_not_depend_on_a_long_one_beside_it(folder: Path) -> None:
    shorts = [LONG[start : start + len(SHORT)] for start in range(8)]
    alone = [texts(engine_of(folder), short)[0] for short in shorts]
    assert texts(engine_of(folder), *shorts, LONG)[:-1] == alone


def test_text_that_outgrows_the_original_context_keeps_its_rotations(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    fix_rotations(model)
    with torch.inference_mode():
        long = model(input_ids=torch.tensor([LONG])).logits[0, : len(SHORT)]
        short = model(input_ids=torch.tensor([SHORT])).logits[0]
    torch.testing.assert_close(short, long, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "fields", "length", "because"),
    [
        ("llama", {}, LONGEST, None),
        ("llama", {"rope_parameters": LONG_ROPE}, LONGEST, "long factors"),
        ("llama", {"rope_parameters": DYNAMIC}, LONGEST, "longest text"),
        ("llama4_text", {"attention_chunk_size": 64}, 64, "64 of 256 tokens"),
    ],
)
def test_context_is_told_with_what_bounds_it(
    kind: str, fields: dict[str, Any], length: int, because: str | None
) -> None:
    model = torch.nn.Module()
    model.config = AutoConfig.for_model(kind, max_position_embeddings=LONGEST, **fields)
    assert context_length(model) == length
    told = context_because(model)
    assert (told is None) == (because is None)
    assert because is None or because in str(told)
