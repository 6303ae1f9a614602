"""Attention over the paged cache, in the form transformers calls it for every layer of every model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AttentionInterface

from outrider.engine.cache.paged_cache import GatherSpace, KeyValues, LayerShape
from outrider.engine.forward.attention_groups import FEW_QUERIES, AttentionGroup
from outrider.engine.forward.batch import Batch
from outrider.engine.forward.kernel import Kernel

ATTENTION = "outrider"  # no mask function goes by this name, so transformers builds no mask
UNDERSTOOD = ("s_aux", "position_ids")  # tensors that attention is given beside query, key and value


@dataclass
class Probe:
    """Stands in for the cache at load: finds out what each layer would store, and how far it looks back."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    modules: dict[int, torch.nn.Module] = field(default_factory=dict)  # modules that call our attention
    needs: set[str] = field(default_factory=set)  # what a layer needs and our attention does not give

    def see(
        self, module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, given: Mapping[str, Any]
    ) -> None:
        """A layer's call. given: the optional arguments."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        if layer in self.shapes:
            self.needs.add("several attentions in one layer")
        if not getattr(module, "is_causal", True) or given.get("is_causal") is False:
            self.needs.add("to look ahead, as encoders do")
        self.needs |= {
            name
            for name, value in given.items()
            if isinstance(value, torch.Tensor) and name not in UNDERSTOOD
        }
        self.shapes[layer] = (key.shape[1], key.shape[3], value.shape[3])
        self.windows[layer] = given["sliding_window"]
        self.modules[layer] = module


@dataclass(frozen=True)
class Paged:
    """What travels through the model to every layer."""

    batch: Batch
    cache: KeyValues
    kernel: Kernel | None  # kernel that reads the cache in place; None: blocks are gathered


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, num_tokens, key_dim]
    key: torch.Tensor,  # [1, kv_heads, num_tokens, key_dim]
    value: torch.Tensor,  # [1, kv_heads, num_tokens, value_dim]
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,  # [heads] logits of the attention sinks
    outrider: Paged | Probe | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Stores the tokens' keys and values, then attends to the cache: [1, num_tokens, heads, value_dim]."""
    if isinstance(outrider, Probe):
        given = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        outrider.see(module, key, value, {**others, **given, "a mask of its own": attention_mask})
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    if outrider is None:
        raise TypeError("its layers do not hand on to attention what the model is given")
    layer: int = module.layer_idx  # type: ignore[assignment]
    store(outrider, layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    output = attended(
        outrider,
        layer,
        query[0],
        scaling=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return output[None], None


def store(paged: Paged, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Puts a layer's keys and values, [num_tokens, kv_heads, dim] each, into the cache."""
    paged.cache.keys[layer][paged.batch.slots] = key
    paged.cache.values[layer][paged.batch.slots] = value


def attended(
    paged: Paged,
    layer: int,
    query: torch.Tensor,  # [heads, num_tokens, key_dim]
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the cache holds, the tokens' own keys and values included: [num_tokens, heads, value_dim]."""
    batch, cache = paged.batch, paged.cache
    keys, values = cache.keys[layer], cache.values[layer]
    if paged.kernel is not None and batch.paged is not None:
        return paged.kernel(
            batch.paged, query, keys, values, scaling=scaling, window=window, softcap=softcap, sinks=sinks
        )
    spaces = cache.key_space, cache.value_space
    layout = Layout(keys, values, *spaces, query.shape[0], scaling, window, softcap, sinks)
    if len(batch.groups) == 1 and not batch.is_padded:
        return layout.attend(batch.groups[0], query).contiguous()  # some models take views
    output = query.new_zeros(query.shape[1], query.shape[0], values.shape[2])
    for group in batch.groups:
        output[group.output_rows] = layout.attend(group, query)
    return output


@dataclass(frozen=True)
class Layout:
    """One layer's cache and its rules of attention."""

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
        """query [heads, num_tokens, key_dim] -> [rows of the group, heads, value_dim]"""
        rows = query[:, group.query_rows]
        if self.softcap is not None or self.sinks is not None:
            output = self._explicit(group, rows)
        elif group.num_queries > FEW_QUERIES:
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
        """One span, its kv heads as the batch: keys repeat by a stride of zero, the mask stays small."""
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
        """Soft-capped scores and attention sinks, which no fused kernel knows."""
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
        """Query heads that share one kv head."""
        return self.heads // self.keys.shape[1]

    def _keys(self, group: AttentionGroup) -> torch.Tensor:
        return self._context(self.keys, self.key_space, group)

    def _values(self, group: AttentionGroup) -> torch.Tensor:
        return self._context(self.values, self.value_space, group)

    @staticmethod
    def _context(stored: torch.Tensor, space: GatherSpace, group: AttentionGroup) -> torch.Tensor:
        """[num_lanes, kv_heads, length, dim]"""
        if group.view is not None:
            return stored[group.view].transpose(0, 1)[None]
        assert group.blocks is not None
        slots = space.gather(stored, group.blocks)
        spans = slots.view(len(group.spans), -1, *stored.shape[1:])
        return spans[:, : group.length].transpose(1, 2)

    def _fold(self, group: AttentionGroup, query: torch.Tensor) -> torch.Tensor:
        """[heads, num_lanes * num_queries, dim] -> [num_lanes, kv_heads, repeats * num_queries, dim]"""
        split = query.view(-1, self.repeats, len(group.spans), group.num_queries, query.shape[2])
        return split.permute(2, 0, 1, 3, 4).flatten(2, 3)

    def _unfold(self, group: AttentionGroup, output: torch.Tensor) -> torch.Tensor:
        """[num_lanes, kv_heads, repeats * num_queries, dim] -> [num_lanes * num_queries, heads, dim]"""
        spans, kv_heads, _, dim = output.shape
        split = output.view(spans, kv_heads, self.repeats, group.num_queries, dim)
        return split.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)


AttentionInterface.register(ATTENTION, attend)
