"""The target's vocabulary as a drafter at rank 0 needs it: whole, where each rank has some tokens of it.

Such a drafter runs at rank 0 alone, on states that all ranks have alike. A pass over what is shared out would
take all ranks, so rank 0 keeps a copy of its own. That costs memory once, and no step of it an exchange.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from outrider.engine.drafters.beside_target import BesideTarget
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.linear import joined, optimize_for_cpu
from outrider.engine.parallel.layers import ParallelLMHead, VocabParallelEmbedding
from outrider.engine.parallel.rank_group import RankGroup


class WholeVocabulary:
    """Of a model as it was loaded; each rank of a group has to make one."""

    def __init__(self, model: Any, group: RankGroup | None, beside: BesideTarget | None) -> None:
        """
        Args:
            group: None: the model is whole.
            beside: at rank 0, what reads it; None at the others.

        Raises:
            UnsupportedModelError: a part of it that is read is shared out in a way that is not known.
        """
        self._model = model
        self._embedding: nn.Embedding | None = None
        self._projection = nn.ModuleList()  # none or one, so that it can be packed
        if group is None:
            return
        # What rank 0 says is the smallest: the others have no drafter to ask.
        reads_embedding = group.least(int(beside is None or beside.reads_embedding))
        reads_projection = group.least(int(beside is None or beside.reads_projection))
        embedding, projection = model.get_input_embeddings(), model.get_output_embeddings()
        if reads_embedding and _is_shared_out(embedding):
            weight = _gathered(_share_of(embedding, VocabParallelEmbedding), embedding.num_tokens)
            if beside is not None:
                self._embedding = nn.Embedding(len(weight), weight.shape[1], _weight=weight)
        if reads_projection and _is_shared_out(projection):
            share = _share_of(getattr(projection, "linear", projection), nn.Linear)
            weight = _gathered(share, projection.num_tokens)
            if beside is not None:
                self._projection.append(joined(weight, None))
                if weight.device.type == "cpu":
                    optimize_for_cpu(self._projection)

    @property
    def embedding(self) -> Any:
        """Token ids [...] to rows [..., hidden_size]."""
        return self._model.get_input_embeddings() if self._embedding is None else self._embedding

    @property
    def projection(self) -> Any:
        """[..., hidden_size] to logits [..., vocab_size]."""
        return self._projection[0] if len(self._projection) else self._model.get_output_embeddings()


def _is_shared_out(module: nn.Module) -> bool:
    if isinstance(module, VocabParallelEmbedding | ParallelLMHead):
        return True
    return any(isinstance(weight, DTensor) for weight in module.parameters())


def _share_of(module: nn.Module, kind: type[nn.Module]) -> Tensor:
    if type(module) is not kind or getattr(module, "bias", None) is not None:
        raise UnsupportedModelError(
            f"tensor_parallel={dist.get_world_size()}: a drafter beside the target shares its vocabulary, and"
            f" ranks hold {type(module).__name__} of that, which is not known how to join; give 1"
        )
    weight: Tensor = module.get_parameter("weight")
    return weight.detach()


def _gathered(share: Tensor, num_tokens: int) -> Tensor:
    """Of all ranks' shares [own tokens, features] the whole [num_tokens, features], at rank 0."""
    width = -(-num_tokens // dist.get_world_size())
    padded = pad(share, (0, 0, 0, width - len(share))).contiguous()  # the last rank may have fewer
    if dist.get_rank():
        dist.gather(padded)
        return share
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.gather(padded, parts)
    return torch.cat(parts)[:num_tokens]
