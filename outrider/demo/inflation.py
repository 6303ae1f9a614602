"""Inflation of a Llama checkpoint: the larger checkpoint computes the same function at a larger cost.

Every logit stays the same up to rounding. So a small trained pair can be measured at a realistic ratio of
costs, with realistic acceptance. The result is an ordinary Llama checkpoint:

- the residual stream is padded with zeros; the mean square over the longer stream is smaller by old / new, so
  RMSNorm's eps is scaled by old / new and its weights by sqrt(old / new);
- further heads and intermediate units have zero columns in the output projections;
- further layers have zero output projections, and are spread evenly between the old layers. An old layer is
  last, so an early exit after the first layers stays as poor a guess as before;
- weights that the function does not depend on are random, so that arithmetic is as with real weights.
"""

import copy
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

TOKENIZER_FILES = (
    "tokenizer*",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges*",
)


class InflationError(ValueError):
    """The source or the requested size does not allow a checkpoint of the same function."""


@dataclass(frozen=True)
class Size:
    """Shape of a Llama; the size of a head and the vocabulary are always kept."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int

    @property
    def group(self) -> int:
        """Query heads that share one kv head: query head i uses kv head i // group."""
        return self.heads // self.kv_heads


def size_of(config: PreTrainedConfig) -> Size:
    """Returns the size of a model. Raises InflationError, naming the field, if it cannot be inflated."""
    if config.model_type != "llama":
        raise InflationError(f"model_type is {config.model_type!r}; only 'llama' can be inflated")
    for field in ("attention_bias", "mlp_bias", "quantization_config"):
        if getattr(config, field, None):
            raise InflationError(
                f"{field} is {getattr(config, field)!r}; only a Llama without it can be inflated"
            )
    return Size(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
    )


def check(old: Size, new: Size) -> None:
    """Raises InflationError, naming the field, if `old` does not fit into `new`."""
    for field, least in asdict(old).items():
        if getattr(new, field) < least:
            raise InflationError(
                f"{field} is {getattr(new, field)}; it must be at least the source's {least}"
            )
    if new.heads % new.kv_heads:
        raise InflationError(f"heads is {new.heads}; it must be a multiple of kv_heads, {new.kv_heads}")
    if new.hidden % new.heads:
        raise InflationError(f"hidden is {new.hidden}; Llama accepts a multiple of heads, {new.heads}")
    needed = old.kv_heads * kv_copies(old, new)
    if new.kv_heads < needed:
        raise InflationError(
            f"kv_heads is {new.kv_heads}; with {new.group} query heads to a kv head instead of {old.group} "
            f"it must be at least {needed}"
        )


def kv_copies(old: Size, new: Size) -> int:
    """Returns how many new kv heads hold one old kv head: several if fewer query heads share a kv head."""
    return -(-old.group // new.group)


def query_slots(old: Size, new: Size) -> list[int]:
    """Returns the new index of every old query head, among the heads that use (a copy of) its kv head."""
    slots = []
    for head in range(old.heads):
        kv_head, member = divmod(head, old.group)
        copy, place = divmod(member, new.group)
        slots.append((kv_head * kv_copies(old, new) + copy) * new.group + place)
    return slots


def layer_slots(old: Size, new: Size) -> list[int]:
    """Returns the new index of every old layer."""
    return [(layer + 1) * new.layers // old.layers - 1 for layer in range(old.layers)]


@torch.no_grad()
def put_layer(old_layer: LlamaDecoderLayer, layer: LlamaDecoderLayer, old: Size, new: Size) -> None:
    """Writes an old layer over a layer of random weights."""
    attention, old_attention = layer.self_attn, old_layer.self_attn
    head_dim, slots = attention.head_dim, query_slots(old, new)
    query = attention.q_proj.weight.view(new.heads, head_dim, new.hidden)
    query[slots, :, : old.hidden] = old_attention.q_proj.weight.view(old.heads, head_dim, old.hidden)
    output = attention.o_proj.weight.view(new.hidden, new.heads, head_dim)
    output[: old.hidden, slots] = old_attention.o_proj.weight.view(old.hidden, old.heads, head_dim)
    for name in ("k_proj", "v_proj"):
        heads = getattr(old_attention, name).weight.view(old.kv_heads, head_dim, old.hidden)
        put(
            heads.repeat_interleave(kv_copies(old, new), dim=0).flatten(0, 1), getattr(attention, name).weight
        )
    for name in ("gate_proj", "up_proj", "down_proj"):
        put(getattr(old_layer.mlp, name).weight, getattr(layer.mlp, name).weight)
    for name in ("input_layernorm", "post_attention_layernorm"):
        put_norm(getattr(old_layer, name).weight, getattr(layer, name).weight)


def put(old_weight: Tensor, weight: Tensor) -> None:
    """Writes a matrix into the first rows and columns of a larger matrix."""
    rows, columns = old_weight.shape
    weight[:rows, :columns] = old_weight


def put_norm(old_weight: Tensor, weight: Tensor) -> None:
    weight[: len(old_weight)] = old_weight.float() * (len(old_weight) / len(weight)) ** 0.5


@torch.no_grad()
def inflated(model: LlamaForCausalLM, new: Size) -> LlamaForCausalLM:
    """Returns a model of the size `new` that computes the same function as `model`."""
    old = size_of(model.config)
    config = copy.deepcopy(model.config)
    config.update(
        {
            "hidden_size": new.hidden,
            "num_hidden_layers": new.layers,
            "intermediate_size": new.intermediate,
            "num_attention_heads": new.heads,
            "num_key_value_heads": new.kv_heads,
            "rms_norm_eps": config.rms_norm_eps * old.hidden / new.hidden,
        }
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        larger = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    for layer in larger.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    for old_layer, slot in zip(model.model.layers, layer_slots(old, new), strict=True):
        put_layer(old_layer, larger.model.layers[slot], old, new)
    larger.get_input_embeddings().weight.zero_()
    put(model.get_input_embeddings().weight, larger.get_input_embeddings().weight)
    put(model.get_output_embeddings().weight, larger.get_output_embeddings().weight)
    put_norm(model.model.norm.weight, larger.model.norm.weight)
    larger.generation_config = model.generation_config
    return larger


def inflate(source: Path, destination: Path, dtype: torch.dtype = torch.float32, **sizes: int) -> int:
    """Writes the inflated checkpoint with the tokenizer of the source; returns its number of parameters.

    `sizes` are fields of Size; a missing field is as in the source. Raises InflationError, naming the field,
    if that size cannot hold the same function, and FileExistsError if `destination` exists.
    """
    old = size_of(AutoConfig.from_pretrained(source))
    new = replace(old, **sizes)
    check(old, new)
    destination.mkdir(parents=True)
    model = inflated(AutoModelForCausalLM.from_pretrained(source, dtype=dtype), new)
    model.save_pretrained(destination, max_shard_size="4GB")
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, destination / file.name)
    return int(model.num_parameters())
