"""EAGLE-3: a head that reads three layers of the target at every token, and drafts token by token."""

import torch
from torch import Tensor, nn

from outrider.engine.drafters.autoregressive_head import AutoregressiveHead
from outrider.engine.drafters.beside_target import Target
from outrider.engine.drafters.eagle3_head import Eagle3Head, Eagle3Shape, built, network_tensors, rotary
from outrider.engine.forward.attention import Paged
from outrider.engine.forward.linear import optimize_for_cpu
from outrider.engine.loading.head_checkpoint import HeadCheckpoint
from outrider.engine.settings import EngineSettings


class Eagle3(AutoregressiveHead):
    """Its embedding and its output projection are the target's where it has none of its own."""

    may_stand_beside_ranks = True

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._checkpoint = HeadCheckpoint(settings)
        self._shape = Eagle3Shape.of(self._checkpoint)
        self.hidden_layers = self._shape.hidden_layers
        self.cache_shapes = (self._shape.cache,)
        self.state_size = self._shape.layer.hidden_size
        self.weight_bytes = self._checkpoint.weight_bytes
        self.reads_embedding = "embed_tokens.weight" not in self._checkpoint.tensors
        self.reads_projection = "lm_head.weight" not in network_tensors(self._checkpoint.tensors)

    def load(self, target: Target) -> None:
        super().load(target)
        tensors, model = self._checkpoint.tensors, target.model
        self._vocab_size = self._checkpoint.target.vocab_size
        self._head: Eagle3Head = built(self._checkpoint, self._shape, model)
        self._rotary = rotary(self._shape, model.device)
        self._token_ids = _token_ids(self._checkpoint, self._head.lm_head, model.device)
        self._embedding = target.embedding
        if "embed_tokens.weight" in tensors:
            own = tensors["embed_tokens.weight"].to(model.device, model.dtype)
            self._embedding = nn.Embedding(len(own), own.shape[1], _weight=own)
        size = self._shape.layer.hidden_size
        if self._embedding.weight.shape[1] != size:
            raise self._checkpoint.refusal(
                f"hidden_size={size} must be {self._embedding.weight.shape[1]}, the embedding's"
            )
        self._projection = self._head.lm_head or target.projection
        if model.device.type == "cpu":
            optimize_for_cpu(self._head)
            self._projection = self._head.lm_head or self._projection
        del self._checkpoint

    def _reduced(self, hidden: Tensor) -> Tensor:
        return self._head.reduce(hidden)

    def _forward(self, states: Tensor, paged: Paged) -> Tensor:
        embeddings = self._embedding(paged.batch.token_ids[0])
        rotation = self._rotary(states, paged.batch.position_ids)
        after: Tensor = self._head(embeddings, states, rotation, paged)
        return after

    def _logits(self, states: Tensor) -> Tensor:
        """[num_rows, vocab_size], -inf at tokens that the head does not know"""
        known: Tensor = self._projection(self._head.before_logits(states))
        if self._token_ids is None:
            return known
        logits = known.new_full((len(known), self._vocab_size), -torch.inf)
        logits[:, self._token_ids] = known
        return logits


def _token_ids(
    checkpoint: HeadCheckpoint, projection: nn.Linear | None, device: torch.device
) -> Tensor | None:
    """Of the tokens that the head's own projection tells apart; None: all of the target's, in their order."""
    tensors, vocabulary = checkpoint.tensors, checkpoint.target.vocab_size
    if "t2d" in tensors:
        checkpoint.check_shape("t2d", (vocabulary,))
    count = vocabulary if projection is None else projection.out_features
    if "d2t" not in tensors:
        if count != vocabulary:
            raise checkpoint.refusal(
                f"it has {count} tokens of the target's {vocabulary}, and no d2t for them"
            )
        return None
    checkpoint.check_shape("d2t", (count,))
    token_ids = torch.arange(count) + tensors["d2t"].long()
    if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocabulary:
        raise checkpoint.refusal(
            f"d2t names token {int(token_ids.max())}, and the target has {vocabulary} tokens"
        )
    if len({*token_ids.tolist()}) != count:
        raise checkpoint.refusal("d2t names a token twice")
    return token_ids.to(device)
