"""Attention over the paged cache, as a function that transformers calls for every layer of every model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import AttentionInterface

from outrider.engine.cache.key_values import KeyValues, LayerShape
from outrider.engine.cache.narrow import narrowed
from outrider.engine.cache.recurrent_states import StateShape
from outrider.engine.forward.attention_fallback import GatheredAttention
from outrider.engine.forward.attention_groups import AttentionGroup, form_groups
from outrider.engine.forward.batch import Batch
from outrider.engine.forward.kernel import Kernel
from outrider.engine.forward.latent import LatentProjection
from outrider.engine.inputs.step_input import Rows

ATTENTION = "outrider"  # no mask function has this name, so transformers builds no mask
UNDERSTOOD = ("s_aux", "position_ids")  # supported tensor arguments beside query, key and value


@dataclass
class Probe:
    """Substitute for the cache at load: records what each layer would store, and how far it looks back."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    states: dict[int, StateShape] = field(default_factory=dict)  # recurrent layers
    modules: dict[int, torch.nn.Module] = field(default_factory=dict)  # modules that call our attention
    needs: set[str] = field(default_factory=set)  # requirements that our attention does not meet

    def see(
        self, module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, given: Mapping[str, Any]
    ) -> None:
        """Records a layer's call. given: the optional arguments."""
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
    """Arguments that pass through the model to every layer."""

    batch: Batch
    cache: KeyValues
    kernel: Kernel | None  # kernel that reads the cache in place; None: blocks are gathered

    @cached_property
    def windowed_slots(self) -> Rows:
        """Slots of the tokens' keys and values in windowed layers."""
        slots, windows = self.batch.slots, self.cache.windows
        return slots if windows is None else windows.slots_of(slots)

    def slots_of(self, layer: int) -> Rows:
        """Returns the slots of the tokens' keys and values in a layer."""
        return self.batch.slots if self.cache.windows_of(layer) is None else self.windowed_slots

    @cached_property
    def _windowed_groups(self) -> list[AttentionGroup]:
        windows, batch = self.cache.windows, self.batch
        assert windows is not None
        spans = [span.within(windows, batch.block_size) for span in batch.spans]
        return form_groups(spans, batch.block_size, batch.dtype, batch.token_ids.device)

    def groups_of(self, layer: int) -> list[AttentionGroup]:
        """Returns the groups for attention without a kernel in a layer."""
        return self.batch.groups if self.cache.windows_of(layer) is None else self._windowed_groups


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
    """Stores keys and values, then returns attention over the cache: [1, num_tokens, heads, value_dim]."""
    projection = getattr(module, "kv_b_proj", None)
    latents = projection if isinstance(projection, LatentProjection) else None
    if isinstance(outrider, Probe):
        given = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        outrider.see(module, key, value, {**others, **given, "a mask of its own": attention_mask})
        if latents is None:
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
        # Products of latents are computed, so that planning counts their operations.
        gathered = latents.absorbed(query[0])[..., : latents.latent_dim]
        return latents.expanded(gathered.transpose(0, 1))[None], None
    if outrider is None:
        raise TypeError("its layers do not pass extra arguments on to attention")
    layer: int = module.layer_idx  # type: ignore[assignment]
    store(outrider, layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    output = attended(
        outrider,
        layer,
        query[0] if latents is None else latents.absorbed(query[0]),
        scaling=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        latent_dim=0 if latents is None else latents.latent_dim,
    )
    return (output if latents is None else latents.expanded(output))[None], None


def store(paged: Paged, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Writes a layer's keys and values, [num_tokens, kv_heads, dim] each, into the cache."""
    keys, values, scale = paged.cache.keys[layer], paged.cache.values[layer], paged.cache.scales[layer]
    slots = paged.slots_of(layer)
    keys[slots] = narrowed(key, keys.dtype, scale.keys)
    values[slots] = narrowed(value, values.dtype, scale.values)


def attended(
    paged: Paged,
    layer: int,
    query: torch.Tensor,  # [heads, num_tokens, key_dim]
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    latent_dim: int = 0,
) -> torch.Tensor:
    """Returns attention over the cache, including the tokens themselves: [num_tokens, heads, value_dim].

    latent_dim: leading numbers of each key that are its value too; 0: values are cached beside keys.
    """
    batch, cache = paged.batch, paged.cache
    keys, values, scale = cache.keys[layer], cache.values[layer], cache.scales[layer]
    if latent_dim:
        values = keys[..., :latent_dim]
    scaling = scale.keys * (query.shape[2] ** -0.5 if scaling is None else scaling)
    if paged.kernel is not None and batch.paged is not None:
        windows = cache.windows_of(layer)
        output = paged.kernel(
            batch.paged,
            query,
            keys,
            values,
            scaling=scaling,
            window=window,
            softcap=softcap,
            sinks=sinks,
            windowed=None if windows is None else windows.on_device,
        )
    else:
        spaces = cache.key_space, cache.value_space
        gathered = GatheredAttention(keys, values, *spaces, query.shape[0], scaling, window, softcap, sinks)
        groups = paged.groups_of(layer)
        if len(groups) == 1:
            output = gathered.attend(groups[0], query).contiguous()  # some models call ``view`` on it
        else:
            output = query.new_zeros(query.shape[1], query.shape[0], values.shape[2])
            for group in groups:
                output[group.output_rows] = gathered.attend(group, query)
    factor = scale.keys if latent_dim else scale.values
    return output if factor == 1.0 else output.mul_(factor)


AttentionInterface.register(ATTENTION, attend)
