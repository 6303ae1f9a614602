"""Writes blocks.safetensors and blocks.json, for test_blocks_golden.py.

The logits that the speculators package computes for DFlash and DSpark drafts and for a P-EAGLE head, and the
configs that it writes for them. With speculators 0.9.0, without the packages that it names for other things,
and transformers 5.24 in an environment of their own, from the root of the repository:

    PYTHONPATH=. python -m tests.engine.drafters.golden.make_blocks
"""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support import dflash, eagle3
from tests.support.eagle3 import target_model

LOGITS = Path(__file__).with_name("blocks.safetensors")
CONFIGS = LOGITS.with_suffix(".json")


def verifier(algorithm: str) -> Any:
    """Returns the part of a config that names the target."""
    package = import_module("speculators")
    proposal = import_module("speculators.proposals.greedy").GreedyTokenProposalConfig(speculative_tokens=5)
    return package.SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[proposal],
        default_proposal_method="greedy",
        verifier=package.VerifierConfig(
            name_or_path="somebody/outrider-demo", architectures=["LlamaForCausalLM"]
        ),
    )


def loaded(head: Any, tensors: dict[str, Tensor]) -> Any:
    """Returns the package's head with these weights, and the target's embedding."""
    given = {**tensors, "embed_tokens.weight": target_model().get_input_embeddings().weight}
    unexpected = head.load_state_dict(given, strict=False).unexpected_keys
    assert not unexpected, unexpected
    return head.float().eval()


def block(form: dflash.Form) -> tuple[Tensor, Any]:
    """Returns logits [num_guesses, tokens] of a block in a text, and its config."""
    kind = "dspark" if form.markov else "dflash"
    package = import_module(f"speculators.models.{kind}")
    layers = import_module("transformers").Qwen3Config(
        **dflash.SIZES, vocab_size=eagle3.VOCABULARY, attn_implementation="eager"
    )
    of_markov = {"markov_rank": form.markov, "markov_head_type": form.head}
    of_kind = "DSpark" if form.markov else "DFlash"
    config = getattr(package, f"{of_kind}SpeculatorConfig")(
        transformer_layer_config=layers,
        draft_vocab_size=form.tokens,
        block_size=dflash.BLOCK,
        aux_hidden_state_layer_ids=list(form.inputs),
        mask_token_id=dflash.MASK,
        sample_from_anchor=form.is_shifted,
        speculators_config=verifier(kind),
        **of_markov if form.markov else {},
    )
    tensors = dflash.golden_tensors(form)
    if form.markov:
        tensors["confidence_head.proj.bias"] = torch.zeros(1)
    head = loaded(getattr(package, f"{of_kind}DraftModel")(config), tensors)
    hidden, tokens = dflash.golden_inputs(form)
    ids, anchor = torch.tensor([tokens]), dflash.GOLDEN_ANCHOR
    mask = torch.zeros(1, len(tokens))
    mask[0, anchor] = 1
    flat = hidden.flatten(1)[None]
    last = hidden.new_zeros(1, len(tokens), dflash.SIZE)
    states, logits, *_ = head._backbone_forward(flat, ids, mask, last, torch.zeros_like(ids), max_anchors=1)
    if form.markov:
        before = ids[:, anchor : anchor + dflash.BLOCK]
        logits = logits + head.markov_head.block_bias(prev_token_ids=before, hidden_states=states)
    return logits[0, -form.guesses :].contiguous(), config.to_dict()


def chain_of_masks(form: eagle3.Form) -> tuple[Tensor, Any]:
    """Returns logits [num_guesses, tokens] of a P-EAGLE head, the newest slot's first, and its config."""
    package, core = (import_module(f"speculators.models.peagle{part}") for part in ("", ".core"))
    layers = import_module("transformers").LlamaConfig(
        **{**eagle3.LAYER, "num_hidden_layers": form.draft_layers}, attn_implementation="eager"
    )
    config = package.PEagleSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=form.tokens,
        eagle_aux_hidden_state_layer_ids=list(form.layers),
        mask_token_id=eagle3.MASK,
        speculators_config=verifier("peagle"),
    )
    head = loaded(package.PEagleDraftModel(config), eagle3.golden_tensors(form))
    hidden, tokens = eagle3.golden_inputs(form)
    count, newest, later = len(tokens), eagle3.GOLDEN_NEWEST, eagle3.GOLDEN_GUESSES - 1
    # One chain of masks after the newest slot, in the place of chains that are drawn at random.
    anchors = torch.tensor([*range(count), *[newest] * later])
    depths = torch.tensor([0] * count + [*range(1, later + 1)])
    core.generate_cod_sample_indices = lambda **_: (anchors, depths)  # type: ignore[attr-defined]
    core.compute_metrics = lambda **_: (None, {})  # type: ignore[attr-defined]
    seen: list[Tensor] = []
    head.lm_head.register_forward_hook(lambda module, given, output: seen.append(output[0]))
    ids = torch.tensor([tokens])
    last = hidden.new_zeros(1, count, eagle3.SIZE)
    head(hidden.flatten(1)[None], ids, torch.zeros_like(ids), verifier_last_hidden_states=last)
    return torch.cat([seen[0][newest : newest + 1], seen[0][count:]]), config.to_dict()


@torch.inference_mode()
def main() -> None:
    found = {name: block(form) for name, form in dflash.golden_forms().items()}
    found["P-EAGLE"] = chain_of_masks(eagle3.P_EAGLE)
    save_file({name: logits for name, (logits, _) in found.items()}, LOGITS)
    configs = {name: config for name, (_, config) in found.items()}
    CONFIGS.write_text(json.dumps(configs, indent=1, sort_keys=True, default=str) + "\n")
    print({name: tuple(logits.shape) for name, (logits, _) in found.items()})


if __name__ == "__main__":
    main()
