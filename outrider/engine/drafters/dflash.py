"""DFlash, DFlash2 and DSpark: a few layers beside the target, which guess a block of tokens in one pass."""

import logging

import torch
from torch import Tensor

from outrider.decoding.choice_context import to_device
from outrider.engine.drafters.block_head import BlockHead
from outrider.engine.drafters.dflash_head import BlockShape, DFlashHead, built, empty, rotary
from outrider.engine.drafters.draft_vocabulary import embedding_of, over_all_tokens, token_ids_of
from outrider.engine.drafters.target_drafter import Target
from outrider.engine.forward.attention import Paged
from outrider.engine.forward.linear import optimize_for_cpu
from outrider.engine.loading.head_checkpoint import HeadCheckpoint
from outrider.engine.settings import EngineSettings

logger = logging.getLogger(__name__)


class DFlash(BlockHead):
    """Drafter for these checkpoints. Without its own embedding or output projection it uses the target's."""

    def __init__(self, settings: EngineSettings, name: str) -> None:
        super().__init__(settings, name)
        self._checkpoint = HeadCheckpoint(settings, name)
        self._shape = shape = BlockShape.of(self._checkpoint)
        self.hidden_layers = shape.hidden_layers
        self.state_size = shape.layers.hidden_size
        self.block_size, self.num_guesses = shape.block_size, shape.num_guesses
        self.mask_token, self.looks_ahead = shape.mask_token, shape.looks_ahead
        ranks, head = settings.tensor_parallel, empty(self._checkpoint, shape)
        is_shared = ranks > 1 and head.share_out(0, ranks)
        self.cache_shapes = tuple(
            (heads // ranks if is_shared else heads, key, value) for heads, key, value in shape.cache
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
        self._head: DFlashHead = head.to(model.device, model.dtype)
        self.memory_size = 0 if head.markov_head is None else head.markov_head.memory_size
        self._rotary = rotary(self._shape, model.device)
        self._embedding = embedding_of(self._checkpoint, target, self.state_size, rank, ranks)
        tokens = getattr(self._embedding, "num_tokens", len(self._embedding.weight))
        if self.mask_token >= tokens:
            raise self._checkpoint.refusal(
                f"mask_token_id={self.mask_token} must be below {tokens}, the embedding's tokens"
            )
        if model.device.type == "cpu":
            optimize_for_cpu(self._head)
        self._projection = self._head.lm_head or model.get_output_embeddings()
        # Logged because a wrong layer index raises no error: it only lowers the acceptance rate.
        logger.info("%s: %s", self, self._shape)
        del self._checkpoint

    def _reduced(self, hidden: Tensor) -> Tensor:
        return self._head.reduce(hidden)

    def _store(self, states: Tensor, paged: Paged) -> None:
        self._head.store(states, self._rotary(states, paged.batch.position_ids), paged)

    def _forward(self, paged: Paged) -> Tensor:
        embeddings = self._embedding(paged.batch.token_ids)
        after: Tensor = self._head(embeddings, self._rotary(embeddings, paged.batch.position_ids), paged)
        return after[0]

    def _logits(self, states: Tensor) -> Tensor:
        logits: Tensor = self._projection(states)
        return logits

    def _confidences(self, states: Tensor, tokens: list[int]) -> Tensor | None:
        if self._head.confidence_head is None:
            return None
        markov = self._head.markov_head
        before = None if markov is None else markov.markov_w1(to_device(torch.tensor(tokens), states.device))
        found: Tensor = self._head.confidence_head(states, before)
        return found

    def _after_tokens(
        self, states: Tensor, logits: Tensor, tokens: list[int], memory: Tensor
    ) -> tuple[Tensor, Tensor]:
        before = to_device(torch.tensor(tokens), states.device)
        if self._head.markov_head is not None:
            bias, memory = self._head.markov_head(states, before, memory)
            logits = logits + bias
        if self._head.candidate_selector is not None:
            logits = self._head.candidate_selector(states, logits, before)
        return over_all_tokens(logits, self._token_ids, self._vocab_size), memory
