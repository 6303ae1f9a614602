"""A part of a model: it passes through the layers that it should, and no others, and shares their weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.attention import Probe
from outrider.engine.forward.part import layers_of, part_of
from outrider.engine.loading.weights import attach
from tests.support.checkpoints import ARCHITECTURES, HYBRIDS, write_checkpoint

TOKENS = torch.tensor([[5, 9, 33, 7, 100, 42]])


def loaded(folder: Path, kind: str, layers: int = 4) -> Any:
    more: dict[str, Any] = (
        {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2} if kind == "afmoe" else {}
    )
    write_checkpoint(folder, kind, num_hidden_layers=layers, **more)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@torch.inference_mode()
def logits_of(model: Any) -> torch.Tensor:
    return model(input_ids=TOKENS, use_cache=False).logits[0]


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES.keys() - HYBRIDS))  # no part of a hybrid drafts
@torch.inference_mode()
def test_first_layers_give_what_the_models_norm_and_head_make_of_their_state(
    tmp_path: Path, kind: str
) -> None:
    model = loaded(tmp_path, kind)
    seen = []
    hook = layers_of(model)[2].register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
    expected = logits_of(model)
    hook.remove()
    logits = logits_of(part_of_eager(model, [0, 1]))
    assert not torch.allclose(logits, expected, atol=1e-3)
    torch.testing.assert_close(logits, of_state(model, seen[0]), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(logits_of(model), expected)  # and the model is as it was


def part_of_eager(model: Any, layers: list[int]) -> Any:
    attach(model, "model")
    part = part_of(model, layers)
    part.set_attn_implementation("eager")
    model.set_attn_implementation("eager")
    return part


def of_state(model: Any, state: torch.Tensor) -> torch.Tensor:
    """Logits of what goes into its last layers, if those did nothing."""
    hooks = [layer.register_forward_hook(lambda layer, args, output: state) for layer in layers_of(model)[1:]]
    logits = logits_of(model)
    for hook in hooks:
        hook.remove()
    return logits


def test_each_layer_writes_where_it_writes_in_the_whole_model(tmp_path: Path) -> None:
    model = loaded(tmp_path, "gemma3_text")
    attach(model, "model")
    probe = Probe()
    part_of(model, [0, 3])(input_ids=TOKENS, position_ids=TOKENS, use_cache=False, outrider=probe)
    whole = Probe()
    model(input_ids=TOKENS, position_ids=TOKENS, use_cache=False, outrider=whole)
    assert [*probe.shapes] == [0, 3]
    assert {layer: probe.windows[layer] for layer in (0, 3)} == {
        layer: whole.windows[layer] for layer in (0, 3)
    }
    assert all(probe.modules[layer] is whole.modules[layer] for layer in (0, 3))


def test_norm_of_its_own_takes_the_place_of_the_last(tmp_path: Path) -> None:
    class Doubled(nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return 2 * states

    model = loaded(tmp_path, "llama")
    attach(model, "model")
    with torch.inference_mode():
        given = {"input_ids": TOKENS, "position_ids": TOKENS, "use_cache": False}
        plain, doubled = (
            part_of(model, [0], norm)(**given, outrider=Probe()).logits for norm in (nn.Identity(), Doubled())
        )
    torch.testing.assert_close(doubled, 2 * plain)


def test_model_that_goes_by_another_way_is_refused(tmp_path: Path) -> None:
    class Everything(nn.ModuleList):
        """Whatever is taken of it."""

    model = loaded(tmp_path, "llama")
    attach(model, "model")
    of_layers = model.model
    forward = type(of_layers).forward

    def through_all(self: Any, *args: Any, **given: Any) -> Any:
        self._modules["layers"] = model.model._modules["layers"]
        self.config = model.config
        return forward(self, *args, **given)

    of_layers.forward = through_all.__get__(of_layers)
    with pytest.raises(UnsupportedModelError, match=r"passes through layers \[0, 1, 2, 3\] where \[0, 1\]"):
        part_of(model, [0, 1])
