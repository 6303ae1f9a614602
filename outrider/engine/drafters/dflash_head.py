"""Network of a DFlash draft: a few decoder layers that read the target's states and a block of masks.

The guesses of a block do not depend on each other. DSpark and DFlash2 correct each guess by the token before.

Sources: "DFlash", arXiv 2602.06036; "JetSpec", arXiv 2606.18394, whose rows attend to earlier rows alone;
"DSpark", arXiv 2607.05147; all 2026. Configs of z-lab, speculators, SpecForge, DeepSpec and transformers are
read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from outrider.engine.cache.key_values import LayerShape
from outrider.engine.drafters.dflash2_head import CandidateSelector, ConvolvedLayer
from outrider.engine.drafters.markov_head import MARKOV_HEADS, VANILLA, MarkovHead
from outrider.engine.forward.attention import ATTENTION, Paged, store
from outrider.engine.loading.head_checkpoint import HeadCheckpoint
from outrider.engine.parallel.layers import ParallelLMHead, keep_outputs, share_out

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)
KINDS = ("dflash", "dflash2", "dspark")
SLIDING = "sliding_attention"
OF_TRANSFORMERS = "muse_glimmer_assistant"  # format of transformers, whose rows always attend both ways
SHIFTED = ("Qwen3DSparkModel", "DSparkDraftModel")  # classes whose rows guess the next token
# Parts of tensor names in other formats, and ours.
RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm.", "logit_head.": ""}
# Vocabulary tensors, and copies of the target's tensors.
OF_VOCABULARY = ("embed_tokens.weight", "d2t", "t2d")
OF_TARGET = ("verifier_lm_head.", "verifier_norm.")
CONFIDENCE = "confidence_head.proj"
# Options that change the network, and are not supported.
UNREAD = ("attention_sink_bias", "final_logit_softcapping")
SCALES = ("input_embedding_scale", "output_multiplier")  # factors; only 1 is supported


@dataclass(frozen=True)
class BlockShape:
    """Architecture of a draft, read from a checkpoint's config in any of its formats."""

    layers: Any  # transformers' config of the decoder layers
    hidden_layers: tuple[int, ...]  # layers of the target whose input states the draft reads
    block_size: int  # rows of a block
    num_guesses: int  # rows of a block that guess: the last rows
    mask_token: int
    looks_ahead: bool  # whether a row of the block sees the rows after it
    markov_rank: int  # size of a token's embedding in the bias of the next guess; 0: there is no bias
    markov_head: str  # form of that bias
    convolution: tuple[int, int] | None = None  # kernel size in rows, and features of a group
    selector: tuple[int, int] | None = None  # size of a token's embedding, and candidates of a guess
    confidence: tuple[int, bool] | None = None  # input size of the confidence head; whether it has a bias

    @classmethod
    def of(cls, checkpoint: HeadCheckpoint) -> "BlockShape":
        """Reads a config. Raises UnsupportedModelError if it is of another kind, or of another target."""
        config = checkpoint.config
        given = {
            **config,
            **(config.get("transformer_layer_config") or {}),
            **config.get("dflash_config", {}),
        }
        _check_kind(checkpoint, given)
        layers = _layers_of(checkpoint, given)
        block_size = _number(checkpoint, given, "block_size", least=2)
        kind, classes = _kind_of(given), {*given.get("architectures", ())}
        is_shifted = given.get("sample_from_anchor") or kind == "dspark" or classes.intersection(SHIFTED)
        looks_ahead = _looks_ahead(checkpoint, given, layers.layer_types)
        return cls(
            layers,
            _read_layers(checkpoint, given, layers.num_hidden_layers),
            block_size,
            block_size if is_shifted else block_size - 1,
            _number(checkpoint, given, "mask_token_id"),
            looks_ahead,
            given.get("markov_rank") or 0,
            given.get("markov_head_type", VANILLA),
            _convolution(checkpoint, given, layers.hidden_size, looks_ahead),
            _selector(checkpoint, given),
            _confidence(checkpoint, layers.hidden_size, given.get("markov_rank") or 0),
        )

    @property
    def cache(self) -> tuple[LayerShape, ...]:
        """Shapes of the keys and values that each layer caches per token."""
        heads, dim = self.layers.num_key_value_heads, self.layers.head_dim
        shape: LayerShape = (heads, dim, dim)
        return (shape,) * len(self.layers.layer_types)

    def __str__(self) -> str:
        ways = "both ways" if self.looks_ahead else "backwards"
        place = "the token after it" if self.num_guesses == self.block_size else "its own token"
        place += ", corrected by the token before that" if self.markov_rank or self.selector else ""
        return (
            f"blocks of {self.block_size} rows that see {ways}; a row guesses {place};"
            f" inputs of the target's layers {', '.join(map(str, self.hidden_layers))}"
        )


def _layers_of(checkpoint: HeadCheckpoint, given: Mapping[str, Any]) -> Any:
    """Returns transformers' config of the decoder layers."""
    sizes = {name: given[name] for name in SIZES if given.get(name) is not None}
    count = _number(checkpoint, given, "num_hidden_layers", least=1)
    kinds = list(given.get("layer_types") or ["full_attention"] * count)
    if len(kinds) != count or not {*kinds} <= {"full_attention", SLIDING}:
        raise checkpoint.refusal(f"layer_types={kinds} must name {count} layers, full_attention or {SLIDING}")
    window = given.get("swa_window_size") or given.get("sliding_window")
    if given.get("model_type") == OF_TRANSFORMERS and window is not None:
        window += 1  # it counts the tokens on each side; Qwen 3's window also counts the row's own token
    return AutoConfig.for_model(
        "qwen3",
        **sizes,
        layer_types=kinds,
        use_sliding_window=SLIDING in kinds,
        sliding_window=window,
        attn_implementation=ATTENTION,
    )


def _check_kind(checkpoint: HeadCheckpoint, given: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError if the config is of another kind of draft, or of another target."""
    if (kind := _kind_of(given)) not in KINDS:
        raise checkpoint.refusal(f"it is of kind {kind!r} and must be one of {', '.join(KINDS)}")
    markov = given.get("markov_head_type", VANILLA)
    if given.get("markov_rank") and markov not in MARKOV_HEADS:
        raise checkpoint.refusal(f"markov_head_type={markov!r} must be one of {', '.join(MARKOV_HEADS)}")
    scaled = [name for name in SCALES if given.get(name) not in (None, 1)]
    if wrong := [name for name in UNREAD if given.get(name)] + scaled:
        raise checkpoint.refusal(f"{wrong[0]}={given[wrong[0]]!r} is not computed")
    verifier = given.get("speculators_config", {}).get("verifier", {})
    checkpoint.check_verifier(verifier.get("name_or_path"), verifier.get("architectures") or [])
    vocabulary = given.get("vocab_size")
    if vocabulary not in (None, checkpoint.target.vocab_size):
        raise checkpoint.refusal(
            f"vocab_size={vocabulary} must be {checkpoint.target.vocab_size}, the target's"
        )


def _kind_of(given: Mapping[str, Any]) -> Any:
    return given.get("speculators_model_type", given.get("projector_type", "dflash"))


def _number(checkpoint: HeadCheckpoint, given: Mapping[str, Any], name: str, least: int = 0) -> int:
    """Returns a number of the config. Raises UnsupportedModelError if it is missing or too small."""
    value = given.get(name)
    if not isinstance(value, int) or value < least:
        raise checkpoint.refusal(f"{name}={value!r} must be a number of at least {least}")
    return value


def _convolution(
    checkpoint: HeadCheckpoint, given: Mapping[str, Any], size: int, looks_ahead: bool
) -> tuple[int, int] | None:
    """Returns the kernel size of a convolution and the features of a group; None: no convolution."""
    if given.get("conv_kernel_size") is None:
        return None
    taps, group = (_number(checkpoint, given, f"conv_{name}_size", least=1) for name in ("kernel", "group"))
    if size % group:
        raise checkpoint.refusal(f"conv_group_size={group} must divide hidden_size={size}")
    if not looks_ahead:
        raise checkpoint.refusal("its rows see earlier rows alone, which convolutions here do not take")
    return taps, group


def _selector(checkpoint: HeadCheckpoint, given: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns the rank of a selector and its number of candidates; None: there is no selector."""
    if given.get("selector_rank") is None:
        return None
    rank, candidates = (_number(checkpoint, given, f"selector_{name}", least=1) for name in ("rank", "top_k"))
    if given.get("draft_vocab_size") not in (None, checkpoint.target.vocab_size):
        raise checkpoint.refusal(
            f"draft_vocab_size={given['draft_vocab_size']} beside a selector must be"
            f" {checkpoint.target.vocab_size}, the target's"
        )
    return rank, min(candidates, checkpoint.target.vocab_size)


def _confidence(checkpoint: HeadCheckpoint, size: int, rank: int) -> tuple[int, bool] | None:
    """Returns the input size of the confidence head, and whether it has a bias; None: there is no such head.

    It reads a state, or a state and a token's embedding.
    """
    tensors = network_tensors(checkpoint.tensors)
    weight = tensors.get(f"{CONFIDENCE}.weight")
    if weight is None:
        return None
    if weight.shape not in ((1, size), (1, size + rank)):
        raise checkpoint.refusal(
            f"{CONFIDENCE}.weight is {[*weight.shape]} and must be [1, {size}] or [1, {size + rank}]"
        )
    return weight.shape[1], f"{CONFIDENCE}.bias" in tensors


def _read_layers(checkpoint: HeadCheckpoint, given: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Returns the target layers whose input states are read.

    speculators numbers inputs too. All other formats number outputs: these numbers are smaller by 1, and -1
    is the embedding. If the config names no layers, they are spaced evenly from output 1 to output
    num_layers - 3.
    """
    target = checkpoint.target.num_layers
    inputs = given.get("aux_hidden_state_layer_ids")
    if inputs is None:
        outputs = given.get("target_layer_ids")
        if outputs is None:
            first, last = (1, target - 3) if count > 1 else (target // 2, target // 2)
            outputs = [round(first + (last - first) * place / max(count - 1, 1)) for place in range(count)]
        inputs = [layer + 1 for layer in outputs]
    if wrong := next((layer for layer in inputs if not 0 <= layer <= target), None):
        raise checkpoint.refusal(f"it reads layer {wrong} of a target, and this one has {target}")
    return tuple(inputs)


def _looks_ahead(checkpoint: HeadCheckpoint, given: Mapping[str, Any], layer_types: Sequence[str]) -> bool:
    """Returns whether the rows of a block attend to the rows after them, which all layers must agree on."""
    if given.get("model_type") == OF_TRANSFORMERS:
        return True
    for name in ("is_causal", "causal", "causal_head"):
        if given.get(name) is not None:
            return not given[name]
    is_sliding = {kind == SLIDING for kind in layer_types}
    if len(is_sliding) > 1 and not given.get("sliding_window_non_causal"):
        raise checkpoint.refusal(
            "its sliding layers see a block backwards and its other layers both ways, which is not computed"
        )
    return is_sliding == {False} or bool(given.get("sliding_window_non_causal"))


class ConfidenceHead(nn.Module):
    """Head for the logit that a guess is correct if its parent is, from its row and the token before it."""

    def __init__(self, numbers: int, has_bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(numbers, 1, bias=has_bias)

    def forward(self, states: Tensor, before: Tensor | None) -> Tensor:
        """Returns logits [num_rows] in float32.

        Args:
            states: [num_rows, hidden_size] states of the rows that guess.
            before: [num_rows, markov_rank] embedding of the token before each guess; None: there are no
                embeddings.
        """
        if before is not None and self.proj.in_features > states.shape[1]:
            states = torch.cat([states, before], dim=-1)
        logits: Tensor = self.proj(states)
        return logits[:, 0].float()


class DFlashHead(nn.Module):
    """Network of the draft. ``reduce`` projects the target's states, and ``forward`` runs a block."""

    def __init__(
        self, shape: BlockShape, target_size: int, vocabulary: int, draft_vocabulary: int | None
    ) -> None:
        """
        Args:
            target_size: size of a state of the target.
            vocabulary: number of tokens of the target.
            draft_vocabulary: number of tokens of its own output projection; None: it uses the target's.
        """
        super().__init__()
        config, size = shape.layers, shape.layers.hidden_size
        self.fc = nn.Linear(target_size * len(shape.hidden_layers), size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(size, eps=config.rms_norm_eps)
        numbers = range(config.num_hidden_layers)
        if shape.convolution is None:
            self.layers = nn.ModuleList(Qwen3DecoderLayer(config, number) for number in numbers)
        else:
            mixing = (shape.block_size, *shape.convolution)
            self.layers = nn.ModuleList(ConvolvedLayer(config, number, *mixing) for number in numbers)
        self.norm = Qwen3RMSNorm(size, eps=config.rms_norm_eps)
        self.lm_head: nn.Module | None = None
        if draft_vocabulary is not None:
            self.lm_head = nn.Linear(size, draft_vocabulary, bias=False)
        self.markov_head: MarkovHead | None = None
        if shape.markov_rank:
            self.markov_head = MarkovHead(
                shape.markov_head, shape.markov_rank, size, vocabulary, draft_vocabulary or vocabulary
            )
        self.candidate_selector: CandidateSelector | None = None
        if shape.selector is not None:
            self.candidate_selector = CandidateSelector(*shape.selector, size, vocabulary)
        self.confidence_head: ConfidenceHead | None = None
        if shape.confidence is not None:
            self.confidence_head = ConfidenceHead(*shape.confidence)

    def share_out(self, rank: int, ranks: int) -> bool:
        """Cuts the layers and its output projection to a rank's share. Returns as ``layers.share_out``."""
        if isinstance(self.lm_head, nn.Linear):
            count = self.lm_head.out_features
            self.lm_head = ParallelLMHead(keep_outputs(self.lm_head, rank, ranks), count)
        return share_out(self.layers, rank, ranks)

    def reduce(self, hidden: Tensor) -> Tensor:
        """Projects states [num_tokens, num_layers, target_size] to [num_tokens, hidden_size]."""
        states: Tensor = self.hidden_norm(self.fc(hidden.flatten(1)))
        return states

    def store(self, states: Tensor, rotation: tuple[Tensor, Tensor], paged: Paged) -> None:
        """Caches each layer's keys and values of reduced states [num_tokens, hidden_size].

        A layer's input norm is not applied, because these states are context and never inputs of the layer.
        """
        for number in range(len(self.layers)):
            key, value = self.context(number, states[None], rotation)
            store(paged, number, key[0], value[0])

    def context(self, number: int, states: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns a layer's keys and values of reduced states: [rows, num_tokens, kv_heads, head_dim] each.

        states: [rows, num_tokens, hidden_size].
        """
        attention: Any = self.layers[number].self_attn
        heads = (-1, attention.head_dim)
        key = attention.k_norm(attention.k_proj(states).unflatten(-1, heads))
        key, _ = apply_rotary_pos_emb(key, key, *rotation, unsqueeze_dim=2)
        return key, attention.v_proj(states).unflatten(-1, heads)

    def forward(self, embeddings: Tensor, rotation: tuple[Tensor, Tensor], attended: Any) -> Tensor:
        """Returns the normed output states of the rows of blocks, in the shape of ``embeddings``.

        Args:
            embeddings: [rows, num_tokens, hidden_size].
            attended: what the layers attend to, as their attention takes it.
        """
        states = embeddings
        for layer in self.layers:
            states = layer(states, position_embeddings=rotation, outrider=attended)
        normed: Tensor = self.norm(states)
        return normed


def empty(checkpoint: HeadCheckpoint, shape: BlockShape) -> DFlashHead:
    """Builds the network without its weights."""
    projection = network_tensors(checkpoint.tensors).get("lm_head.weight")
    vocabulary = None if projection is None else len(projection)
    with torch.device("meta"):
        return DFlashHead(shape, checkpoint.target.hidden_size, checkpoint.target.vocab_size, vocabulary)


def built(checkpoint: HeadCheckpoint, shape: BlockShape) -> DFlashHead:
    """Builds the network with its weights as they are stored. Raises UnsupportedModelError."""
    head = empty(checkpoint, shape)
    checkpoint.load_into(head, network_tensors(checkpoint.tensors), "a DFlash draft")
    return head.eval().requires_grad_(False)


def rotary(shape: BlockShape, device: torch.device) -> Qwen3RotaryEmbedding:
    """Returns the rotary embedding. It covers all positions of the target, beyond the config's limit."""
    return Qwen3RotaryEmbedding(shape.layers).to(device)


def network_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the network's weights by our names, without embeddings and vocabulary maps."""
    renamed = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        if name in OF_VOCABULARY or name.startswith(OF_TARGET):
            continue
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours)
        renamed[name] = tensor
    return renamed
