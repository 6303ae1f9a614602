"""EAGLE-3: a head that reads three layers of the target at every token, and drafts token by token."""

import torch
from torch import Tensor

from outrider.engine.drafters.autoregressive_head import AutoregressiveHead
from outrider.engine.drafters.draft_vocabulary import embedding_of, over_all_tokens, token_ids_of
from outrider.engine.drafters.eagle3_head import Eagle3Head, Eagle3Shape, built, empty, rotary
from outrider.engine.drafters.target_drafter import Target
from outrider.engine.forward.attention import Paged
from outrider.engine.forward.linear import optimize_for_cpu
from outrider.engine.loading.head_checkpoint import HeadCheckpoint
from outrider.engine.settings import EngineSettings


class Eagle3(AutoregressiveHead):
    """EAGLE-3 drafter. It uses the target's embedding and output projection if its checkpoint has none."""

    kind = "eagle3"  # kind of its checkpoints, as speculators names them

    def __init__(self, settings: EngineSettings, name: str) -> None:
        super().__init__(settings, name)
        self._checkpoint = HeadCheckpoint(settings, name)
        self._shape = Eagle3Shape.of(self._checkpoint, self.kind)
        self.hidden_layers = self._shape.hidden_layers
        self.state_size = self._shape.layers.hidden_size
        ranks, head = settings.tensor_parallel, empty(self._checkpoint, self._shape)
        is_shared = ranks > 1 and head.share_out(0, ranks)
        self.cache_shapes = tuple(
            (heads // ranks if is_shared else heads, key, value) for heads, key, value in self._shape.cache
        )
        own = self._checkpoint.tensors.get("embed_tokens.weight", torch.empty(0))
        numbers = sum(weight.numel() for weight in head.parameters()) + -(-own.numel() // ranks)
        self.weight_bytes = numbers * self._checkpoint.target.dtype.itemsize

    def load(self, target: Target) -> None:
        super().load(target)
        model, (rank, ranks) = target.model, self._share
        self._vocab_size = self._checkpoint.target.vocab_size
        head = built(self._checkpoint, self._shape)
        # Rank 0 alone chooses tokens.
        self._token_ids = None if rank else token_ids_of(self._checkpoint, head.lm_head, model.device)
        if ranks > 1:
            head.share_out(rank, ranks)
        self._head: Eagle3Head = head.to(model.device, model.dtype)
        self._rotary = rotary(self._shape, model.device)
        self._embedding = embedding_of(self._checkpoint, target, self.state_size, rank, ranks)
        if model.device.type == "cpu":
            optimize_for_cpu(self._head)
        self._projection = self._head.lm_head or model.get_output_embeddings()
        del self._checkpoint

    def _reduced(self, hidden: Tensor) -> Tensor:
        return self._head.reduce(hidden)

    def _forward(self, states: Tensor, paged: Paged) -> Tensor:
        embeddings = self._embedding(paged.batch.token_ids[0])
        rotation = self._rotary(states, paged.batch.position_ids)
        after: Tensor = self._head(embeddings, states, rotation, paged)
        return after

    def _logits(self, states: Tensor) -> Tensor:
        """Returns logits, -inf for tokens outside the head's vocabulary."""
        known: Tensor = self._projection(self._head.before_logits(states))
        return over_all_tokens(known, self._token_ids, self._vocab_size)
