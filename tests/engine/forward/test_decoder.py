"""A decoder in few operations computes what transformers' layers compute."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.decoding.draft import ROOT, Draft
from outrider.engine.forward.decoder import Decoder
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.loop.forward_pass import ForwardPass
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import write_checkpoint
from tests.support.decoder_steps import BLOCK_SIZE, BLOCKS, OTHER, OTHERS, PROMPT, STEPS, steps_logits
from tests.support.functions import needs_functions

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "minimax_m2", "gpt_oss")
FAMILY = ("llama", "mistral", "qwen2", "qwen3", *MIXTURES)
FIELDS = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    pytest.param({"dtype": "float32", "batch_invariant": True}, marks=needs_functions),
    {"dtype": "float32", "quantization": "int8"},
]


def load(folder: Path, **fields: Any) -> ForwardPass:
    settings = {"model": str(folder), "block_size": BLOCK_SIZE, "cache_memory": 2**20, "threads": 1, **fields}
    return load_forward_pass(EngineSettings.model_validate(settings))


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("kind", FAMILY)
def test_decoder_computes_what_the_model_computes(
    tmp_path: Path, kind: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path, kind)
    fast = steps_logits(load(folder, **fields))
    monkeypatch.setattr("outrider.engine.loop.forward_pass.decoder_of", lambda *_: None)
    theirs = steps_logits(load(folder, **fields))
    # An input of 8 bits that is rounded the other way is off by a whole step.
    is_exact = fields["dtype"] == "float32" and "quantization" not in fields
    errors = (fast - theirs).abs().amax(1)
    # If experts nearly tie, rounding chooses between them, and such a row may differ by any amount.
    largest = errors.max() if is_exact or kind not in MIXTURES else errors.median()
    assert largest < (2e-4 if is_exact else 0.05) * theirs.abs().max()


@needs_functions
@pytest.mark.parametrize("kind", FAMILY)
def test_in_float32_a_token_is_the_same_bits_in_any_company(tmp_path: Path, kind: str) -> None:
    forward, tokens = load(write_checkpoint(tmp_path, kind)), [*PROMPT, 60, 61, 62]
    length = len(PROMPT)
    beside = Feed(OTHER, 0, 0, OTHERS, None)

    def logits(*steps: list[Feed]) -> torch.Tensor:
        with torch.inference_mode():
            fed = (StepInput.of(forward.tables, feeds) for feeds in steps)
            return torch.cat([forward.run(forward.prepare(step)).logits for step in fed])

    whole = logits([Feed(tokens, len(tokens), 0, BLOCKS, None)])
    cut = [slice(0, 7), slice(7, 8), slice(8, 29), slice(29, len(tokens))]
    in_parts = [
        [beside, Feed(tokens[part], len(tokens[part]), part.start, BLOCKS, None), beside] for part in cut
    ]
    assert torch.equal(logits(*in_parts), whole)
    one_by_one = [[Feed([token], 1, place, BLOCKS, None)] for place, token in enumerate(tokens)]
    assert torch.equal(logits(*one_by_one), whole)
    tree = Draft((99, 61, 98, 62), (ROOT, ROOT, 1, 1))  # the nodes 1 and 3 are the chain's tokens
    prompt = Feed([*PROMPT, 60], 0, 0, BLOCKS, None)
    drafted = logits([prompt], [Feed([*tree.tokens], 4, length + 1, BLOCKS, tree)])
    assert torch.equal(drafted[[1, 3]], whole[-2:])


@pytest.mark.parametrize("kind", FAMILY)
def test_biases_and_tied_embeddings_are_the_models(tmp_path: Path, kind: str) -> None:
    load(write_checkpoint(tmp_path, kind, attention_bias=True, mlp_bias=True, tie_word_embeddings=True))


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> list[Decoder]:
    """Every pass of a decoder."""
    used: list[Decoder] = []
    compute = Decoder.__call__

    def noted(self: Decoder, *arguments: Any) -> Any:
        used.append(self)
        return compute(self, *arguments)

    monkeypatch.setattr(Decoder, "__call__", noted)
    return used


@pytest.mark.parametrize("kind", FAMILY)
def test_family_is_served_by_the_decoder(tmp_path: Path, kind: str, decoders: list[Decoder]) -> None:
    forward = load(write_checkpoint(tmp_path, kind))
    decoders.clear()  # the self-check is not what counts
    steps_logits(forward)
    assert len(decoders) == len(STEPS)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("gemma2", {}), ("phi3", {}), ("afmoe", {}), ("llama", {"hidden_act": "gelu"})],
    ids=str,
)
def test_other_models_run_as_they_are(
    tmp_path: Path, kind: str, fields: dict[str, Any], decoders: list[Decoder]
) -> None:
    steps_logits(load(write_checkpoint(tmp_path, kind, **fields)))
    assert not decoders


def test_decoder_that_computes_something_else_is_not_used_and_the_log_says_so(
    tmp_path: Path,
    decoders: list[Decoder],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rotation = Decoder._rotation

    def turned_back(self: Decoder, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = rotation(self, *given)
        return cosines, -sines

    monkeypatch.setattr(Decoder, "_rotation", turned_back)
    with caplog.at_level(logging.ERROR):
        forward = load(write_checkpoint(tmp_path, "llama"))
    assert decoders
    assert "the fast decoder is not used: packed prompts" in caplog.text
    decoders.clear()
    steps_logits(forward)
    assert not decoders
