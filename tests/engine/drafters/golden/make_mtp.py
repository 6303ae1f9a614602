"""Writes mtp.safetensors: the logits that published implementations compute, for test_mtp_golden.py.

Of the form of Qwen those of the speculators package (0.9.0, without the packages that it names for other
things, and transformers 5.19, in an environment of their own); of the others those of the MtpModel of
transformers 5.23, which has no Qwen, and with several layers of transformers 5.24. From the root of the
repository, in either environment:

    PYTHONPATH=. python -m tests.engine.drafters.golden.make_mtp

Each keeps what the other has written.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.mtp import (
    KINDS,
    LAYERS,
    SEVERAL,
    golden_inputs,
    published,
    published_layers,
    reference,
    write_target,
)

FILE = Path(__file__).with_name("mtp.safetensors")
OF_SPECULATORS = "qwen3"
OF_SEVERAL = ("deepseek_v3", "glm4_moe")  # kinds of which several layers are computed

Passes = Callable[[Tensor, Tensor], Tensor]  # states before each token, and tokens, to states after


@torch.inference_mode()
def main() -> None:
    logits = load_file(FILE) if FILE.exists() else {}
    if find_spec("speculators"):
        logits |= _both(OF_SPECULATORS, _of_speculators())
    else:
        for kind in KINDS:
            if kind != OF_SPECULATORS:
                with TemporaryDirectory() as folder:
                    logits |= _both(kind, _of_transformers(write_target(Path(folder), kind)))
        for kind in OF_SEVERAL:
            with TemporaryDirectory() as folder:
                logits |= _of_several(kind, write_target(Path(folder), kind, published_layers(kind)))
    save_file(dict(sorted(logits.items())), FILE)
    print({name: tuple(tensor.shape) for name, tensor in logits.items()})


def _both(kind: str, passes: Passes) -> dict[str, Tensor]:
    """Logits after each token, and after the last one where the layer goes on from its own state."""
    hidden, tokens = golden_inputs()
    given = torch.tensor([tokens])
    first = passes(hidden[None], given)
    second = passes(torch.cat([hidden[None, :-1], first[:, -2:-1]], dim=1), given)
    head = reference(kind).model.lm_head
    return {f"{kind}.first": head(first[0]).contiguous(), f"{kind}.second": head(second[0, -1]).contiguous()}


def _of_speculators() -> Passes:
    package = import_module("speculators.models.mtp")
    converter = import_module("speculators.convert.mtp").MTPConverter()
    config = import_module("copy").deepcopy(reference(OF_SPECULATORS).model.config)
    layer = package.MTPDraftModel(package.MTPSpeculatorConfig(transformer_layer_config=config)).float().eval()
    tensors = converter._fuse_moe_experts(published(OF_SPECULATORS))
    named = {converter._remap_key(name): tensor for name, tensor in tensors.items()}
    found = layer.load_state_dict(named, strict=False)
    assert not found.unexpected_keys, found
    assert not [name for name in found.missing_keys if name.startswith("mtp_layers")], found
    model = reference(OF_SPECULATORS).model

    def passes(states: Tensor, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])[None]
        mask = torch.full((1, 1, places.shape[1], places.shape[1]), -torch.inf).triu(1)
        result: Tensor = layer.mtp_layers[0](
            hidden_states=states,
            token_embeddings=model.get_input_embeddings()(tokens),
            attention_mask=mask,
            position_ids=places,
            position_embeddings=layer.rotary_emb(states, places),
        )
        return result

    return passes


@torch.inference_mode()
def _of_several(kind: str, folder: Path) -> dict[str, Tensor]:
    """Logits of each of several layers, each after the likeliest tokens of the layers before it."""
    layers = _mtp_model(folder, SEVERAL).float().eval()
    cache = import_module("transformers.cache_utils").MtpCache(config=layers.config)
    hidden, tokens = golden_inputs()
    places = torch.arange(1, 1 + len(tokens))[None]
    _, logits, _ = layers(torch.tensor([tokens]), hidden[None], None, places, cache)
    return {f"{kind}.several": logits[0].contiguous()}


def _of_transformers(folder: Path) -> Passes:
    layer = _mtp_model(folder, 1).float().eval()

    def passes(states: Tensor, tokens: Tensor) -> Tensor:
        cache = import_module("transformers.cache_utils").MtpCache(config=layer.config)
        places = torch.arange(1, 1 + tokens.shape[1])[None]  # each token's own
        result: Tensor = layer.forward_layer(0, states, places, cache, input_ids=tokens)
        return result

    return passes


def _mtp_model(folder: Path, count: int) -> Any:
    """Returns the MtpModel of a checkpoint's first layers."""
    library: Any = import_module("transformers")
    model = library.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    # It names the layer of the published sizes alone, and counts on the config to tell of it.
    model._keys_to_ignore_on_load_unexpected = [
        *(rf"model\.layers\.{LAYERS + number}\." for number in range(count)),
        r"^mtp\.",
    ]
    model.config.num_mtp_layers = count
    if getattr(model.config, "mlp_layer_types", None):
        model.config.mtp_mlp_layer_types = ["sparse"] * count
    return import_module("transformers.modeling_layers").MtpModel.from_pretrained(model)


if __name__ == "__main__":
    main()
