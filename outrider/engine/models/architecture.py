"""Description of an architecture that the fast decoder supports (outrider/engine/forward/decoder.py).

A layer of such a model adds attention to the states, then a gated MLP or a mixture of experts, each computed
from normed states. Norms are RMSNorm, and the gate is silu. Rotary embedding pairs the halves of a head, or
the halves of its leading dimensions.
"""

from dataclasses import dataclass
from typing import Literal

# How router logits become weights: softmax over all experts or over the chosen experts, or sigmoid.
Scores = Literal["softmax", "softmax of chosen", "sigmoid"]


@dataclass(frozen=True)
class Mixture:
    """Names of the modules of a mixture of experts, and how a token chooses its experts.

    Paths begin at the layer's ``mlp``. Attributes belong to the router, if nothing else is said.
    """

    router: str = "gate"  # module with the weight [experts, hidden_size], an optional bias, and ``top_k``
    experts: str = "experts"
    scores: Scores = "softmax"
    correction: str | None = None  # path to a bias of scores that affects the choice but not the weights
    # Attributes: number of groups of neighbouring experts, and of groups whose experts a token may choose.
    groups: tuple[str, str] | None = None
    # Whether the weights of the chosen experts are normalized to sum to 1, or the attribute that says so.
    normalized: str | bool = True
    scaling: str | None = None  # attribute: factor by which the weights are multiplied
    shared: str | None = None  # path to the shared expert: a gated MLP that every token uses
    shared_gate: str | None = None  # path to the linear layer whose sigmoid scales the shared expert
    # Attributes of gpt-oss's experts: slope of the gate's sigmoid, and clamp limit of gate and up.
    clamped: tuple[str, str] | None = None
    # Paths, from a layer, of quantized weights: gate, up and down of an expert by its number; or interleaved
    # gate and up of all experts, then down of all experts.
    files: tuple[str, ...] = (
        "mlp.experts.{}.gate_proj",
        "mlp.experts.{}.up_proj",
        "mlp.experts.{}.down_proj",
    )


@dataclass(frozen=True)
class Architecture:
    """Names of the modules of a model in transformers. The defaults are the names of Llama.

    A path is a dotted name, as ``torch.nn.Module.get_submodule`` takes it.
    """

    model: str  # class name in transformers

    # Paths from the model
    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    rotary: str = "model.rotary_emb"
    last_norm: str = "model.norm"
    head: str = "lm_head"

    # Paths from a layer
    attention_norm: str = "input_layernorm"
    attention: str = "self_attn"
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"

    # Names of attention's modules
    query_key_value: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    # Norms of queries and keys, per head or over all heads; the weight's size tells which. None: no norms.
    query_key_norm: tuple[str, str] | None = None
    attention_output: str = "o_proj"

    # Names of the gated MLP's modules
    gate_up: tuple[str, str] = ("gate_proj", "up_proj")
    down: str = "down_proj"

    activation: str = "hidden_act"  # field of the config, whose value has to be silu
    window: str | None = None  # path from attention to its sliding window; None: full attention
    sinks: str | None = None  # path from attention to its attention sinks; None: no sinks
    mixture: Mixture | None = None  # mixture of experts that layers may have in place of the gated MLP

    @property
    def joined(self) -> tuple[tuple[str, ...], ...]:
        """Names of linear layers that share an input and are computed as one product."""
        return self.query_key_value, self.gate_up
