"""EAGLE-3: a head that reads three layers of the target at every token, and drafts token by token."""

from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.drafters.autoregressive_head import AutoregressiveHead
from outrider.engine.drafters.eagle3_head import Eagle3Head, Eagle3Shape, built, empty, rotary
from outrider.engine.drafters.target_drafter import Target
from outrider.engine.forward.attention import Paged
from outrider.engine.forward.linear import optimize_for_cpu
from outrider.engine.loading.head_checkpoint import HeadCheckpoint
from outrider.engine.parallel.layers import VocabParallelEmbedding
from outrider.engine.settings import EngineSettings


class Eagle3(AutoregressiveHead):
    """EAGLE-3 drafter. Without its own embedding or output projection it uses the target's."""

    def __init__(self, settings: EngineSettings, name: str) -> None:
        super().__init__(settings, name)
        self._checkpoint = HeadCheckpoint(settings, name)
        self._shape = Eagle3Shape.of(self._checkpoint)
        self.hidden_layers = self._shape.hidden_layers
        self.state_size = self._shape.layer.hidden_size
        ranks, head = settings.tensor_parallel, empty(self._checkpoint, self._shape)
        heads, key, value = self._shape.cache
        if ranks > 1 and head.share_out(0, ranks):
            heads //= ranks
        self.cache_shapes = ((heads, key, value),)
        own = self._checkpoint.tensors.get("embed_tokens.weight", torch.empty(0))
        numbers = sum(weight.numel() for weight in head.parameters()) + -(-own.numel() // ranks)
        self.weight_bytes = numbers * self._checkpoint.target.dtype.itemsize

    def load(self, target: Target) -> None:
        super().load(target)
        model, (rank, ranks) = target.model, self._share
        self._vocab_size = self._checkpoint.target.vocab_size
        head = built(self._checkpoint, self._shape)
        # Nothing is chosen from logits of other ranks.
        self._token_ids = None if rank else _token_ids(self._checkpoint, head.lm_head, model.device)
        if ranks > 1:
            head.share_out(rank, ranks)
        self._head: Eagle3Head = head.to(model.device, model.dtype)
        self._rotary = rotary(self._shape, model.device)
        self._embedding = self._own_embedding() or model.get_input_embeddings()
        size, found = self._shape.layer.hidden_size, self._embedding.weight.shape[1]
        if found != size:
            raise self._checkpoint.refusal(f"hidden_size={size} must be {found}, the embedding's")
        if model.device.type == "cpu":
            optimize_for_cpu(self._head)
        self._projection = self._head.lm_head or model.get_output_embeddings()
        del self._checkpoint

    def _own_embedding(self) -> Any:
        """Returns the head's own embedding; None: it has none."""
        model, (rank, ranks) = self._target.model, self._share
        weight = self._checkpoint.tensors.get("embed_tokens.weight")
        if weight is None:
            return None
        count, size = weight.shape
        if ranks == 1:
            return nn.Embedding(count, size, _weight=weight.to(model.device, model.dtype))
        share = weight[rank * -(-count // ranks) :][: -(-count // ranks)].clone()
        return VocabParallelEmbedding(share.to(model.device, model.dtype), count)

    def _reduced(self, hidden: Tensor) -> Tensor:
        return self._head.reduce(hidden)

    def _forward(self, states: Tensor, paged: Paged) -> Tensor:
        embeddings = self._embedding(paged.batch.token_ids[0])
        rotation = self._rotary(states, paged.batch.position_ids)
        after: Tensor = self._head(embeddings, states, rotation, paged)
        return after

    def _logits(self, states: Tensor) -> Tensor:
        """Returns logits, -inf at tokens that the head does not know."""
        known: Tensor = self._projection(self._head.before_logits(states))
        if self._token_ids is None:
            return known
        logits = known.new_full((len(known), self._vocab_size), -torch.inf)
        logits[:, self._token_ids] = known
        return logits


def _token_ids(
    checkpoint: HeadCheckpoint, projection: nn.Module | None, device: torch.device
) -> Tensor | None:
    """Returns the token ids of the head's own projection; None: all ids of the target, in order."""
    tensors, vocabulary = checkpoint.tensors, checkpoint.target.vocab_size
    if "t2d" in tensors:
        checkpoint.check_shape("t2d", (vocabulary,))
    count = vocabulary if projection is None else len(projection.get_parameter("weight"))
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
