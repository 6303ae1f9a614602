"""Writes eagle3.safetensors: the logits that the speculators package computes, for test_eagle3_golden.py.

With speculators 0.9.0, without the packages that it names for other things, and transformers 5.24 in an
environment of their own, from the root of the repository:

    PYTHONPATH=. python -m tests.engine.drafters.golden.make_eagle3
"""

from importlib import import_module
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.eagle3 import LAYER, golden_forms, golden_inputs, golden_tensors, target_model

FILE = Path(__file__).with_name("eagle3.safetensors")


@torch.inference_mode()
def main() -> None:
    package = import_module("speculators.models.eagle3")
    config_of_layer = import_module("transformers").LlamaConfig
    logits: dict[str, torch.Tensor] = {}
    for name, form in golden_forms().items():
        config = package.Eagle3SpeculatorConfig(
            transformer_layer_config=config_of_layer(
                **{**LAYER, "num_hidden_layers": form.draft_layers}, attn_implementation="eager"
            ),
            draft_vocab_size=form.tokens,
            norm_before_residual=form.norm_before_residual,
            norm_before_fc=form.norm_before_fc,
            fc_norm=form.fc_norm,
            norm_output=form.norm_output,
            eagle_aux_hidden_state_layer_ids=list(form.layers),
        )
        head = package.Eagle3DraftModel(config).float().eval()
        embedding = target_model().get_input_embeddings().weight
        given = {**golden_tensors(form), "embed_tokens.weight": embedding}
        unexpected = head.load_state_dict(given, strict=False).unexpected_keys
        assert not unexpected, unexpected
        seen: list[torch.Tensor] = []
        head.lm_head.register_forward_hook(lambda module, given, output, seen=seen: seen.append(output[0]))
        hidden, tokens = golden_inputs(form)
        ids = torch.tensor([tokens])
        head(hidden.flatten(1)[None], ids, torch.zeros_like(ids), ttt_steps=2)
        first, second = seen
        # In its second step position i is fed the token after those of the first: the last one has none.
        logits |= {f"{name}.first": first.contiguous(), f"{name}.second": second[-2].contiguous()}
    save_file(logits, FILE)
    print({name: tuple(tensor.shape) for name, tensor in logits.items()})


if __name__ == "__main__":
    main()
