"""Hidden states of a model's layers, from our forward pass and from transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.decoding.draft import Draft
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.drafters.target_drafter import Target, TargetDrafter
from outrider.engine.drafters.target_drafters import TargetDrafters
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.settings import EngineSettings

BLOCK_SIZE = 8
PROMPTS = ([5, 9, 33, 7, 100, 42, 8, 61, 17, 3, 90], [77, 12, 4, 200, 31])


class Reader(TargetDrafter):
    """Target drafter that reads hidden states and never drafts."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.hidden_layers = layers

    def load(self, target: Target) -> None: ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        raise NotImplementedError


@dataclass(frozen=True)
class Passed:
    states: Tensor  # [num_tokens, num_layers, hidden_size]
    kept: list[int]  # layers whose states the model returned


@torch.inference_mode()
def pass_of(folder: Path, layers: tuple[int, ...], **settings: object) -> Passed:
    """Runs both prompts in one step."""
    given = {"block_size": BLOCK_SIZE, "cache_memory": 2**21, "self_check": False, **settings}
    passed = load_forward_pass(
        EngineSettings.model_validate({"model": str(folder), **given}),
        drafters=TargetDrafters([Reader(layers)]),
    )
    kept: set[int] = set()

    def see(module: object, args: object, output: dict[str, Sequence[Tensor | None]]) -> None:
        states = output["hidden_states"]
        kept.update(layer for layer, state in enumerate(states) if state is not None)

    passed.model.register_forward_hook(see)
    feeds = [
        Feed(tokens, 1, 0, HeldBlocks([2 * place, 2 * place + 1]), None)
        for place, tokens in enumerate(PROMPTS)
    ]
    output = passed.run(passed.prepare(StepInput.of(passed.tables, feeds)))
    assert output.hidden is not None
    return Passed(output.hidden.cpu(), sorted(kept))


@torch.inference_mode()
def transformers_states(folder: Path) -> list[Tensor]:
    """Returns the states by layer, [num_tokens, hidden_size]; the last after the final norm."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    by_prompt = [
        model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states for tokens in PROMPTS
    ]
    return [torch.cat([state[0] for state in of_layer]) for of_layer in zip(*by_prompt, strict=True)]
