"""Network of an EAGLE-3 or P-EAGLE head: decoder layers over states of three layers of the target.

Sources: Li et al., "EAGLE-3: scaling up inference acceleration of large language models via training-time
test", 2025, and the options that checkpoints of version 3.1 name in their configs. "P-EAGLE", arXiv
2602.01469, 2026.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3MLP,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer

from outrider.engine.cache.key_values import LayerShape
from outrider.engine.forward.attention import ATTENTION, Paged
from outrider.engine.loading.head_checkpoint import HeadCheckpoint
from outrider.engine.parallel.layers import ParallelLMHead, keep_outputs, share_out

LATENT = "deepseek_v3"
# Classes of the first layer's attention, and of the later layers, by the model_type of their config.
ATTENTIONS = {"llama": LlamaAttention, "qwen3": Qwen3Attention, LATENT: DeepseekV3Attention}
LAYERS = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}
# Input projections of attention; each attention class has some of these.
READING = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
FIRST, FIRST_OF_SAFEAILAB = "layers.0.", "midlayer."
SLIDING = "sliding_attention"
OF_TARGET = ("verifier_lm_head.", "verifier_norm.")  # copies of the target's tensors in some checkpoints
READ_LAYERS = "eagle_aux_hidden_state_layer_ids"
MASK_TOKENS = ("mask_token_id", "ptd_token_id", "pard_token")  # config keys of speculators, AWS and PARD
OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class Eagle3Shape:
    """Architecture of a head, read from a checkpoint's config in any of its formats."""

    layers: Any  # transformers' config of the decoder layers
    hidden_layers: tuple[int, ...]  # layers of the target whose input states the head reads
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    mask_token: int | None = None  # token that stands for a guess; None: the head drafts token by token

    @classmethod
    def of(cls, checkpoint: HeadCheckpoint, kind: str) -> "Eagle3Shape":
        """Reads a config. Raises UnsupportedModelError if it is of another kind, or of another target.

        kind: eagle3 or peagle.
        """
        config = checkpoint.config
        mask_token = next((config[name] for name in MASK_TOKENS if config.get(name) is not None), None)
        found = config.get("speculators_model_type", "eagle3" if mask_token is None else "peagle")
        if found != kind:
            raise checkpoint.refusal(f"it is of kind {found!r} and must be {kind!r}")
        given = {**config.get("eagle_config", {}), **config}
        verifier = config.get("speculators_config", {}).get("verifier", {})
        checkpoint.check_verifier(verifier.get("name_or_path"), verifier.get("architectures") or [])
        layers_config = _layers_of(checkpoint)
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
        options = {option: bool(given.get(option)) for option in OPTIONS}
        return cls(layers_config, tuple(layers), **options, mask_token=mask_token)

    @property
    def cache(self) -> tuple[LayerShape, ...]:
        """Shapes of the keys and values that each layer caches per token; latents are cached expanded."""
        config = self.layers
        if self.is_latent:
            return ((config.num_attention_heads, config.qk_head_dim, config.v_head_dim),)
        shape: LayerShape = (config.num_key_value_heads, config.head_dim, config.head_dim)
        count: int = config.num_hidden_layers
        return (shape,) * count

    @property
    def is_latent(self) -> bool:
        """Whether attention computes keys and values from latents, as in DeepSeek-V3."""
        return bool(self.layers.model_type == LATENT)


def _layers_of(checkpoint: HeadCheckpoint) -> Any:
    """Returns transformers' config of the decoder layers. The tensors tell the number of layers."""
    given = dict(checkpoint.config.get("transformer_layer_config") or checkpoint.config)
    kind = given.pop("model_type", "llama")
    kind = LATENT if given.get("kv_lora_rank") else kind if kind in ATTENTIONS else "llama"
    names = (name.split(".") for name in network_tensors(checkpoint.tensors))
    given["num_hidden_layers"] = len({name[1] for name in names if name[0] == "layers"}) or 1
    if kind == LATENT:
        given.pop("head_dim", None)  # transformers derives it from the rotary dimensions
    if kind == LATENT and given["num_hidden_layers"] > 1:
        raise checkpoint.refusal(f"num_hidden_layers={given['num_hidden_layers']} with latents must be 1")
    if kind != "qwen3" and SLIDING in (given.get("layer_types") or ()):
        raise checkpoint.refusal(f"layer_types={given['layer_types']} is computed for Qwen 3's layers alone")
    return AutoConfig.for_model(kind, **given, attn_implementation=ATTENTION)


def _read_layers(config: Mapping[str, Any]) -> list[int]:
    """Returns the target layers whose input states are read; empty if the config does not name them.

    speculators and vLLM number inputs too, at the top level of the config. ModelOpt, SpecForge and SGLang
    number outputs, under eagle_config: these numbers are smaller by 1.
    """
    nested = config.get("eagle_config", {}).get(READ_LAYERS) or ()
    return [*(config.get(READ_LAYERS) or (layer + 1 for layer in nested))]


class Eagle3Layer(nn.Module):
    """First decoder layer, whose attention reads the token's embedding concatenated with the state."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        config, size = shape.layers, shape.layers.hidden_size
        self.self_attn = ATTENTIONS[config.model_type](config, layer_idx=0)
        for name in READING:
            if (projection := getattr(self.self_attn, name, None)) is not None:
                wider = nn.Linear(2 * size, projection.out_features, bias=projection.bias is not None)
                setattr(self.self_attn, name, wider)
        self.mlp = DeepseekV3MLP(config) if shape.is_latent else LlamaMLP(config)
        self.input_layernorm = _norm(config, size)
        self.hidden_norm = _norm(config, size)
        self.post_attention_layernorm = _norm(config, size)
        self._norm_before_residual = shape.norm_before_residual

    def forward(self, embeddings: Tensor, states: Tensor, rotation: Any, paged: Paged) -> Tensor:
        """Returns [1, num_tokens, hidden_size] from embeddings and states [1, num_tokens, hidden_size]."""
        normed = self.hidden_norm(states)
        residual = normed if self._norm_before_residual else states
        read = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        states = residual + self.self_attn(read, rotation, None, outrider=paged)[0]
        output: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output


class Eagle3Head(nn.Module):
    """Network of the head. ``reduce`` projects the target's states, and ``forward`` runs the layers."""

    def __init__(self, shape: Eagle3Shape, target_size: int, draft_vocabulary: int | None) -> None:
        """draft_vocabulary: tokens of the head's own output projection; None: it uses the target's."""
        super().__init__()
        config, size = shape.layers, shape.layers.hidden_size
        width = target_size * len(shape.hidden_layers)
        self.fc = nn.Linear(width, size, bias=False)
        self.input_norm = _norm(config, width) if shape.norm_before_fc else nn.Identity()
        each = [_norm(config, target_size) for _ in shape.hidden_layers]
        self.fc_norm = nn.ModuleList(each if shape.fc_norm else ())
        later = (LAYERS[config.model_type](config, number) for number in range(1, config.num_hidden_layers))
        self.layers = nn.ModuleList([Eagle3Layer(shape), *later])
        self.norm = _norm(config, size)
        self.lm_head: nn.Module | None = None
        if draft_vocabulary is not None:
            self.lm_head = nn.Linear(size, draft_vocabulary, bias=False)
        self.mask_hidden: nn.Parameter | None = None  # stands for the target's states at a guess
        if shape.mask_token is not None:
            self.mask_hidden = nn.Parameter(torch.empty(1, 1, width))
        self._norm_output = shape.norm_output

    def share_out(self, rank: int, ranks: int) -> bool:
        """Cuts the layers and its output projection to a rank's share. Returns as ``layers.share_out``."""
        if isinstance(self.lm_head, nn.Linear):
            count = self.lm_head.out_features
            self.lm_head = ParallelLMHead(keep_outputs(self.lm_head, rank, ranks), count)
        return share_out(self.layers, rank, ranks)

    def reduce(self, hidden: Tensor) -> Tensor:
        """Projects states [num_tokens, num_layers, target_size] to [num_tokens, hidden_size]."""
        if self.fc_norm:
            hidden = torch.stack([norm(hidden[:, i]) for i, norm in enumerate(self.fc_norm)], dim=1)
        states: Tensor = self.fc(self.input_norm(hidden.flatten(1)))
        return states

    def forward(self, embeddings: Tensor, states: Tensor, rotation: Any, paged: Paged) -> Tensor:
        """Returns the states that are fed back, and that give logits: [num_tokens, hidden_size]."""
        first, *later = self.layers
        after = first(embeddings[None], states[None], rotation, paged)
        for layer in later:
            after = layer(after, position_embeddings=rotation, outrider=paged)
        states = after[0]
        if self._norm_output:
            states = self.norm(states)
        return states

    def before_logits(self, states: Tensor) -> Tensor:
        """Returns the normed states, which an output projection takes."""
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
    checkpoint.load_into(head, network_tensors(checkpoint.tensors), "an EAGLE-3 head")
    return head.eval().requires_grad_(False)


def rotary(shape: Eagle3Shape, device: torch.device) -> nn.Module:
    """Returns the rotary embedding. It covers all positions of the target, beyond the config's limit."""
    kind = DeepseekV3RotaryEmbedding if shape.is_latent else LlamaRotaryEmbedding
    embedding: nn.Module = kind(shape.layers).to(device)
    return embedding


def network_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the network's weights by our names, without embeddings and vocabulary maps."""
    renamed = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        if name in ("d2t", "t2d", "embed_tokens.weight") or name.startswith(OF_TARGET):
            continue
        renamed[name.replace(FIRST_OF_SAFEAILAB, FIRST)] = tensor
    return renamed


def _norm(config: Any, size: int) -> nn.Module:
    norm: nn.Module = LlamaRMSNorm(size, eps=config.rms_norm_eps)
    return norm
