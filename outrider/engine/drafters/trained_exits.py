"""Trained exits of a target: a projection and a norm between an early layer and the target's output head.

They are stored as `exits.3.linear.weight` and `exits.3.norm.weight`, where 3 is the number of layers.
"""

import re
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outrider.engine.forward.linear import optimize_for_cpu
from outrider.engine.loading.head_checkpoint import HeadCheckpoint
from outrider.engine.settings import EngineSettings

NAME = re.compile(r"exits\.(\d+)\.(linear|norm)\.weight")
USUAL_EPS = 1e-6  # epsilon of a norm whose config does not name it


class Exit(nn.Module):
    """Projection and norm in place of the target's last norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=False)
        self.norm: nn.Module = LlamaRMSNorm(size, eps=eps)

    @classmethod
    def of(cls, config: Any) -> "Exit":
        """Makes an exit without weights. config: transformers' config of the target's text model."""
        return cls(config.hidden_size, getattr(config, "rms_norm_eps", USUAL_EPS))

    def forward(self, states: Tensor) -> Tensor:
        """Returns the projected and normed states, in the shape of the input: [..., hidden_size]."""
        normed: Tensor = self.norm(self.linear(states))
        return normed


class TrainedExits:
    """Exits of a checkpoint."""

    def __init__(self, settings: EngineSettings, drafter: str) -> None:
        """Finds the exits. Raises UnsupportedModelError if there are none, or if an exit does not fit."""
        self.checkpoint = checkpoint = HeadCheckpoint(settings, drafter)
        checkpoint.check_verifier(checkpoint.config.get("base_model_name_or_path"))
        unknown = [name for name in checkpoint.tensors if NAME.fullmatch(name) is None]
        if unknown or not checkpoint.tensors:
            raise checkpoint.refusal(
                f"its tensors are not those of exits, as exits.3.linear.weight: there are {unknown[:3]}"
            )
        size, count = checkpoint.target.hidden_size, checkpoint.target.num_layers
        for number in self.numbers:
            if not 0 < number < count:
                raise checkpoint.refusal(
                    f"it leaves after {number} layers of a target, and this one has {count}"
                )
            checkpoint.check_shape(f"exits.{number}.linear.weight", (size, size))
            checkpoint.check_shape(f"exits.{number}.norm.weight", (size,))

    @cached_property
    def numbers(self) -> list[int]:
        """Numbers of layers after which there is an exit."""
        found = map(NAME.fullmatch, self.checkpoint.tensors)
        return sorted({int(name[1]) for name in found if name is not None})

    def load(self, number: int, model: Any) -> Exit:
        """Returns the exit after ``number`` layers, on the target's device and in its type."""
        with torch.device("meta"):
            exit_ = Exit.of(model.config.get_text_config())
        state = {
            name: self.checkpoint.tensors[f"exits.{number}.{name}"].to(model.device, model.dtype)
            for name in exit_.state_dict()
        }
        exit_.load_state_dict(state, assign=True)
        exit_.requires_grad_(False)
        if model.device.type == "cpu":
            optimize_for_cpu(exit_)
        return exit_
