"""Blocks of guesses against those of the speculators package, kept by golden/make_blocks.py.

The configs are those that the package wrote, so layers and places of rows are read from them.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.decoding.settings import Sampling
from outrider.engine.drafters.dflash import DFlash
from outrider.engine.drafters.peagle import PEagle
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.parallel.drafter_step import DrafterStep
from tests.support import dflash, eagle3
from tests.support.target_drafters import drafter_of, engine_with

FOLDER = Path(__file__).parent / "golden"
LOGITS, CONFIGS = load_file(FOLDER / "blocks.safetensors"), json.loads((FOLDER / "blocks.json").read_text())


def write(folder: Path, name: str, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return folder


@pytest.mark.parametrize("name", dflash.golden_forms())
@torch.inference_mode()
def test_logits_of_a_block_draft_are_those_of_the_speculators_package(tmp_path: Path, name: str) -> None:
    form = dflash.golden_forms()[name]
    tensors = dflash.golden_tensors(form)
    engine = engine_with("dflash", write(tmp_path, name, tensors), self_check=False)
    drafter = drafter_of(engine)
    assert isinstance(drafter, DFlash)
    assert drafter.hidden_layers == form.inputs
    hidden, tokens = dflash.golden_inputs(form)
    anchor = dflash.GOLDEN_ANCHOR
    sequence = engine.open(len(tokens), 0, Sampling())
    assert engine._cache.reserve(sequence, anchor + dflash.BLOCK)
    rows = [tokens[anchor]] + [dflash.MASK] * (dflash.BLOCK - 1)
    feeds = [
        Feed(tokens[:anchor], 0, 0, sequence.blocks, None),
        Feed(rows, form.guesses, anchor, sequence.blocks, None, looks_ahead=drafter.looks_ahead),
    ]
    context, block = (StepInput.of(drafter._target.tables, [feed]) for feed in feeds)
    states = drafter._reduced(hidden[:anchor])
    drafter._compute(DrafterStep(context, wants_logits=False), states)
    states, logits = drafter._compute(DrafterStep(block), states[:0])
    token_ids = torch.arange(form.tokens) + tensors["d2t"]
    memory = states.new_zeros(1, drafter.memory_size)
    for row, before in enumerate(tokens[anchor : anchor + form.guesses]):
        of_row = states[row : row + 1], logits[row : row + 1]
        found, memory = drafter._after_tokens(*of_row, [before], memory)
        torch.testing.assert_close(found[0, token_ids], LOGITS[name][row], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_logits_of_a_p_eagle_head_are_those_of_the_speculators_package(tmp_path: Path) -> None:
    form = eagle3.P_EAGLE
    tensors = eagle3.golden_tensors(form)
    engine = engine_with("peagle", write(tmp_path, "P-EAGLE", tensors), self_check=False)
    drafter = drafter_of(engine)
    assert isinstance(drafter, PEagle)
    hidden, tokens = eagle3.golden_inputs(form)
    newest, guesses = eagle3.GOLDEN_NEWEST, eagle3.GOLDEN_GUESSES
    sequence = engine.open(len(tokens), 0, Sampling())
    assert engine._cache.reserve(sequence, newest + guesses)
    tables, states = drafter._target.tables, drafter._head.reduce(hidden[: newest + 1])
    drafter._pass(StepInput.of(tables, [Feed(tokens[: newest + 1], 0, 0, sequence.blocks, None)]), states)
    rows = Feed([tokens[newest]] + [eagle3.MASK] * (guesses - 1), guesses, newest, sequence.blocks, None)
    states = torch.cat([states[-1:], drafter._mask_state.expand(guesses - 1, -1)])
    after = drafter._pass(StepInput.of(tables, [rows]), states)
    logits = drafter._logits(after)[:, torch.arange(form.tokens) + tensors["d2t"]]
    torch.testing.assert_close(logits, LOGITS["P-EAGLE"], atol=1e-4, rtol=1e-4)
