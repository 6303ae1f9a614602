"""Description of an architecture that the fast decoder computes (outrider/engine/forward/decoder.py).

A layer of such a model adds attention over its first norm to the states, then a gated product over its second
norm. Norms are root mean square, the gate is silu, rotary embedding pairs the halves of a head.
"""

from dataclasses import dataclass


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
    query_key_norm: tuple[str, str] | None = None  # norms of each head; None: the model has none
    attention_output: str = "o_proj"

    # Names of the gated product's modules
    gate_up: tuple[str, str] = ("gate_proj", "up_proj")
    down: str = "down_proj"

    activation: str = "hidden_act"  # field of the config, which has to be silu
    window: str | None = None  # path from attention to its sliding window; None: it sees all positions

    @property
    def joined(self) -> tuple[tuple[str, ...], ...]:
        """Names of linear layers that share an input, and are computed as one product."""
        return self.query_key_value, self.gate_up
