"""Small random targets with an MTP layer, and a plain reference implementation: no cache, no batch."""

import copy
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.gumbel_max import gumbel_max
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import ARCHITECTURES, COMMON, VOCAB_SIZE
from tests.support.target_drafters import TOKENS
from workshop.demo.pair import load_model

PROMPTS = [tuple((7 * number * place + 3) % 256 for place in range(5 + 15 * number)) for number in range(3)]
SETTINGS = {"dtype": "float32", "threads": 1, "cache_memory": 2**22, "block_size": 4}
SEVERAL = 3  # MTP layers of a target with several
SIZE, LAYERS = COMMON["hidden_size"], COMMON["num_hidden_layers"]
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
GROUPED = {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **EXPERTS,
        **GROUPED,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1,
    },
    "glm4_moe": {**EXPERTS, **GROUPED, "head_dim": 16, "num_nextn_predict_layers": 1},
    "mellum": {
        **EXPERTS,
        "head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_nextn_predict_layers": 1,
    },
    "qwen3": {"head_dim": 16, "layer_types": ["full_attention"] * LAYERS},
}
KINDS["glm4_moe_lite"] = {**KINDS["deepseek_v3"], "mlp_layer_types": ["dense", "sparse", "sparse"]}
del KINDS["glm4_moe_lite"]["num_nextn_predict_layers"]  # the real config omits it
# Hybrids. Their last layer and their MTP layer have full attention. Their norms scale by 1 + weight.
_DELTA_NET = {
    **ARCHITECTURES["qwen3_next"],
    "layer_types": ["linear_attention"] * (LAYERS - 1) + ["full_attention"],
    "mlp_only_layers": [],
}
HYBRID_KINDS: dict[str, dict[str, Any]] = {"qwen3_5_text": _DELTA_NET, "qwen3_next": _DELTA_NET}
APPENDED = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")  # models that store the MTP layer after their layers
QWEN_NAMES = {  # names of the weights around the MTP layer
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "post_norm": "mtp.norm",
}


TRAPS = {
    "the state one token early",
    "the state before the target's norm",
    "the state before the embedding",
    "its own state before its norm",
}


@dataclass(frozen=True)
class Reference:
    """Target with its MTP layer, computed over a whole text at once."""

    kind: str
    model: Any  # model of transformers
    around: dict[str, Tensor]  # norms and projection, with DeepSeek's names
    block: nn.Module  # decoder layer
    trap: str | None = None  # wrong input, of TRAPS

    @torch.inference_mode()
    def hidden(self, tokens: list[int]) -> Tensor:
        """Returns the states of the last layer after the norm, [num_tokens, SIZE]."""
        given = torch.tensor([tokens])
        if self.trap == "the state before the target's norm":
            return self._before_norm(given)
        states = self.model(input_ids=given, output_hidden_states=True).hidden_states[-1][0]
        return states.roll(1, 0) if self.trap == "the state one token early" else states

    def _before_norm(self, given: Tensor) -> Tensor:
        seen: list[Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda module, states: seen.append(states[0]))
        self.model(input_ids=given)
        hook.remove()
        return seen[0][0]

    @torch.inference_mode()
    def after(self, states: Tensor, tokens: list[int]) -> Tensor:
        """Returns the MTP layer's states before its norm: [num_tokens, SIZE].

        Args:
            states: [num_tokens, SIZE] states before the tokens.
            tokens: token after each state.
        """
        embeddings = self.model.get_input_embeddings()(torch.tensor(tokens))
        parts = [self._norm("enorm", embeddings), self._norm("hnorm", states)]
        if self.trap == "the state before the embedding":
            parts.reverse()
        projected = linear(torch.cat(parts, dim=-1), self.around["eh_proj"])[None]
        count = len(tokens)
        places = torch.arange(count)
        back = places[:, None] - places
        window = COMMON["max_position_embeddings"]
        kind = {}
        if self.kind == "mellum":
            window, kind = self.model.config.sliding_window, {"layer_type": "sliding_attention"}
        mask = torch.zeros(count, count).masked_fill((back < 0) | (back >= window), -torch.inf)
        rotation = self.model.model.rotary_emb(projected, position_ids=places[None], **kind)
        passed = self.block(projected, attention_mask=mask[None, None], position_embeddings=rotation)
        return passed[0]

    def normed(self, states: Tensor) -> Tensor:
        return self._norm("post_norm", states)

    @torch.inference_mode()
    def chain(
        self, hidden: Tensor, tokens: list[int], depth: int, sampling: Sampling, length: int
    ) -> list[int]:
        """Returns the drafted tokens after a text. The arguments are those of ``best_after``."""
        states, text = hidden, list(tokens)
        while len(text) < len(tokens) + depth:
            after = self.after(states, text[1:])[-1:]
            text += self._best(after, text, 1, sampling, length)
            states = torch.cat([states, self._fed_back(after)])
        return text[len(tokens) :]

    @torch.inference_mode()
    def best_after(
        self, hidden: Tensor, tokens: list[int], path: list[int], count: int, sampling: Sampling, length: int
    ) -> list[int]:
        """Returns the best tokens after a text and drafted tokens.

        Args:
            hidden: [num_tokens - 1, SIZE] states of all tokens but the last.
            length: tokens of the prompt.
        """
        states, text = hidden, [*tokens, *path]
        for end in range(len(tokens), len(text) + 1):
            after = self.after(states, text[1:end])[-1:]
            states = torch.cat([states, self._fed_back(after)])
        return self._best(after, text, count, sampling, length)

    def _fed_back(self, after: Tensor) -> Tensor:
        return after if self.trap == "its own state before its norm" else self.normed(after)

    def _best(self, after: Tensor, text: list[int], count: int, sampling: Sampling, length: int) -> list[int]:
        logits = self.model.lm_head(self.normed(after))
        row = ChoiceContext(
            sampling, noise_key(1, 0, tuple(text[:length])), len(text), text[:length], text[length:]
        )
        scaled = logits if sampling.temperature == 0 else logits / sampling.temperature
        best: list[int] = gumbel_max(scaled, [row], count)[0][0].tolist()
        return best

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        eps = self.model.config.rms_norm_eps
        scale = self.around[name] + (self.kind in HYBRID_KINDS)
        return rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt() * scale


@cache
def reference(kind: str) -> Reference:
    """Returns a random target with an MTP layer, of which many guesses are correct.

    In both, a token depends strongly on its predecessor.
    """
    config = AutoConfig.for_model(
        kind, **{**COMMON, **(KINDS | HYBRID_KINDS)[kind], "tie_word_embeddings": False}
    )
    config.eos_token_id = None
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(8)
    _randomize(model, generator)
    return _layer(kind, model.requires_grad_(False), generator)


@cache
def references(kind: str) -> tuple[Reference, ...]:
    """Returns the target with each of SEVERAL MTP layers."""
    first = reference(kind)
    generators = (torch.Generator().manual_seed(8 + layer) for layer in range(1, SEVERAL))
    return (first, *(_layer(kind, first.model, generator) for generator in generators))


def _layer(kind: str, model: Any, generator: torch.Generator) -> Reference:
    of_layer = copy.deepcopy(model.config)
    of_layer.first_k_dense_replace = 0  # the MTP layer has experts, unlike some layers of the target
    of_layer.layer_types, of_layer.mlp_layer_types = ["full_attention"], ["sparse"]
    if kind == "mellum":
        of_layer.layer_types = ["sliding_attention"]
    block = type(model.model.layers[-1])(of_layer, 0).float().eval()
    _randomize(block, generator, attention=1.0)
    projection = 0.05 * torch.randn(SIZE, 2 * SIZE, generator=generator)
    projection[:, :SIZE] += torch.eye(SIZE)
    around = {"eh_proj": projection}
    for name in ("enorm", "hnorm", "post_norm"):
        around[name] = (kind not in HYBRID_KINDS) + 0.2 * torch.randn(SIZE, generator=generator)
    return Reference(kind, model, around, block.requires_grad_(False))


@torch.inference_mode()
def chain_of_layers(
    layers: Sequence[Reference],
    hidden: Tensor,
    tokens: list[int],
    depth: int,
    sampling: Sampling,
    length: int,
) -> list[int]:
    """Returns the drafted tokens after a text, one per layer. The arguments are those of ``best_after``."""
    states, text = hidden, list(tokens)
    for number, layer in enumerate(layers[:depth]):
        after = layer.after(states, text[1 + number :])
        text += layer._best(after[-1:], text, 1, sampling, length)
        states = layer.normed(after)
    return text[len(tokens) :]


@torch.no_grad()
def _randomize(module: nn.Module, generator: torch.Generator, attention: float = 0.3) -> None:
    """Fills the weights with random numbers. attention: scale of attention's output weights."""
    for name, tensor in sorted(module.state_dict().items()):
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            tensor.copy_(1.0 + 0.3 * noise)
        elif "embed_tokens" in name or "lm_head" in name or tensor.ndim == 1:
            tensor.copy_(noise if tensor.ndim > 1 else 0.1 * noise)
        else:
            scale = attention if "o_proj" in name else 0.3 if "down_proj" in name else 1.0
            tensor.copy_(scale * tensor.shape[-1] ** -0.5 * noise)


def published_layers(kind: str) -> dict[str, Tensor]:
    """Returns the tensors of all MTP layers of ``references``. kind: a kind of APPENDED."""
    return {
        name: tensor
        for number, made in enumerate(references(kind))
        for name, tensor in published(kind, made, number).items()
    }


def published(kind: str, made: Reference | None = None, number: int = 0) -> dict[str, Tensor]:
    """Returns the MTP layer's tensors as in checkpoints, with separate experts.

    Args:
        made: layer to use instead of ``reference``.
        number: index of the MTP layer, for a kind of APPENDED.
    """
    made = made or reference(kind)
    around = {f"{name}.weight": tensor for name, tensor in made.around.items()}
    block: dict[str, Tensor] = {}
    for name, tensor in made.block.state_dict().items():
        prefix, is_fused, part = name.partition("mlp.experts.")
        if not is_fused:
            block[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
            for projection, rows in zip(names, weight.chunk(len(names)), strict=True):
                block[f"{prefix}mlp.experts.{expert}.{projection}.weight"] = rows
    if kind in APPENDED:
        start = f"model.layers.{LAYERS + number}."
        around["shared_head.norm.weight"] = around.pop("post_norm.weight")
        around["shared_head.head.weight"] = made.model.lm_head.weight
        around["embed_tokens.weight"] = made.model.get_input_embeddings().weight
        return {start + name: tensor.clone() for name, tensor in {**around, **block}.items()}
    named = {f"{QWEN_NAMES[name]}.weight": made.around[name].clone() for name in QWEN_NAMES}
    return named | {f"mtp.layers.0.{name}": tensor.clone() for name, tensor in block.items()}


def write_target(folder: Path, kind: str, layer: dict[str, Tensor] | None = None, **config: Any) -> Path:
    """Writes a checkpoint in several files.

    Args:
        layer: tensors to use instead of ``published``.
        config: overrides of config.json.
    """
    made = reference(kind)
    made.model.save_pretrained(folder, max_shard_size="300KB")
    added = "model-mtp.safetensors"
    tensors = published(kind) if layer is None else layer
    save_file(tensors, folder / added, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    said = json.loads(index.read_bytes())
    said["weight_map"] |= dict.fromkeys(tensors, added)
    index.write_text(json.dumps(said))
    told = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**told, **config}))
    return folder


def write_demo(folder: Path) -> Path:
    """Writes the demo target with a random MTP layer in Qwen's format."""
    shutil.copytree(DEMO / "target", folder, dirs_exist_ok=True)
    model = load_model(folder).float()
    block = copy.deepcopy(model.model.layers[0])
    generator = torch.Generator().manual_seed(8)
    _randomize(block, generator)
    size = model.config.hidden_size
    projection = 0.05 * torch.randn(size, 2 * size, generator=generator)
    projection[:, :size] += torch.eye(size)
    tensors = {f"mtp.layers.0.{name}": tensor for name, tensor in block.state_dict().items()}
    tensors |= {f"{QWEN_NAMES[name]}.weight": torch.ones(size) for name in ("enorm", "hnorm", "post_norm")}
    save_file({**tensors, "mtp.fc.weight": projection}, folder / "mtp.safetensors", {"format": "pt"})
    return folder


def golden_inputs() -> tuple[Tensor, list[int]]:
    """Returns states [12, SIZE], and the token after each state."""
    generator = torch.Generator().manual_seed(9)
    hidden = torch.randn(12, SIZE, generator=generator)
    return hidden, torch.randint(VOCAB_SIZE, (12,), generator=generator).tolist()


def plain_texts(folder: Path, temperature: float) -> list[tuple[int, ...]]:
    """Returns a target's answers to PROMPTS by plain decoding."""
    plain = Engine.from_settings(EngineSettings.model_validate({**SETTINGS, "model": str(folder)}))
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True, temperature=temperature)
    asked = [OfflineRequest(prompt, sampling, noise_key(1, 0, prompt)) for prompt in PROMPTS]
    return [output.tokens for output in generate(plain, None, asked, 0)]
