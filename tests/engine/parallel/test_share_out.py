"""Whole layers that ranks share out compute what they computed whole."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from outrider.engine.parallel.layers import share_out
from outrider.engine.parallel.rank_group import RankGroup
from tests.support.ranks import Ranks

SIZE, HEAD_DIM, TOKENS = 32, 8, 5


class Layer(nn.Module):
    """Attention and an MLP, with biases, and a projection that is no part of either."""

    def __init__(self, kv_heads: int, width: int) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=SIZE,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            head_dim=HEAD_DIM,
            intermediate_size=width,
            attention_bias=True,
            mlp_bias=True,
            attn_implementation="sdpa",
        )
        self.attention = LlamaAttention(config, layer_idx=0)
        self.mlp = LlamaMLP(config)
        self.joined = nn.Linear(SIZE, SIZE)

    def forward(self, states: Tensor) -> Tensor:
        rotation = torch.ones(1, TOKENS, HEAD_DIM), torch.zeros(1, TOKENS, HEAD_DIM)
        states = states + self.attention(states, rotation, None)[0]
        output: Tensor = self.joined(states + self.mlp(states))
        return output


@dataclass(frozen=True)
class Found:
    shares_heads: bool
    difference: float  # from the whole layer's result, at most
    parts: dict[str, float]  # share of each weight's numbers that the rank holds


@torch.inference_mode()
def compute(group: RankGroup, kv_heads: int, width: int) -> Found:
    torch.manual_seed(0)
    layer, states = Layer(kv_heads, width).eval(), torch.randn(1, TOKENS, SIZE)
    whole = {name: weight.numel() for name, weight in layer.named_parameters()}
    expected = layer(states)
    shares_heads = share_out(layer, group.rank, group.size)
    difference = float((layer(states) - expected).abs().max())
    named = {name.replace("linear.", ""): weight.numel() for name, weight in layer.named_parameters()}
    return Found(shares_heads, difference, {name: count / whole[name] for name, count in named.items()})


WHOLE = {"joined.weight": 1.0, "joined.bias": 1.0}
HALF = 0.5


def parts_of(module: str, columns: tuple[str, ...], row: str, part: float) -> dict[str, float]:
    """Each rank has the bias of the last product, which is added after the parts are summed."""
    named = {f"{module}.{name}.{kind}": part for name in columns for kind in ("weight", "bias")}
    return {**named, f"{module}.{row}.weight": part, f"{module}.{row}.bias": 1.0}


@pytest.mark.parametrize(
    ("kv_heads", "width", "attention", "mlp"),
    [(2, 48, HALF, HALF), (4, 48, HALF, HALF), (1, 48, 1.0, HALF), (2, 49, HALF, 1.0)],
)
def test_rank_holds_its_part_of_what_can_be_divided(
    ranks: Ranks, kv_heads: int, width: int, attention: float, mlp: float
) -> None:
    for found in ranks.run(compute, compute, kv_heads, width):
        assert found.difference < 1e-6
        assert found.shares_heads == (attention == HALF)
        assert found.parts == {
            **WHOLE,
            **parts_of("attention", ("q_proj", "k_proj", "v_proj"), "o_proj", attention),
            **parts_of("mlp", ("gate_proj", "up_proj"), "down_proj", mlp),
        }


class Layers(nn.Module):
    """Routed experts, and one that every token goes to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        config = DeepseekV3Config(
            hidden_size=SIZE,
            moe_intermediate_size=width,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
        )
        self.mlp = DeepseekV3MoE(config)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.2)

    def forward(self, states: Tensor) -> Tensor:
        output: Tensor = self.mlp(states)
        return output


@torch.inference_mode()
def compute_experts(group: RankGroup, width: int, as_transposed: bool) -> tuple[float, dict[str, float]]:
    """The difference from the whole, and the parts of the routed experts that the rank holds."""
    torch.manual_seed(0)
    layer, states = Layers(width).eval(), torch.randn(1, TOKENS, SIZE)
    experts = layer.mlp.experts
    whole = {name: weight.numel() for name, weight in experts.named_parameters()}
    expected = layer(states)
    experts.is_transposed = as_transposed
    share_out(layer, group.rank, group.size)
    experts.is_transposed = False
    parts = {name: weight.numel() / whole[name] for name, weight in experts.named_parameters()}
    return float((layer(states) - expected).abs().max()), parts


@pytest.mark.parametrize(
    ("width", "as_transposed", "part"), [(48, False, HALF), (49, False, 1.0), (48, True, 1.0)]
)
def test_rank_holds_its_part_of_every_expert(
    ranks: Ranks, width: int, as_transposed: bool, part: float
) -> None:
    """Weights that are stored in another order stay whole."""
    for difference, parts in ranks.run(compute_experts, compute_experts, width, as_transposed):
        assert difference < 1e-5
        assert parts == {"gate_up_proj": part, "down_proj": part}
