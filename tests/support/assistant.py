"""A small Gemma 4 with an assistant, and reference Drafts by transformers, without a cache."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.gumbel_max import gumbel_max
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from tests.support.checkpoints import COMMON, VOCAB_SIZE
from tests.support.heads import RIDGE

PROMPTS = [(5, 9, 33, 5, 9, 33, 5, 9), (77, 12, 4, *range(60, 90)), (3, 4, 5, 6, 7)]
WINDOW = 12  # tokens, fewer than some texts have
KINDS = ["sliding_attention", "full_attention"]
SIZES: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}


@dataclass(frozen=True)
class Pair:
    """Target and assistant in transformers."""

    target: Any
    assistant: Any

    @torch.no_grad()
    def steps(self, text: list[int], drafted: list[int]) -> tuple[Tensor, Tensor]:
        """Returns the assistant's last states and logits after a text and drafted tokens: [1, size] each."""
        model = self.target.model
        read = model(input_ids=torch.tensor([text[:-1]]), use_cache=False, return_shared_kv_states=True)
        state, inner = read.last_hidden_state[:, -1:], list[Tensor]()
        hook = self.assistant.model.norm.register_forward_hook(lambda *given: inner.append(given[-1]))
        for token in (text[-1], *drafted):
            embedding = self.target.get_input_embeddings()(torch.tensor([[token]]))
            output = self.assistant(
                inputs_embeds=torch.cat([embedding, state], dim=-1),
                position_ids=torch.tensor([[len(text) - 1]]),
                shared_kv_states=dict(read.shared_kv_states),
            )
            state = output.last_hidden_state
        hook.remove()
        return inner[-1][0], output.logits[0]

    def chain(self, text: list[int], depth: int, sampling: Sampling, length: int) -> list[int]:
        """Returns the drafted tokens after a text. length: prompt tokens of the text."""
        path: list[int] = []
        while len(path) < depth:
            _, logits = self.steps(text, path)
            whole = [*text, *path]
            key = noise_key(1, 0, tuple(text[:length]))
            row = ChoiceContext(sampling, key, len(whole), tuple(whole[:length]), whole[length:])
            scaled = logits / (sampling.temperature or 1.0)
            path.append(int(gumbel_max(scaled, [row], 1)[0][0, 0]))
        return path

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Writes the checkpoints of both models and returns their folders."""
        folders = folder / "target", folder / "assistant"
        for model, path in zip((self.target, self.assistant), folders, strict=True):
            model.save_pretrained(path)
        return folders


@cache
def pair(is_ordered: bool = False, shared: int = 0) -> Pair:
    """Makes a random pair. The assistant's projection is fitted to the target: some guesses are correct.

    Args:
        is_ordered: whether the assistant groups tokens into clusters.
        shared: number of target layers that share the keys of earlier layers.
    """
    torch.manual_seed(1)
    layers: dict[str, Any] = {
        "num_hidden_layers": 4,
        "layer_types": 2 * KINDS,
        "num_kv_shared_layers": shared,
    }
    if shared:  # transformers supports such layers only together with per-layer inputs
        layers |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE}
    target = Gemma4ForCausalLM(Gemma4TextConfig(**{**COMMON, **SIZES, **layers})).eval()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "layer_types": KINDS}
    text = Gemma4TextConfig(**{**COMMON, **SIZES, **sizes, "num_kv_shared_layers": 2})
    clusters = {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 6}
    config = Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=COMMON["hidden_size"], **clusters if is_ordered else {}
    )
    assistant = Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for weight in (*target.parameters(), *assistant.parameters()):
            if weight.ndim >= 2:
                weight.normal_(0, 0.15)
        if is_ordered:
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB_SIZE))
    made = Pair(target, assistant)
    _fit(made)
    return made


@torch.no_grad()
def _fit(made: Pair) -> None:
    """Fits the projection to the target's likeliest next tokens, by least squares."""
    inputs, outputs = list[Tensor](), list[int]()
    for prompt in PROMPTS:
        written = [*prompt]
        for _ in range(24):
            probs = made.target(torch.tensor([written])).logits[0, -1].softmax(-1)
            written.append(int(torch.multinomial(probs, 1)))
        said = made.target(torch.tensor([written])).logits[0].argmax(-1).tolist()
        for end in range(len(prompt), len(written)):
            inputs.append(made.steps(written[:end], [])[0])
            outputs.append(said[end - 1])
    rows = torch.cat(inputs)
    gram = rows.T @ rows
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
    fitted = torch.linalg.solve(gram, rows.T @ one_hot(torch.tensor(outputs), VOCAB_SIZE).float())
    made.assistant.lm_head.weight.copy_(10.0 * fitted.T)
