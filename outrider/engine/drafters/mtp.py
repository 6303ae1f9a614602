"""MTP: the layers for multi-token prediction that a target's checkpoint carries, trained with the target.

A layer reads the target's last state, after the norm, and the embedding of the next token. With the target's
own output projection it predicts the token after that. A single layer is trained to predict a single token.
It drafts further tokens from its own normed output state.

Source: DeepSeek-AI, "DeepSeek-V3 technical report", 2024.
"""

from typing import Any

from torch import Tensor

from outrider.engine.drafters.autoregressive_head import AutoregressiveHead
from outrider.engine.drafters.mtp_checkpoint import MtpCheckpoint, after
from outrider.engine.drafters.target_drafter import Target
from outrider.engine.forward.attention import Paged
from outrider.engine.forward.linear import optimize_for_cpu
from outrider.engine.settings import EngineSettings


class Mtp(AutoregressiveHead):
    """Drafter for a checkpoint with a single MTP layer."""

    hidden_layers = (-1,)

    def __init__(self, settings: EngineSettings, name: str, checkpoint: MtpCheckpoint) -> None:
        super().__init__(settings, name)
        self._checkpoint = checkpoint
        self.cache_shapes = checkpoint.cache_shapes
        self.state_size = self._checkpoint.target.hidden_size
        self.weight_bytes = self._checkpoint.weight_bytes

    def load(self, target: Target) -> None:
        super().load(target)
        self._model: Any = self._checkpoint.load(target, *self._share)
        del self._checkpoint
        if target.device.type == "cpu":
            optimize_for_cpu(self._model.layers)

    def _reduced(self, hidden: Tensor) -> Tensor:
        return hidden[:, 0]

    def _forward(self, states: Tensor, paged: Paged) -> Tensor:
        batch = paged.batch
        return after(self._model, states[None], batch.token_ids, batch.position_ids, paged)[0]

    def _logits(self, states: Tensor) -> Tensor:
        logits: Tensor = self._model.shared_head(states)
        return logits
