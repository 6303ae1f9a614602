"""EAGLE-3 and P-EAGLE heads for the demo target, and a plain reference implementation: no cache, no batch."""

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
from outrider.demo.prompts import DEMO
from outrider.engine.drafters.eagle3_head import Eagle3Shape, empty
from outrider.engine.loading.head_checkpoint import HeadCheckpoint
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.demo_pair import prompt_of
from tests.support.heads import RIDGE, random_vocabulary, written_texts
from tests.support.target_drafters import KINDS, TOKENS, Drafted, drafters_with
from workshop.demo.pair import load_model

SIZE, HEADS, KV_HEADS, DIM, INTERMEDIATE, VOCABULARY = 256, 4, 2, 64, 384, 2048
LATENT_QUERY, ROTATED = 48, 16  # size of a query's latent, and rotated dimensions of a key
EPS = 1e-5
FIRST = "layers.0."
MASK = 1  # mask token of P-EAGLE
GOLDEN_NEWEST, GOLDEN_GUESSES = 7, 4  # index of the newest token, and number of guesses after it


@dataclass(frozen=True)
class Form:
    """Options of a config."""

    layers: tuple[int, ...] = (2, 3, 6)
    tokens: int = VOCABULARY  # tokens in the head's own projection
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    attention: float = 0.3  # scale of attention's output weights
    draft_layers: int = 1
    has_masks: bool = False  # P-EAGLE: a mask for each guess after the first guess
    latent: int = 0  # size of the latent for keys and values; 0: plain attention


P_EAGLE = Form(tokens=300, draft_layers=2, has_masks=True)


def random_tensors(form: Form) -> dict[str, Tensor]:
    """Returns weights with speculators' names, without a vocabulary. The last layer's states weigh most."""
    generator = torch.Generator().manual_seed(3)

    def normal(outputs: int, inputs: int, scale: float = 1.0) -> Tensor:
        return scale * inputs**-0.5 * torch.randn(outputs, inputs, generator=generator)

    def norm(size: int) -> Tensor:
        return 1.0 + 0.1 * torch.randn(size, generator=generator)

    width = SIZE * len(form.layers)
    tensors = {"fc.weight": normal(SIZE, width, 0.1), "norm.weight": norm(SIZE)}
    tensors["fc.weight"][:, -SIZE:] += torch.eye(SIZE)
    for layer in range(form.draft_layers):
        prefix, is_first = f"layers.{layer}.", layer == 0
        heads = {"q_proj": HEADS * DIM, "k_proj": KV_HEADS * DIM, "v_proj": KV_HEADS * DIM}
        if form.latent:
            heads = {"q_a_proj": LATENT_QUERY, "kv_a_proj_with_mqa": form.latent + ROTATED}
            own = f"{prefix}self_attn."
            tensors |= {f"{own}q_a_layernorm.weight": norm(LATENT_QUERY)}
            tensors |= {f"{own}kv_a_layernorm.weight": norm(form.latent)}
            tensors[f"{own}q_b_proj.weight"] = normal(HEADS * (DIM + ROTATED), LATENT_QUERY)
            tensors[f"{own}kv_b_proj.weight"] = normal(HEADS * 2 * DIM, form.latent)
        for name, rows in heads.items():
            tensors[f"{prefix}self_attn.{name}.weight"] = normal(rows, 2 * SIZE if is_first else SIZE)
        tensors[f"{prefix}self_attn.o_proj.weight"] = normal(SIZE, HEADS * DIM, form.attention)
        tensors[f"{prefix}mlp.gate_proj.weight"] = normal(INTERMEDIATE, SIZE)
        tensors[f"{prefix}mlp.up_proj.weight"] = normal(INTERMEDIATE, SIZE)
        tensors[f"{prefix}mlp.down_proj.weight"] = normal(SIZE, INTERMEDIATE, 0.3)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            if is_first or name != "hidden_norm":
                tensors[f"{prefix}{name}.weight"] = norm(SIZE)
    if form.has_masks:
        tensors["mask_hidden"] = torch.randn(1, 1, width, generator=generator)
    if form.norm_before_fc:
        tensors["input_norm.weight"] = norm(width)
    if form.fc_norm:
        tensors |= {f"fc_norm.{index}.weight": norm(SIZE) for index in range(len(form.layers))}
    return tensors


@dataclass(frozen=True)
class Reference:
    """Reference head that computes a whole text at once."""

    form: Form
    tensors: dict[str, Tensor]

    def states(self, hidden: Tensor, tokens: list[int]) -> Tensor:
        """Returns the head's states [num_tokens, SIZE].

        Args:
            hidden: [num_tokens, num_layers, SIZE] states of the target.
            tokens: token after each state.
        """
        return self.go_on(self.reduced(hidden), tokens)

    def reduced(self, hidden: Tensor) -> Tensor:
        if self.form.fc_norm:
            parts = [
                self._norm(f"fc_norm.{index}", hidden[:, index]) for index in range(len(self.form.layers))
            ]
            hidden = torch.stack(parts, dim=1)
        flat = hidden.flatten(1)
        flat = self._norm("input_norm", flat) if self.form.norm_before_fc else flat
        return linear(flat, self.tensors["fc.weight"])

    def go_on(self, states: Tensor, tokens: list[int]) -> Tensor:
        """Returns the states after one pass over all positions, each with the token after it."""
        normed = self._norm(FIRST + "hidden_norm", states)
        embeddings = embedding(torch.tensor(tokens), target_model().get_input_embeddings().weight)
        read = torch.cat([self._norm(FIRST + "input_layernorm", embeddings), normed], dim=-1)
        after = (normed if self.form.norm_before_residual else states) + self._attention(FIRST, read)
        output = self._with_features(FIRST, after)
        for layer in range(1, self.form.draft_layers):
            prefix = f"layers.{layer}."
            after = output + self._attention(prefix, self._norm(prefix + "input_layernorm", output))
            output = self._with_features(prefix, after)
        return self._norm("norm", output) if self.form.norm_output else output

    def _with_features(self, prefix: str, states: Tensor) -> Tensor:
        inner = self._norm(prefix + "post_attention_layernorm", states)
        gate, up, down = (self.tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return states + linear(silu(linear(inner, gate)) * linear(inner, up), down)

    def before_logits(self, states: Tensor) -> Tensor:
        return states if self.form.norm_output else self._norm("norm", states)

    def chain(
        self, hidden: Tensor, tokens: list[int], depth: int, sampling: Sampling, length: int
    ) -> list[int]:
        """Returns the drafted tokens after a text.

        Args:
            hidden: [num_tokens - 1, num_layers, SIZE] states of all tokens but the last.
            length: tokens of the prompt.
        """
        path: list[int] = []
        while len(path) < depth:
            path.append(int(self.best_after(hidden, tokens, path, 1, sampling, length)[0]))
        return path

    def best_after(
        self, hidden: Tensor, tokens: list[int], path: list[int], count: int, sampling: Sampling, length: int
    ) -> tuple[Tensor, Tensor]:
        """Returns the best tokens after a text and drafted tokens, and their perturbed logits: [count] each.

        The other arguments are those of ``chain``.
        """
        states, text = self.reduced(hidden), [*tokens, *path]
        if self.form.has_masks:
            mask = self.reduced(self.tensors["mask_hidden"].view(1, len(self.form.layers), SIZE))
            states = torch.cat([states, mask.expand(len(path), -1)])
            after = self.go_on(states, [*tokens[1:], *[MASK] * len(path)])
        else:
            # States of the target as far as it has read, then the head's own states.
            for end in range(len(tokens), len(text) + 1):
                after = self.go_on(states, text[1:end])
                states = torch.cat([states, after[-1:]])
        logits = torch.full((1, VOCABULARY), -torch.inf)
        known = linear(self.before_logits(after[-1:]), self.tensors["lm_head.weight"])
        logits[:, torch.arange(len(known[0])) + self.tensors.get("d2t", torch.zeros(1).long())] = known
        row = ChoiceContext(
            sampling, noise_key(1, 0, tuple(tokens[:length])), len(text), text[:length], text[length:]
        )
        scaled = logits if sampling.temperature == 0 else logits / sampling.temperature
        best, values = gumbel_max(scaled, [row], count)
        return best[0], values[0]

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        return rms_norm(rows, rows.shape[-1:], self.tensors[name + ".weight"], EPS)

    def _attention(self, prefix: str, read: Tensor) -> Tensor:
        count = len(read)

        def heads(name: str, number: int) -> Tensor:
            return linear(read, self.tensors[f"{prefix}self_attn.{name}.weight"]).view(count, number, DIM)

        if self.form.latent:
            query, key, value = self._of_latents(f"{prefix}self_attn.", read)
        else:
            query = rotated(heads("q_proj", HEADS))
            key, value = rotated(heads("k_proj", KV_HEADS)), heads("v_proj", KV_HEADS)
            key, value = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
        scores += torch.full((count, count), -torch.inf).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
        return linear(mixed, self.tensors[prefix + "self_attn.o_proj.weight"])

    def _of_latents(self, prefix: str, read: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values [num_tokens, HEADS, ...] of latent attention."""

        def product(name: str, rows: Tensor) -> Tensor:
            return linear(rows, self.tensors[f"{prefix}{name}.weight"])

        queried = self._norm(f"{prefix}q_a_layernorm", product("q_a_proj", read))
        query = product("q_b_proj", queried).unflatten(-1, (HEADS, DIM + ROTATED))
        latent, turned = product("kv_a_proj_with_mqa", read).split([self.form.latent, ROTATED], dim=-1)
        expanded = product("kv_b_proj", self._norm(f"{prefix}kv_a_layernorm", latent))
        key, value = expanded.unflatten(-1, (HEADS, 2 * DIM)).chunk(2, dim=-1)
        turned = rotated(in_halves(turned[:, None])).expand(-1, HEADS, -1)
        query = torch.cat([query[..., :DIM], rotated(in_halves(query[..., DIM:]))], dim=-1)
        return query, torch.cat([key, turned], dim=-1), value


def rotated(rows: Tensor) -> Tensor:
    """Rotates rows [num_tokens, heads, dim], each by its position."""
    dim = rows.shape[-1]
    angles = torch.outer(torch.arange(len(rows)).float(), 10000.0 ** (-torch.arange(0, dim, 2) / dim))
    cos, sin = (part.repeat(1, 2)[:, None] for part in (angles.cos(), angles.sin()))
    return rows * cos + torch.cat([-rows[..., dim // 2 :], rows[..., : dim // 2]], dim=-1) * sin


def in_halves(rows: Tensor) -> Tensor:
    """Reorders rotary pairs from DeepSeek's interleaved layout to two halves."""
    return torch.cat([rows[..., ::2], rows[..., 1::2]], dim=-1)


@cache
def target_model() -> Any:
    return load_model(DEMO / "target").float().eval()


@torch.inference_mode()
def hidden_of(tokens: list[int], layers: tuple[int, ...]) -> Tensor:
    """Returns the inputs of these layers of the target: [num_tokens, num_layers, SIZE]."""
    states = target_model()(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.stack([states[layer][0] for layer in layers], dim=1)


@cache
def reference(form: Form = Form()) -> Reference:
    """Returns a random head. Its projection is fitted to the target's texts: some guesses are correct."""
    head = Reference(form, random_tensors(form))
    inputs, outputs = [], []
    for text in written_texts():
        states = head.states(hidden_of(text, form.layers)[:-2], text[1:-1])
        inputs.append(head.before_logits(states))
        outputs += text[2:]
    rows = torch.cat(inputs)
    gram = rows.T @ rows
    gram += RIDGE * gram.diagonal().mean() * torch.eye(SIZE)
    fitted = 10.0 * torch.linalg.solve(gram, rows.T @ one_hot(torch.tensor(outputs), VOCABULARY).float()).T
    tensors = {**head.tensors, "lm_head.weight": fitted.contiguous()}
    if form.tokens < VOCABULARY:
        kept = torch.tensor(outputs).bincount(minlength=VOCABULARY).topk(form.tokens).indices.sort().values
        tensors["lm_head.weight"] = fitted[kept].contiguous()
        tensors["d2t"] = kept - torch.arange(form.tokens)
        tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, kept, True)
    return replace(head, tensors=tensors)


def check_drafts(found: list[Drafted], form: Form, temperature: float) -> None:
    """Asserts that each Draft equals the reference's Draft after the tokens that were committed then."""
    assert any(map(len, (draft for text in found for draft in text.drafts)))
    head, sampling = reference(form), Sampling(temperature=temperature)
    for kind, text in zip(KINDS, found, strict=True):
        prompt = prompt_of(kind)
        tokens = [*prompt, *text.tokens]
        hidden = hidden_of(tokens, form.layers)
        for length, draft in zip(text.lengths, text.drafts, strict=True):
            before = hidden[: length - 1], tokens[:length]
            assert list(draft.tokens) == head.chain(*before, len(draft), sampling, len(prompt))


def check_depths(found: list[Drafted], depth: int) -> None:
    """Asserts that every Draft has its full depth, or ends with the text."""
    for kind, text in zip(KINDS, found, strict=True):
        end = len(prompt_of(kind)) + TOKENS
        expected = [min(depth, end - length - 1) for length in text.lengths]
        assert [len(draft) for draft in text.drafts] == expected


LAYER = {
    "model_type": "llama",
    "hidden_size": SIZE,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": EPS,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,  # fewer than the texts have: the target's limit must apply
}


def write_eagle3(folder: Path, form: Form = Form(), kind: str = "speculators", **config: Any) -> Path:
    """Writes a checkpoint. kind: speculators, safeailab or modelopt; config: overrides of config.json."""
    folder.mkdir(exist_ok=True)
    tensors = reference(form).tensors
    options = {
        name: getattr(form, name)
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }
    layers = {"eagle_aux_hidden_state_layer_ids": list(form.layers), "draft_vocab_size": form.tokens}
    own = {**LAYER, "num_hidden_layers": form.draft_layers}
    if form.latent:
        own |= {"model_type": "deepseek_v3", "num_key_value_heads": HEADS, "kv_lora_rank": form.latent}
        own |= {"q_lora_rank": LATENT_QUERY, "qk_nope_head_dim": DIM, "qk_rope_head_dim": ROTATED}
        own["v_head_dim"] = DIM
    if kind == "speculators":
        save_file(tensors, folder / "model.safetensors")
        verifier = {"name_or_path": "somebody/outrider-demo", "architectures": ["LlamaForCausalLM"]}
        told: dict[str, Any] = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": own,
            "speculators_config": {"algorithm": "eagle3", "verifier": verifier},
            **layers,
            **options,
        }
        if form.has_masks:
            told |= {"speculators_model_type": "peagle", "mask_token_id": MASK}
    else:
        if kind == "modelopt":
            save_file(tensors, folder / "model.safetensors")
        else:
            renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
            torch.save(renamed, folder / "pytorch_model.bin")
        told = {"architectures": ["LlamaForCausalLMEagle3"], **own, "draft_vocab_size": form.tokens}
        told |= {"ptd_token_id": MASK} if form.has_masks else {}
        outputs = [layer - 1 for layer in form.layers]
        told["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": outputs, **options}
    (folder / "config.json").write_text(json.dumps({**told, **config}))
    return folder


def write_random_eagle3(
    folder: Path, model: Path, kind: str = "eagle3", layers: int = 1, **config: Any
) -> Path:
    """Writes a random head for a small target. Its guesses depend on all of its inputs.

    kind: name of the drafter; config: further fields and overrides of config.json.
    """
    folder.mkdir()
    layer: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    layer |= {"head_dim": 16, "vocab_size": VOCAB_SIZE, "rms_norm_eps": 1e-5}
    read = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    (folder / "config.json").write_text(json.dumps({**layer, **read, **config}))
    named_layers = {f"layers.{number}.unused": torch.zeros(1) for number in range(layers)}
    save_file(named_layers, folder / "model.safetensors")
    named = EngineSettings.model_validate({"model": str(model), **drafters_with(kind, folder)})
    checkpoint = HeadCheckpoint(named, kind)
    tensors = empty(checkpoint, Eagle3Shape.of(checkpoint, kind)).state_dict()
    generator = torch.Generator().manual_seed(0)
    random = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
    save_file(random, folder / "model.safetensors")
    return folder


def golden_forms() -> dict[str, Form]:
    """Returns the forms for which the speculators package has computed logits."""
    return {
        "3": Form(tokens=300, norm_before_residual=True),
        "3.1": Form(tokens=300, norm_before_fc=True, norm_output=True),
        "fc_norm": Form(tokens=300, fc_norm=True),
        "several layers": Form(tokens=300, draft_layers=3),
    }


def golden_tensors(form: Form) -> dict[str, Tensor]:
    """Returns random weights with a random vocabulary."""
    generator = torch.Generator().manual_seed(4)
    return {**random_tensors(form), **random_vocabulary(form.tokens, SIZE, generator)}


def golden_inputs(form: Form) -> tuple[Tensor, list[int]]:
    """Returns states [12, num_layers, SIZE], and the token after each state."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(12, len(form.layers), SIZE, generator=generator)
    return hidden, torch.randint(VOCABULARY, (12,), generator=generator).tolist()
