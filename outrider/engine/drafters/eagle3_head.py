"""Network of an EAGLE-3 head: a decoder layer over states of three layers of the target.

Source: Li et al., "EAGLE-3: scaling up inference acceleration of large language models via training-time
test", 2025, and the options that checkpoints of version 3.1 name in their configs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from outrider.engine.cache.paged_cache import LayerShape
from outrider.engine.forward.attention import ATTENTION, Paged
from outrider.engine.loading.head_checkpoint import HeadCheckpoint
from outrider.engine.parallel.layers import ParallelLMHead, keep_outputs, share_out

ATTENTIONS = {"llama": LlamaAttention, "qwen3": Qwen3Attention}
PREFIXES = {"midlayer.": "layer.", "layers.0.": "layer.", "self_attn.": "attention."}
OF_TARGET = ("verifier_lm_head.", "verifier_norm.")  # copies of the target's tensors in some checkpoints
READ_LAYERS = "eagle_aux_hidden_state_layer_ids"
OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class Eagle3Shape:
    """Shape that a checkpoint's config gives, in any of its formats."""

    layer: Any  # transformers' config of the decoder layer
    hidden_layers: tuple[int, ...]  # layers of the target, counted as its inputs
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @classmethod
    def of(cls, checkpoint: HeadCheckpoint) -> "Eagle3Shape":
        """Reads a config. Raises UnsupportedModelError if it is not EAGLE-3's, or of another target."""
        config = checkpoint.config
        kind = config.get("speculators_model_type", "eagle3")
        if kind != "eagle3":
            raise checkpoint.refusal(f"it is of kind {kind!r} and must be 'eagle3'")
        given = {**config.get("eagle_config", {}), **config}
        verifier = config.get("speculators_config", {}).get("verifier", {})
        checkpoint.check_verifier(verifier.get("name_or_path"), verifier.get("architectures") or [])
        layer = dict(config.get("transformer_layer_config") or config)
        kind = layer.pop("model_type", "llama")
        kind = kind if kind in ATTENTIONS else "llama"
        layer = AutoConfig.for_model(kind, **layer, attn_implementation=ATTENTION)
        count = checkpoint.target.num_layers
        layers = _read_layers(config) or (2, count // 2, count - 3)
        for index in layers:
            if not 0 <= index <= count:
                raise checkpoint.refusal(f"it reads layer {index} of a target, and this one has {count}")
        vocabulary = config.get("transformer_layer_config", config).get("vocab_size")
        if vocabulary not in (None, checkpoint.target.vocab_size):
            raise checkpoint.refusal(
                f"vocab_size={vocabulary} must be {checkpoint.target.vocab_size}, the target's"
            )
        return cls(layer, tuple(layers), *(bool(given.get(option)) for option in OPTIONS))

    @property
    def cache(self) -> LayerShape:
        """Shape of what the layer caches of a token."""
        dim = self.layer.head_dim
        return self.layer.num_key_value_heads, dim, dim


def _read_layers(config: Mapping[str, Any]) -> list[int]:
    """Returns layers of the target, counted as inputs; none if the config does not say.

    speculators and vLLM count inputs too, at the top of the config. ModelOpt, SpecForge and SGLang count
    outputs, under eagle_config: these numbers are smaller by 1.
    """
    nested = config.get("eagle_config", {}).get(READ_LAYERS) or ()
    return [*(config.get(READ_LAYERS) or (layer + 1 for layer in nested))]


class Eagle3Layer(nn.Module):
    """Decoder layer whose attention reads the token's embedding and the state side by side."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        config, size = shape.layer, shape.layer.hidden_size
        self.attention = ATTENTIONS[config.model_type](config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(self.attention, name).out_features
            setattr(self.attention, name, nn.Linear(2 * size, outputs, bias=bool(config.attention_bias)))
        self.mlp = LlamaMLP(config)
        self.input_layernorm = _norm(config, size)
        self.hidden_norm = _norm(config, size)
        self.post_attention_layernorm = _norm(config, size)
        self._norm_before_residual = shape.norm_before_residual

    def forward(self, embeddings: Tensor, states: Tensor, rotation: Any, paged: Paged) -> Tensor:
        """Returns [1, num_tokens, hidden_size] from embeddings and states [1, num_tokens, hidden_size]."""
        normed = self.hidden_norm(states)
        residual = normed if self._norm_before_residual else states
        read = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        states = residual + self.attention(read, rotation, None, outrider=paged)[0]
        output: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output


class Eagle3Head(nn.Module):
    """Network of the head. ``reduce`` joins the target's states, ``forward`` is the layer."""

    def __init__(self, shape: Eagle3Shape, target_size: int, draft_vocabulary: int | None) -> None:
        """draft_vocabulary: tokens of the head's own output projection; None: the target's is shared."""
        super().__init__()
        config, size = shape.layer, shape.layer.hidden_size
        width = target_size * len(shape.hidden_layers)
        self.fc = nn.Linear(width, size, bias=False)
        self.input_norm = _norm(config, width) if shape.norm_before_fc else nn.Identity()
        each = [_norm(config, target_size) for _ in shape.hidden_layers]
        self.fc_norm = nn.ModuleList(each if shape.fc_norm else ())
        self.layer = Eagle3Layer(shape)
        self.norm = _norm(config, size)
        self.lm_head: nn.Module | None = None
        if draft_vocabulary is not None:
            self.lm_head = nn.Linear(size, draft_vocabulary, bias=False)
        self._norm_output = shape.norm_output

    def share_out(self, rank: int, ranks: int) -> bool:
        """Leaves a rank its share of the layer and of its own vocabulary. Returns as ``layers.share_out``."""
        if isinstance(self.lm_head, nn.Linear):
            count = self.lm_head.out_features
            self.lm_head = ParallelLMHead(keep_outputs(self.lm_head, rank, ranks), count)
        return share_out(self.layer, rank, ranks)

    def reduce(self, hidden: Tensor) -> Tensor:
        """Reduces states [num_tokens, num_layers, target_size] to [num_tokens, hidden_size]."""
        if self.fc_norm:
            hidden = torch.stack([norm(hidden[:, i]) for i, norm in enumerate(self.fc_norm)], dim=1)
        states: Tensor = self.fc(self.input_norm(hidden.flatten(1)))
        return states

    def forward(self, embeddings: Tensor, states: Tensor, rotation: Any, paged: Paged) -> Tensor:
        """Returns the states that are fed back, and that give logits: [num_tokens, hidden_size]."""
        states = self.layer(embeddings[None], states[None], rotation, paged)[0]
        if self._norm_output:
            states = self.norm(states)
        return states

    def before_logits(self, states: Tensor) -> Tensor:
        """Returns what an output projection takes."""
        normed: Tensor = states if self._norm_output else self.norm(states)
        return normed


def empty(checkpoint: HeadCheckpoint, shape: Eagle3Shape) -> Eagle3Head:
    """Builds the head without its weights."""
    projection = network_tensors(checkpoint.tensors).get("lm_head.weight")
    vocabulary = None if projection is None else len(projection)
    with torch.device("meta"):
        return Eagle3Head(shape, checkpoint.target.hidden_size, vocabulary)


def built(checkpoint: HeadCheckpoint, shape: Eagle3Shape) -> Eagle3Head:
    """Builds the head with its weights as they are stored. Raises UnsupportedModelError."""
    head = empty(checkpoint, shape)
    checkpoint.load_into(head, network_tensors(checkpoint.tensors), "an EAGLE-3 head of one layer")
    return head.eval().requires_grad_(False)


def rotary(shape: Eagle3Shape, device: torch.device) -> LlamaRotaryEmbedding:
    """Returns the rotary embedding of all positions of the target, whatever limit the config has."""
    return LlamaRotaryEmbedding(shape.layer).to(device)


def network_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights by our names, without embeddings and vocabularies."""
    renamed = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        if name in ("d2t", "t2d", "embed_tokens.weight") or name.startswith(OF_TARGET):
            continue
        for theirs, ours in PREFIXES.items():
            name = name.replace(theirs, ours)
        renamed[name] = tensor
    return renamed


def _norm(config: Any, size: int) -> nn.Module:
    norm: nn.Module = LlamaRMSNorm(size, eps=config.rms_norm_eps)
    return norm
