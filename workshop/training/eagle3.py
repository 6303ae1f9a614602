"""Training of an EAGLE-3 head.

Training is unrolled: the head is fed its own states, as when it drafts. A head that is trained for the first
token alone guesses the next tokens badly. It learns depth after depth, since a deep guess is of no use before
the first guess is correct.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import embedding, linear
from transformers import LlamaConfig

from outrider.engine.drafters.eagle3_head import (
    FIRST,
    FIRST_OF_SAFEAILAB,
    READ_LAYERS,
    Eagle3Head,
    Eagle3Shape,
    rotary,
)
from workshop.training.attention import ATTENTION
from workshop.training.chains import Chains
from workshop.training.settings import Eagle3Settings
from workshop.training.target import FrozenTarget, Reading
from workshop.training.trainee import PositionGuess, Trainee


class Eagle3Trainee(Trainee):
    """EAGLE-3 head with the target's embedding and output projection."""

    title = "EAGLE-3 head"
    depths = ((0.3, 1), (0.5, 2))

    def __init__(self, settings: Eagle3Settings, target: FrozenTarget) -> None:
        self._target = target
        self._kept = settings.kept
        self.hidden_layers = settings.layers or target.usual_layers
        sizes = target.layer_sizes(settings.intermediate_size)
        self._config = LlamaConfig(**sizes, num_hidden_layers=1, attn_implementation=ATTENTION)
        self._shape = Eagle3Shape(
            self._config,
            self.hidden_layers,
            norm_before_residual=False,
            norm_before_fc=False,
            fc_norm=True,  # the states of different layers differ in size
            norm_output=False,
        )
        self.network: Eagle3Head = Eagle3Head(self._shape, target.config.hidden_size, None)
        for weight in self.network.parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=0.02)
        self._rotary = rotary(self._shape, target.device)

    def guesses(
        self, reading: Reading, depth: int, generator: torch.Generator | None
    ) -> Iterator[PositionGuess]:
        rows, length = reading.tokens.shape
        count = length - depth  # positions with all tokens of their Draft after them
        hidden = reading.hidden[:, :count]
        states = self.network.reduce(hidden.flatten(0, 1)).view(rows, count, -1).float()
        embeddings = embedding(reading.tokens, self._target.embedding).float()
        chains, starts = Chains(), torch.arange(count, device=reading.tokens.device)
        for position in range(depth):
            # The state at a token goes with the next token, in the slot of the first.
            rotation = self._rotary(states, starts[None] + position)
            following = embeddings[:, starts + position + 1]
            states = self.network.layers[0](following, states, rotation, chains).float()
            logits = linear(self.network.before_logits(states), self._target.projection).float()
            yield PositionGuess(logits, starts + position + 1)
            if position == 0:
                kept = self._some_of(count, generator)
                starts, states = starts[kept], states[:, kept]
                chains.start(starts)

    def _some_of(self, count: int, generator: torch.Generator | None) -> Tensor:
        if generator is None:
            return torch.arange(count)
        chosen = torch.randperm(count, generator=generator)[: max(1, round(self._kept * count))]
        return chosen.sort().values

    def save(self, folder: Path) -> None:
        """Writes the head as SafeAILab and SpecForge store it."""
        tensors = {
            name.replace(FIRST, FIRST_OF_SAFEAILAB): tensor.bfloat16().contiguous()
            for name, tensor in self.network.state_dict().items()
        }
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        vocabulary = self._target.config.vocab_size
        config = {
            **self._config.to_diff_dict(),
            "architectures": ["LlamaForCausalLMEagle3"],
            "dtype": "bfloat16",
            "vocab_size": vocabulary,
            "draft_vocab_size": vocabulary,
            "eagle_config": {
                # The format counts layers by their outputs.
                READ_LAYERS: [layer - 1 for layer in self.hidden_layers],
                "fc_norm": True,
            },
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
