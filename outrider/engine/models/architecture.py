"""Description of an architecture that the fast decoder computes (outrider/engine/forward/decoder.py).

A layer of such a model adds attention over its first norm to the states, then a gated product or a mixture of
experts over its second norm. Norms are root mean square, the gate is silu, and rotary embedding pairs the
halves of a head, or of its first dimensions.
"""

from dataclasses import dataclass
from typing import Literal

# How a token weighs experts: by softmax over all of them or over the chosen, or by a sigmoid of each.
Scores = Literal["softmax", "softmax of chosen", "sigmoid"]


@dataclass(frozen=True)
class Mixture:
    """Names of the parts of a mixture of experts, and how a token chooses among them.

    Paths lead from the layer's ``mlp``, attributes are those of the router.
    """

    router: str = "gate"  # module with the weight [experts, hidden_size], a bias if any, and ``top_k``
    experts: str = "experts"
    scores: Scores = "softmax"
    correction: str | None = None  # path to what is added to scores for the choice alone
    groups: tuple[str, str] | None = None  # attributes: groups of neighbouring experts, and groups that count
    normalized: str | bool = (
        True  # whether the weights of the chosen are made to sum up to 1, or its attribute
    )
    scaling: str | None = None  # attribute: factor of the weights
    shared: str | None = None  # path to a gated product that every token takes
    shared_gate: str | None = None  # path to the linear layer whose sigmoid weighs that product
    # Attributes of experts as gpt-oss has them: slope of the gate's sigmoid, and limit of gate and up.
    clamped: tuple[str, str] | None = None
    # Paths from a layer to quantized gate, up and down of an expert by its number; or to gate and up of all
    # experts, in which the two alternate, and to down of all.
    files: tuple[str, ...] = (
        "mlp.experts.{}.gate_proj",
        "mlp.experts.{}.up_proj",
        "mlp.experts.{}.down_proj",
    )


@dataclass(frozen=True)
class Architecture:
    """Names by which a model of transformers has its parts. The defaults are those of its Llama.

    A path leads through modules with dots, as ``torch.nn.Module.get_submodule`` takes it.
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
    # Norms of each head, or of all heads together, as their sizes tell; None: the model has none.
    query_key_norm: tuple[str, str] | None = None
    attention_output: str = "o_proj"

    # Names of the gated product's modules
    gate_up: tuple[str, str] = ("gate_proj", "up_proj")
    down: str = "down_proj"

    activation: str = "hidden_act"  # field of the config, which has to be silu
    window: str | None = None  # path from attention to its sliding window; None: it sees all positions
    sinks: str | None = None  # path from attention to its sinks; None: it has none
    mixture: Mixture | None = None  # mixture of experts, which layers may have in place of the gated product

    @property
    def joined(self) -> tuple[tuple[str, ...], ...]:
        """Names of linear layers that share an input, and are computed as one product."""
        return self.query_key_value, self.gate_up
