"""The logits of MTP layers against those of published implementations, kept by golden/make_mtp.py."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.decoding.settings import Sampling
from outrider.engine.drafters.mtp import Mtp
from outrider.engine.inputs.step_input import Feed, StepInput
from tests.support.mtp import KINDS, golden_inputs, write_target
from tests.support.target_drafters import drafter_of, engine_with

GOLDEN = load_file(Path(__file__).parent / "golden" / "mtp.safetensors")


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_logits_are_those_of_published_implementations(tmp_path: Path, kind: str) -> None:
    """Logits come from the speculators package for Qwen's form, from transformers for the other forms."""
    folder = write_target(tmp_path, kind)
    engine = engine_with("mtp", model=str(folder), cache_memory=2**22, self_check=False)
    drafter = drafter_of(engine)
    assert isinstance(drafter, Mtp)
    hidden, tokens = golden_inputs()
    sequence = engine.open(len(tokens), 0, Sampling())
    assert engine._cache.reserve(sequence, len(tokens))
    tables = drafter._target.tables
    states = drafter._pass(
        StepInput.of(tables, [Feed(tokens, 0, 0, sequence.blocks, None)]), drafter._reduced(hidden[:, None])
    )
    torch.testing.assert_close(drafter._logits(states), GOLDEN[f"{kind}.first"], atol=1e-4, rtol=1e-4)
    # Its own state is fed back one position before the end, with the last token.
    place = len(tokens) - 1
    second = drafter._pass(
        StepInput.of(tables, [Feed(tokens[-1:], 0, place, sequence.blocks, None)]), states[place - 1 : place]
    )
    logits = drafter._logits(second)[0]
    torch.testing.assert_close(logits, GOLDEN[f"{kind}.second"], atol=1e-4, rtol=1e-4)
