"""What a drafter beside the target is given: the states of its layers, as transformers numbers them."""

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import write_checkpoint
from tests.support.functions import needs_functions
from tests.support.hidden_states import pass_of, transformers_states

LAYERS = (-1, 0, 2)  # the last, what goes into the first, what goes into the third


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "gpt2", "gpt_oss"])
def test_states_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    check_states(write_checkpoint(tmp_path, kind, num_hidden_layers=4))


@needs_functions
def test_passes_of_one_row_give_the_same(tmp_path: Path) -> None:
    check_states(write_checkpoint(tmp_path, "llama", num_hidden_layers=4), batch_invariant=True)


def check_states(folder: Path, **settings: object) -> None:
    states = pass_of(folder, LAYERS, **settings).states
    expected = transformers_states(folder)
    for place, layer in enumerate(LAYERS):
        torch.testing.assert_close(states[:, place], expected[layer], rtol=1e-3, atol=1e-4)


def test_layer_off_by_one_would_be_seen(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", num_hidden_layers=4)
    states = pass_of(folder, (1, 2, 3)).states
    expected = transformers_states(folder)
    for place, layer in enumerate((1, 2, 3)):
        for other in (layer - 1, layer + 1):
            assert not torch.allclose(states[:, place], expected[other], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt2", "phi3"])  # models without a decoder of ours
def test_states_of_the_other_layers_are_not_kept(tmp_path: Path, kind: str) -> None:
    folder = write_checkpoint(tmp_path, kind, num_hidden_layers=4)
    assert pass_of(folder, LAYERS).kept == [0, 2, 4]
