"""The logits of MTP layers against those of published implementations, kept by golden/make_mtp.py."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.decoding.settings import Sampling
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.drafters.mtp import Mtp
from outrider.engine.drafters.target_drafter import CommittedStates
from outrider.engine.inputs.step_input import Feed, StepInput
from tests.engine.drafters.golden.make_mtp import OF_SEVERAL
from tests.support.mtp import KINDS, SEVERAL, golden_inputs, published_layers, write_target
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


@pytest.mark.parametrize("kind", OF_SEVERAL)
@torch.inference_mode()
def test_logits_of_several_layers_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = write_target(tmp_path, kind, published_layers(kind))
    engine = engine_with("mtp", model=str(folder), cache_memory=2**22, self_check=False, dtype="float32")
    drafter, expected = drafter_of(engine), GOLDEN[f"{kind}.several"]
    hidden, tokens = golden_inputs()
    text = [0, *tokens]  # each state comes before its token
    sequence = engine.open(len(text), 0, Sampling(temperature=0.0, ignore_eos=True))
    assert engine._cache.reserve(sequence, len(text))
    sequence.tokens, sequence.cached = text, len(tokens)
    found, project = list[torch.Tensor](), drafter._logits

    def projected(rows: torch.Tensor) -> torch.Tensor:
        found.append(project(rows))
        return found[-1]

    monkeypatch.setattr(drafter, "_logits", projected)
    drafter.take_in([CommittedStates(sequence, 0, hidden[:, None], is_wanted=True)])
    (draft,) = drafter.propose([DraftRequest(sequence, SEVERAL)])
    assert list(draft.tokens) == expected.argmax(-1).tolist()
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-4)
