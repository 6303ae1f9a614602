"""Network of Gemma 4's assistant: decoder layers whose queries attend to the target's keys and values.

Source: transformers 5.24, ``Gemma4AssistantForCausalLM`` and ``SinglePositionMultiTokenCandidateGenerator``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Gemma4AssistantConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel, Gemma4TextRotaryEmbedding
from transformers.models.gemma4_assistant.modeling_gemma4_assistant import Gemma4AssistantMaskedEmbedder

from outrider.engine.forward.attention import Paged, attended
from outrider.engine.loading.head_checkpoint import HeadCheckpoint

KIND = "gemma4_assistant"
TARGETS = ["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"]
ATTENTION = "outrider_target_keys"  # name without a mask function, so that transformers builds no mask
PROJECTION, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class TargetKeys:
    """Context of attention: the target's cache, and the layer of that cache for each kind of attention."""

    paged: Paged
    layers: Mapping[str, int]


def attend(
    module: nn.Module,
    query: Tensor,  # [1, heads, num_tokens, key_dim]
    key: None,
    value: None,
    attention_mask: None,
    scaling: float,
    outrider: TargetKeys,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Returns the attention over the target's keys and values: [1, num_tokens, heads, value_dim]."""
    kind: str = module.layer_type  # type: ignore[assignment]
    # The window is that of the newest token, whose position comes after the last cached key.
    window = None if sliding_window is None else sliding_window + 1
    layer = outrider.layers[kind]
    return attended(outrider.paged, layer, query[0], scaling=scaling, window=window)[None], None


AttentionInterface.register(ATTENTION, attend)


class AssistantHead(nn.Module):
    """Network of the assistant. ``forward`` passes through its layers."""

    def __init__(self, config: Gemma4AssistantConfig) -> None:
        super().__init__()
        text, wide = config.get_text_config(), config.backbone_hidden_size
        self.model = Gemma4TextModel(text)
        self.lm_head: nn.Module = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.pre_projection = nn.Linear(2 * wide, text.hidden_size, bias=False)
        self.post_projection = nn.Linear(text.hidden_size, wide, bias=False)
        self.masked_embedding: Gemma4AssistantMaskedEmbedder | None = None
        if config.use_ordered_embeddings:
            self.masked_embedding = Gemma4AssistantMaskedEmbedder(config)
            self.lm_head = nn.Embedding(text.vocab_size, text.hidden_size)  # only some rows are read

    def forward(self, embeddings: Tensor, states: Tensor, positions: Tensor, keys: TargetKeys) -> Tensor:
        """Returns states after the layers: [num_tokens, hidden_size].

        Args:
            embeddings: [num_tokens, backbone_hidden_size] the target's embeddings of the tokens.
            states: [num_tokens, backbone_hidden_size] input states of the tokens.
            positions: int64 [1, num_tokens].
        """
        model, kinds = self.model, self.model.config.layer_types
        read = self.pre_projection(torch.cat([embeddings, states], dim=-1))[None]
        rotations = {kind: model.rotary_emb(read, positions, kind) for kind in {*kinds}}
        nothing = dict.fromkeys(kinds, (None, None))  # the layers have no keys of their own
        for layer, kind in zip(model.layers, kinds, strict=True):
            read = layer(read, shared_kv_states=nothing, position_embeddings=rotations[kind], outrider=keys)
        after: Tensor = model.norm(read)
        return after[0]

    def logits(self, states: Tensor) -> Tensor:
        """Returns logits [num_rows, vocab_size].

        With clusters, logits are computed only for the tokens of the best clusters. All other tokens get a
        common logit below these.
        """
        clusters = self.masked_embedding
        if clusters is None:
            logits: Tensor = self.lm_head(states)
            return logits
        best = clusters.centroids(states).topk(clusters.centroid_intermediate_top_k).indices
        tokens = clusters.token_ordering.view(clusters.num_centroids, -1)[best].flatten(1)
        known = (self.lm_head(tokens) @ states[:, :, None])[:, :, 0]
        least = known.min(dim=1, keepdim=True).values - 1.0
        scattered: Tensor = least.repeat(1, clusters.vocab_size).scatter(1, tokens, known)
        return scattered


def config_of(checkpoint: HeadCheckpoint) -> Gemma4AssistantConfig:
    """Reads a config. Raises UnsupportedModelError if it is of another kind, or of another target."""
    given, target = checkpoint.config, checkpoint.target
    if (kind := given.get("model_type")) != KIND:
        raise checkpoint.refusal(f"it is of kind {kind!r} and must be {KIND!r}")
    checkpoint.check_verifier(None, TARGETS)
    config = Gemma4AssistantConfig(**given)
    text = config.get_text_config()
    for name, found, wanted in (
        ("backbone_hidden_size", config.backbone_hidden_size, target.hidden_size),
        ("vocab_size", text.vocab_size, target.vocab_size),
    ):
        if found != wanted:
            raise checkpoint.refusal(f"{name}={found} must be {wanted}, the target's")
    text._attn_implementation = ATTENTION
    return config


def built(checkpoint: HeadCheckpoint, config: Gemma4AssistantConfig) -> AssistantHead:
    """Builds the network with its weights as they are stored. Raises UnsupportedModelError."""
    with torch.device("meta"):
        head = AssistantHead(config)
    head.model.rotary_emb = Gemma4TextRotaryEmbedding(config.get_text_config())
    stored = checkpoint.tensors
    tied = {PROJECTION: stored[EMBEDDING]} if EMBEDDING in stored else {}
    checkpoint.load_into(head, {**tied, **stored}, "an assistant")
    del head.model.embed_tokens  # the target embeds the tokens
    return head.eval().requires_grad_(False)
