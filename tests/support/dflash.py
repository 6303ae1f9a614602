"""DFlash drafts for the demo target, and a plain reference implementation: no cache, no batch."""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import embedding, linear, one_hot, rms_norm, silu

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.gumbel_max import gumbel_max
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.engine.drafters.markov_head import GATED, RECURRENT, VANILLA
from tests.support.eagle3 import VOCABULARY, hidden_of, target_model
from tests.support.heads import RIDGE, random_vocabulary, written_texts

SIZE, HEADS, KV_HEADS, DIM, INTERMEDIATE, LAYERS = 256, 4, 2, 64, 384, 2
EPS = 1e-5
BLOCK, MASK = 6, 1  # rows of a block, token of a mask
TAPS, GROUP = 2, 16  # rows that a convolution mixes, and channels that share a kernel
RANK, CANDIDATES = 24, 8  # size of a token's code in the selector, and number of tokens that it scores
GOLDEN_ANCHOR = 9  # position of the block whose logits are in the golden file
ANCHORS = 4  # tokens between two anchors of the fit


@dataclass(frozen=True)
class Form:
    """Options of a config."""

    outputs: tuple[int, ...] = (1, 3, 4)  # target layers whose outputs are read
    tokens: int = VOCABULARY  # tokens in the draft's own projection
    looks_ahead: bool = True
    is_shifted: bool = False  # rows guess the token after themselves
    window: int | None = None  # tokens that a row attends to, itself included
    markov: int = 0  # rank of the bias that depends on the previous token; 0: there is none
    head: str = VANILLA  # kind of the Markov head
    is_second: bool = False  # DFlash2: convolutions and a selector

    @property
    def inputs(self) -> tuple[int, ...]:
        """Target layers whose inputs equal these outputs."""
        return tuple(layer + 1 for layer in self.outputs)

    @property
    def guesses(self) -> int:
        return BLOCK if self.is_shifted else BLOCK - 1


def random_tensors(form: Form) -> dict[str, Tensor]:
    """Returns weights with z-lab's names, without a vocabulary. The last layer's states weigh most."""
    generator = torch.Generator().manual_seed(6)

    def normal(outputs: int, inputs: int, scale: float = 1.0) -> Tensor:
        return scale * inputs**-0.5 * torch.randn(outputs, inputs, generator=generator)

    def norm(size: int) -> Tensor:
        return 1.0 + 0.1 * torch.randn(size, generator=generator)

    width = SIZE * len(form.outputs)
    tensors = {
        "fc.weight": normal(SIZE, width, 0.1),
        "hidden_norm.weight": norm(SIZE),
        "norm.weight": norm(SIZE),
    }
    tensors["fc.weight"][:, -SIZE:] += torch.eye(SIZE)
    for number in range(LAYERS):
        prefix = f"layers.{number}."
        rows = {"q_proj": HEADS * DIM, "k_proj": KV_HEADS * DIM, "v_proj": KV_HEADS * DIM}
        tensors |= {f"{prefix}self_attn.{name}.weight": normal(count, SIZE) for name, count in rows.items()}
        tensors[f"{prefix}self_attn.o_proj.weight"] = normal(SIZE, HEADS * DIM)
        tensors |= {f"{prefix}self_attn.{name}.weight": norm(DIM) for name in ("q_norm", "k_norm")}
        for name in ("gate_proj", "up_proj"):
            tensors[f"{prefix}mlp.{name}.weight"] = normal(INTERMEDIATE, SIZE)
        tensors[f"{prefix}mlp.down_proj.weight"] = normal(SIZE, INTERMEDIATE, 0.3)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = norm(SIZE)
        if form.is_second:
            for name in ("attention_conv", "mlp_conv"):
                tensors[f"{prefix}{name}.base_kernel"] = torch.randn(2, TAPS, SIZE, generator=generator)
                tensors[f"{prefix}{name}.kernel_projection.weight"] = normal(2 * TAPS * SIZE // GROUP, SIZE)
    if form.is_second:
        tensors["candidate_selector.hidden_projection.weight"] = normal(RANK, SIZE)
        for name in ("predecessor_codebook", "successor_codebook"):
            tensors[f"candidate_selector.{name}"] = torch.randn(VOCABULARY, RANK, generator=generator)
    if form.markov:
        tensors["markov_head.markov_w1.weight"] = torch.randn(VOCABULARY, form.markov, generator=generator)
        tensors["markov_head.markov_w2.weight"] = normal(form.tokens, form.markov)
        tensors["confidence_head.proj.weight"] = normal(1, SIZE + form.markov)
    if form.head == GATED:
        tensors["markov_head.gate_proj.weight"] = normal(form.markov, SIZE + form.markov)
        tensors["markov_head.gate_proj.bias"] = torch.randn(form.markov, generator=generator)
    if form.head == RECURRENT:
        tensors["markov_head.joint_proj.weight"] = normal(3 * form.markov, 2 * form.markov + SIZE)
        tensors["markov_head.joint_proj.bias"] = torch.randn(3 * form.markov, generator=generator)
    return tensors


@dataclass(frozen=True)
class Reference:
    """Reference draft that computes a whole text at once."""

    form: Form
    tensors: dict[str, Tensor]

    def states(self, hidden: Tensor, newest: int) -> Tensor:
        """Returns the normed states of the rows that guess: [guesses, SIZE].

        Args:
            hidden: [num_tokens, num_layers, SIZE] states of all tokens before the newest token.
            newest: id of the newest token.
        """
        context = self._norm("hidden_norm", linear(hidden.flatten(1), self.tensors["fc.weight"]))
        table = target_model().get_input_embeddings().weight
        rows = embedding(torch.tensor([newest] + [MASK] * (BLOCK - 1)), table)
        for number in range(LAYERS):
            prefix = f"layers.{number}."
            normed = self._norm(prefix + "input_layernorm", rows)
            read = self._mixed(f"{prefix}attention_conv", normed, normed, 0)
            attended = self._attention(prefix, read, context)
            rows = rows + self._mixed(f"{prefix}attention_conv", attended, normed, 1)
            normed = self._norm(prefix + "post_attention_layernorm", rows)
            inner = self._mixed(f"{prefix}mlp_conv", normed, normed, 0)
            gate, up, down = (
                self.tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
            )
            features = linear(silu(linear(inner, gate)) * linear(inner, up), down)
            rows = rows + self._mixed(f"{prefix}mlp_conv", features, normed, 1)
        return self._norm("norm", rows)[-self.form.guesses :]

    def chain(
        self, hidden: Tensor, tokens: list[int], depth: int, sampling: Sampling, length: int
    ) -> list[int]:
        """Returns the drafted tokens after a text.

        Args:
            hidden: [num_tokens - 1, num_layers, SIZE] states of all tokens but the last.
            length: tokens of the prompt.
        """
        states, path, memory = self.states(hidden, tokens[-1]), list[int](), torch.zeros(self.form.markov)
        token_ids = torch.arange(self.form.tokens) + self.tensors.get("d2t", torch.zeros(1).long())
        for row in range(depth):
            text = [*tokens, *path]
            logits = torch.full((1, VOCABULARY), -torch.inf)
            known = linear(states[row], self.tensors["lm_head.weight"])
            bias, memory = self._bias(states[row], text[-1], memory)
            logits[0, token_ids] = known + bias
            if self.form.is_second:
                logits = self._selected(logits, states[row], text[-1])
            key = noise_key(1, 0, tuple(tokens[:length]))
            context = ChoiceContext(sampling, key, len(text), text[:length], text[length:])
            scaled = logits / (sampling.temperature or 1.0)
            path.append(int(gumbel_max(scaled, [context], 1)[0][0, 0]))
        return path

    def _mixed(self, name: str, rows: Tensor, chooser: Tensor, side: int) -> Tensor:
        """Returns the rows of a block, each mixed with its predecessor by a kernel from ``chooser``."""
        if not self.form.is_second:
            return rows
        chosen = linear(chooser, self.tensors[f"{name}.kernel_projection.weight"])
        base, mixed = self.tensors[f"{name}.base_kernel"][side], []
        for number, of_row in enumerate(chosen.view(len(rows), 2, TAPS, SIZE // GROUP)[:, side]):
            weights = base + of_row.repeat_interleave(GROUP, dim=-1)
            before = rows[number - 1] if number else torch.zeros(SIZE)
            mixed.append(weights[0] * rows[number] + weights[1] * before)
        return torch.stack(mixed)

    def _selected(self, logits: Tensor, state: Tensor, before: int) -> Tensor:
        """Returns the logits [1, VOCABULARY] of the candidates, adjusted by the token before them."""
        sought = linear(state, self.tensors["candidate_selector.hidden_projection.weight"])
        sought = sought * self.tensors["candidate_selector.predecessor_codebook"][before]
        scores = logits + self.tensors["candidate_selector.successor_codebook"] @ sought
        is_candidate = logits >= logits.topk(CANDIDATES).values.min()
        return scores.masked_fill(~is_candidate, -torch.inf)

    def _bias(self, state: Tensor, before: int, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the bias of a guess after a token, [tokens], or zero without a Markov head; and the memory.

        memory: [rank] state of the recurrent head after the previous guess.
        """
        if not self.form.markov:
            return torch.zeros(1), memory
        numbers = self.tensors["markov_head.markov_w1.weight"][before]
        if self.form.head == GATED:
            numbers = numbers * self._joint("gate_proj", state, numbers).sigmoid()
        if self.form.head == RECURRENT:
            kept, new, numbers = self._joint("joint_proj", memory, numbers, state).chunk(3)
            numbers = numbers.tanh()
            memory = memory * kept.sigmoid() + new.tanh() * (-kept).sigmoid()
        return linear(numbers, self.tensors["markov_head.markov_w2.weight"]), memory

    def _joint(self, name: str, *given: Tensor) -> Tensor:
        weight, bias = (self.tensors[f"markov_head.{name}.{part}"] for part in ("weight", "bias"))
        return linear(torch.cat(given), weight, bias)

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        return rms_norm(rows, rows.shape[-1:], self.tensors[name + ".weight"], EPS)

    def _attention(self, prefix: str, rows: Tensor, context: Tensor) -> Tensor:
        before, count = len(context), len(context) + BLOCK
        angles = torch.outer(torch.arange(count).float(), 10000.0 ** (-torch.arange(0, DIM, 2) / DIM))
        cos, sin = (part.repeat(1, 2)[:, None] for part in (angles.cos(), angles.sin()))

        def heads(name: str, given: Tensor) -> Tensor:
            return linear(given, self.tensors[f"{prefix}self_attn.{name}.weight"]).view(len(given), -1, DIM)

        def rotated(name: str, given: Tensor, first: int) -> Tensor:
            turned, half = self._norm(f"{prefix}self_attn.{name}_norm", given), DIM // 2
            swapped = torch.cat([-turned[..., half:], turned[..., :half]], dim=-1)
            return turned * cos[first:] + swapped * sin[first:]

        read = torch.cat([context, rows])
        query, key = rotated("q", heads("q_proj", rows), before), rotated("k", heads("k_proj", read), 0)
        key, value = (
            part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (key, heads("v_proj", read))
        )
        scores = torch.einsum("qhd,khd->hqk", query, key) * DIM**-0.5
        places, of_rows = torch.arange(count), torch.arange(before, count)[:, None]
        hidden = torch.zeros(BLOCK, count, dtype=torch.bool)
        if not self.form.looks_ahead:
            hidden |= places > of_rows
        if self.form.window is not None:
            hidden |= places <= of_rows - self.form.window
        scores.masked_fill_(hidden, -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
        return linear(mixed, self.tensors[f"{prefix}self_attn.o_proj.weight"])


@cache
def reference(form: Form = Form()) -> Reference:
    """Returns a random draft. Its projection is fitted to the target's texts: some guesses are correct."""
    draft = Reference(form, random_tensors(form))
    inputs, outputs = list[Tensor](), list[int]()
    with torch.inference_mode():
        for text in written_texts():
            hidden = hidden_of(text, form.inputs)
            for anchor in range(ANCHORS, len(text) - form.guesses, ANCHORS):
                inputs.append(draft.states(hidden[:anchor], text[anchor]))
                outputs += text[anchor + 1 :][: form.guesses]
    rows = torch.cat(inputs).clone()
    gram = rows.T @ rows
    gram += RIDGE * gram.diagonal().mean() * torch.eye(SIZE)
    fitted = 10.0 * torch.linalg.solve(gram, rows.T @ one_hot(torch.tensor(outputs), VOCABULARY).float()).T
    tensors = {**draft.tensors, "lm_head.weight": fitted.contiguous()}
    if form.tokens < VOCABULARY:
        kept = torch.tensor(outputs).bincount(minlength=VOCABULARY).topk(form.tokens).indices.sort().values
        tensors["lm_head.weight"] = fitted[kept].contiguous()
        tensors["d2t"] = kept - torch.arange(form.tokens)
        tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, kept, True)
    return replace(draft, tensors=tensors)


SIZES = {
    "hidden_size": SIZE,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "rms_norm_eps": EPS,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,  # fewer than the texts have: the target's limit must apply
}


def write_dflash(folder: Path, form: Form = Form(), kind: str = "z-lab", **config: Any) -> Path:
    """Writes a checkpoint. kind: z-lab, speculators or DeepSpec; config: overrides of config.json."""
    folder.mkdir(exist_ok=True)
    save_file(reference(form).tensors, folder / "model.safetensors")
    layers: dict[str, Any] = {"model_type": "qwen3", **SIZES}
    if form.window is not None:
        layers |= {"layer_types": ["sliding_attention"] * LAYERS, "sliding_window": form.window}
    block = {"block_size": BLOCK, "mask_token_id": MASK}
    if kind == "speculators":
        verifier = {"name_or_path": "somebody/outrider-demo", "architectures": ["LlamaForCausalLM"]}
        told: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
            "speculators_model_type": "dflash",
            "transformer_layer_config": layers,
            "speculators_config": {"algorithm": "dflash", "verifier": verifier},
            "aux_hidden_state_layer_ids": list(form.inputs),
            "draft_vocab_size": form.tokens,
            "sample_from_anchor": form.is_shifted,
            "sliding_window_non_causal": form.window is not None and form.looks_ahead,
            **block,
        }
    elif kind == "DeepSpec":
        told = {
            "architectures": ["Qwen3DSparkModel"],
            **layers,
            **block,
            "target_layer_ids": list(form.outputs),
        }
        told |= {"markov_rank": form.markov, "enable_confidence_head": form.markov > 0}
        told |= {"markov_head_type": form.head}
    else:
        own = {"mask_token_id": MASK, "target_layer_ids": list(form.outputs)}
        own |= {} if form.looks_ahead else {"causal_head": True}
        if form.is_second:
            own |= {"conv_kernel_size": TAPS, "conv_group_size": GROUP}
            own |= {"selector_rank": RANK, "selector_top_k": CANDIDATES}
        told = {"architectures": ["DFlashDraftModel"], **layers, "block_size": BLOCK, "dflash_config": own}
    (folder / "config.json").write_text(json.dumps({**told, **config}))
    return folder


def golden_forms() -> dict[str, Form]:
    """Returns the forms for which the speculators package has computed logits."""
    return {
        "DFlash": Form(tokens=300),
        "DSpark": Form(tokens=300, is_shifted=True, markov=16),
        "DSpark, gated": Form(tokens=300, is_shifted=True, markov=16, head=GATED),
    }


def golden_tensors(form: Form) -> dict[str, Tensor]:
    """Returns random weights with a random vocabulary."""
    generator = torch.Generator().manual_seed(8)
    return {**random_tensors(form), **random_vocabulary(form.tokens, SIZE, generator)}


def golden_inputs(form: Form) -> tuple[Tensor, list[int]]:
    """Returns states [24, num_layers, SIZE], and their tokens."""
    generator = torch.Generator().manual_seed(9)
    hidden = torch.randn(24, len(form.outputs), SIZE, generator=generator)
    return hidden, torch.randint(VOCABULARY, (24,), generator=generator).tolist()
