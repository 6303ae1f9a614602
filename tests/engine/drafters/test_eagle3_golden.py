"""The logits of an EAGLE-3 head against those of the speculators package, kept by golden/make_eagle3.py."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.decoding.settings import Sampling
from outrider.engine.drafters.eagle3 import Eagle3
from outrider.engine.inputs.step_input import Feed, StepInput
from tests.support.eagle3 import golden_forms, golden_inputs, golden_tensors, write_eagle3
from tests.support.target_drafters import drafter_of, engine_with

GOLDEN = load_file(Path(__file__).parent / "golden" / "eagle3.safetensors")


@pytest.mark.parametrize("name", golden_forms())
@torch.inference_mode()
def test_logits_are_those_of_the_speculators_package(tmp_path: Path, name: str) -> None:
    form, tensors = golden_forms()[name], golden_tensors(golden_forms()[name])
    folder = write_eagle3(tmp_path, form)
    save_file(tensors, folder / "model.safetensors")
    engine = engine_with("eagle3", folder, self_check=False)
    drafter = drafter_of(engine)
    assert isinstance(drafter, Eagle3)
    hidden, tokens = golden_inputs(form)
    sequence = engine.open(len(tokens), 0, Sampling())
    assert engine._cache.reserve(sequence, len(tokens))
    tables = drafter._target.tables
    token_ids = torch.arange(form.tokens) + tensors["d2t"]
    states = drafter._pass(
        StepInput.of(tables, [Feed(tokens, 0, 0, sequence.blocks, None)]), drafter._head.reduce(hidden)
    )
    first = drafter._logits(states)[:, token_ids]
    torch.testing.assert_close(first, GOLDEN[f"{name}.first"], atol=1e-4, rtol=1e-4)
    # Its own state is fed back one position before the end, with the last token.
    place = len(tokens) - 1
    second = drafter._pass(
        StepInput.of(tables, [Feed(tokens[-1:], 0, place, sequence.blocks, None)]), states[place - 1 : place]
    )
    logits = drafter._logits(second)[0, token_ids]
    torch.testing.assert_close(logits, GOLDEN[f"{name}.second"], atol=1e-4, rtol=1e-4)
