"""Attention without our kernels: it gathers the blocks of a context, then calls torch.

It serves types and head sizes that no kernel supports, and machines without a compiler.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from outrider.engine.cache.key_values import GatherSpace
from outrider.engine.cache.narrow import widened
from outrider.engine.forward.attention_groups import SHARED_CALL_QUERIES, AttentionGroup


@dataclass(frozen=True)
class GatheredAttention:
    """Attention of one layer, over blocks that are copied out of its cache."""

    keys: torch.Tensor  # [slots, kv_heads, key_dim]
    values: torch.Tensor  # [slots, kv_heads, value_dim]
    key_space: GatherSpace
    value_space: GatherSpace
    heads: int
    scaling: float | None
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None

    def attend(self, group: AttentionGroup, query: torch.Tensor) -> torch.Tensor:
        """Returns the attention output of the group's rows, [rows, heads, value_dim].

        query: [heads, num_tokens, key_dim] of the whole batch.
        """
        rows = query[:, group.query_rows]
        if self.softcap is not None or self.sinks is not None:
            output = self._explicit(group, rows)
        elif group.num_queries > SHARED_CALL_QUERIES:
            output = self._many_queries(group, rows)
        else:
            output = self._few_queries(group, rows)
        return output if group.real is None else output[group.real]

    def _few_queries(self, group: AttentionGroup, query: torch.Tensor) -> torch.Tensor:
        mask = group.mask(self.window, self.repeats, query.device)
        output = F.scaled_dot_product_attention(
            self._fold(group, query),
            self._keys(group),
            self._values(group),
            attn_mask=mask,
            scale=self.scaling,
        )
        return self._unfold(group, output)

    def _many_queries(self, group: AttentionGroup, query: torch.Tensor) -> torch.Tensor:
        """Computes a single span, with kv heads as the batch: keys repeat by a stride of 0 without a copy."""
        heads = (-1, self.repeats, -1, -1)
        causal = group.is_plainly_causal(self.window)
        output = F.scaled_dot_product_attention(
            query.view(-1, self.repeats, *query.shape[1:]),
            self._keys(group).transpose(0, 1).expand(heads),
            self._values(group).transpose(0, 1).expand(heads),
            attn_mask=None if causal else group.mask(self.window, 1, query.device),
            is_causal=causal,
            scale=self.scaling,
        )
        return output.flatten(0, 1).transpose(0, 1)

    def _explicit(self, group: AttentionGroup, query: torch.Tensor) -> torch.Tensor:
        """Computes soft-capped scores and attention sinks, which no fused kernel of torch supports."""
        keys, values = self._keys(group), self._values(group)
        scores = self._fold(group, query).matmul(keys.transpose(2, 3)).float()
        scores *= keys.shape[3] ** -0.5 if self.scaling is None else self.scaling
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        mask = group.mask(self.window, self.repeats, query.device)
        if mask is not None:
            scores += mask
        if self.sinks is not None:
            sinks = self.sinks.float().view(1, -1, self.repeats, 1).repeat_interleave(group.num_queries, 2)
            scores = torch.cat([scores, sinks.expand(scores.shape[0], -1, -1, -1)], -1)
        probs = scores.softmax(-1)[..., : group.length]
        return self._unfold(group, probs.to(values.dtype) @ values)

    @property
    def repeats(self) -> int:
        """Returns the number of query heads that share a kv head."""
        return self.heads // self.keys.shape[1]

    def _keys(self, group: AttentionGroup) -> torch.Tensor:
        return self._context(self.keys, self.key_space, group)

    def _values(self, group: AttentionGroup) -> torch.Tensor:
        if not self.values.is_contiguous():  # values are a part of the keys
            return self._keys(group)[..., : self.values.shape[2]]
        return self._context(self.values, self.value_space, group)

    @staticmethod
    def _context(stored: torch.Tensor, space: GatherSpace, group: AttentionGroup) -> torch.Tensor:
        """Returns the cached keys or values of a group: [num_lanes, kv_heads, length, dim]."""
        if group.view is not None:
            return widened(stored[group.view], group.dtype).transpose(0, 1)[None]
        assert group.blocks is not None
        slots = widened(space.gather(stored, group.blocks), group.dtype)
        spans = slots.view(len(group.spans), -1, *stored.shape[1:])
        return spans[:, : group.length].transpose(1, 2)

    def _fold(self, group: AttentionGroup, query: torch.Tensor) -> torch.Tensor:
        """Folds the query heads of a kv head into the query axis.

        [heads, num_lanes * num_queries, dim] -> [num_lanes, kv_heads, repeats * num_queries, dim]
        """
        split = query.view(-1, self.repeats, len(group.spans), group.num_queries, query.shape[2])
        return split.permute(2, 0, 1, 3, 4).flatten(2, 3)

    def _unfold(self, group: AttentionGroup, output: torch.Tensor) -> torch.Tensor:
        """Unfolds the query heads, with rows first.

        [num_lanes, kv_heads, repeats * num_queries, dim] -> [num_lanes * num_queries, heads, dim]
        """
        spans, kv_heads, _, dim = output.shape
        split = output.view(spans, kv_heads, self.repeats, group.num_queries, dim)
        return split.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
