"""Training of a DSpark draft: blocks from many anchors of a text, all of them in one pass.

Source: "DSpark", arXiv 2607.05147, 2026. A row here sees earlier rows alone, as in "JetSpec", arXiv
2606.18394. All masks say the same, so later rows would tell it nothing, and a shorter block stays exact. So
short blocks from many anchors are trained first: what the first row learns serves all rows.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from transformers import Qwen3Config

from outrider.engine.drafters.dflash_head import BlockShape, DFlashHead, rotary
from outrider.engine.drafters.markov_head import RECURRENT
from workshop.training.attention import ATTENTION
from workshop.training.blocks import Blocks
from workshop.training.settings import DFlashSettings
from workshop.training.target import FrozenTarget, Reading
from workshop.training.trainee import PositionGuess, Trainee

PROBED = 256  # random tokens that show how large the target's states are
AT_ONCE = 64  # anchors of a pass in measuring: bounds its memory


class DFlashTrainee(Trainee):
    """DSpark draft with the target's embedding and output projection."""

    title = "DSpark draft"
    depths = ((0.3, 1), (0.5, 3))

    def __init__(self, settings: DFlashSettings, target: FrozenTarget) -> None:
        """Prepares the draft. Raises ValueError if the target does not have the mask token."""
        vocabulary = target.config.vocab_size
        if settings.mask_token >= vocabulary:
            raise ValueError(f"mask_token={settings.mask_token} must be below {vocabulary}")
        self._target, self._anchors = target, settings.anchors
        self.hidden_layers = settings.layers or target.usual_layers
        self._config = Qwen3Config(
            **target.layer_sizes(settings.intermediate_size),
            num_hidden_layers=settings.draft_layers,
            attn_implementation=ATTENTION,
        )
        self._shape = BlockShape(
            self._config,
            self.hidden_layers,
            block_size=settings.depth,
            num_guesses=settings.depth,
            mask_token=settings.mask_token,
            looks_ahead=False,
            markov_rank=settings.markov_rank,
            markov_head=RECURRENT,
        )
        self.network: DFlashHead = DFlashHead(self._shape, target.config.hidden_size, vocabulary, None)
        for weight in self.network.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)
        assert self.network.markov_head is not None
        self._markov_head = self.network.markov_head
        nn.init.zeros_(self._markov_head.markov_w2.weight)  # at first no token changes the guess after it
        self._rotary = rotary(self._shape, target.device)
        self._scales = self._scales_of_layers()

    def _scales_of_layers(self) -> Tensor:
        """Returns factors [num_layers, 1] that bring the states of all layers to the size of 1.

        The format has no norm for each layer. Powers of two become a part of ``fc`` without rounding.
        """
        vocabulary, device = self._target.config.vocab_size, self._target.device
        tokens = torch.randint(vocabulary, (1, PROBED), generator=torch.Generator().manual_seed(0))
        hidden = self._target.read(tokens.to(device), self.hidden_layers).hidden
        sizes = hidden.square().mean(-1).sqrt().median(1).values[0]
        return torch.exp2(-sizes.log2().round())[:, None]

    def guesses(
        self, reading: Reading, depth: int, generator: torch.Generator | None
    ) -> Iterator[PositionGuess]:
        anchors = self._drawn(reading.tokens.shape[1] - depth, depth, generator).to(reading.tokens.device)
        parts = torch.split(anchors, AT_ONCE)
        states = torch.cat([self._states(reading, part, depth) for part in parts], dim=1)
        memory = states.new_zeros(len(reading.tokens) * len(anchors), self._markov_head.memory_size)
        for position in range(depth):
            places = anchors + position
            of_row = states[:, :, position]
            tokens = reading.tokens[:, places].flatten()
            bias, memory = self._markov_head(of_row.flatten(0, 1), tokens, memory)
            logits = linear(of_row, self._target.projection) + bias.view(*of_row.shape[:2], -1)
            yield PositionGuess(logits.float(), places, continues_chain=position > 0)

    def _drawn(self, count: int, size: int, generator: torch.Generator | None) -> Tensor:
        """Returns anchors in their order; none is at the first token, which has no text before it.

        size: rows of a block; the shorter the blocks, the more of them are drawn.
        """
        if generator is None:
            return torch.arange(1, count)
        wanted = self._anchors * self._shape.block_size // size
        return 1 + torch.randperm(count - 1, generator=generator)[:wanted].sort().values

    def _states(self, reading: Reading, anchors: Tensor, size: int) -> Tensor:
        """Returns states after the rows of all blocks: [rows, num_anchors, size, hidden_size]."""
        network = self.network
        rows, length = reading.tokens.shape
        device = reading.tokens.device
        states = network.reduce((reading.hidden * self._scales).flatten(0, 1)).view(rows, length, -1)
        rotation = self._rotary(states, torch.arange(length, device=device)[None])
        blocks = Blocks(anchors, size, length)
        for number in range(len(network.layers)):
            key, value = network.context(number, states, rotation)
            blocks.read(key.transpose(1, 2), value.transpose(1, 2))
        tokens = reading.tokens.new_full((rows, len(anchors), size), self._shape.mask_token)
        tokens[:, :, 0] = reading.tokens[:, anchors]
        positions = (anchors[:, None] + torch.arange(size, device=device)).view(1, -1)
        after: Tensor = embedding(tokens.flatten(1), self._target.embedding).float()
        after = network(after, self._rotary(after, positions), blocks)
        return after.view(rows, len(anchors), size, -1)

    def save(self, folder: Path) -> None:
        """Writes the draft as DeepSpec stores it."""
        tensors = dict(self.network.state_dict())
        scales = self._scales.repeat_interleave(self._target.config.hidden_size)
        tensors["fc.weight"] = tensors["fc.weight"] * scales
        stored = {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        shape = self._shape
        config = {
            **self._config.to_diff_dict(),
            "architectures": ["Qwen3DSparkModel"],
            "dtype": "bfloat16",
            "block_size": shape.block_size,
            "mask_token_id": shape.mask_token,
            # The format counts layers by their outputs.
            "target_layer_ids": [layer - 1 for layer in self.hidden_layers],
            "num_target_layers": self._target.config.num_hidden_layers,
            "is_causal": True,
            "markov_rank": shape.markov_rank,
            "markov_head_type": shape.markov_head,
            "enable_confidence_head": False,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
