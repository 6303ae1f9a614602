"""Vocabulary of a head: its own embedding, and the part of the target's tokens that it knows."""

from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.drafters.target_drafter import Target
from outrider.engine.loading.head_checkpoint import HeadCheckpoint
from outrider.engine.parallel.layers import VocabParallelEmbedding


def embedding_of(checkpoint: HeadCheckpoint, target: Target, size: int, rank: int, ranks: int) -> Any:
    """Returns a rank's share of the head's own embedding, or the target's if the checkpoint has none.

    size: hidden_size of the head.

    Raises:
        UnsupportedModelError: the embedding has another size.
    """
    model, weight = target.model, checkpoint.tensors.get("embed_tokens.weight")
    found = model.get_input_embeddings().weight.shape[1] if weight is None else weight.shape[1]
    if found != size:
        raise checkpoint.refusal(f"hidden_size={size} must be {found}, the embedding's")
    if weight is None:
        return model.get_input_embeddings()
    count = len(weight)
    if ranks == 1:
        return nn.Embedding(count, size, _weight=weight.to(model.device, model.dtype))
    share = weight[rank * -(-count // ranks) :][: -(-count // ranks)].clone()
    return VocabParallelEmbedding(share.to(model.device, model.dtype), count)


def token_ids_of(
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


def over_all_tokens(known: Tensor, token_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Returns logits [num_rows, vocab_size], -inf for tokens outside the head's vocabulary.

    Args:
        known: [num_rows, num_known] logits of the head.
        token_ids: [num_known]; None: the head knows all tokens.
    """
    if token_ids is None:
        return known
    logits = known.new_full((len(known), vocab_size), -torch.inf)
    logits[:, token_ids] = known
    return logits
