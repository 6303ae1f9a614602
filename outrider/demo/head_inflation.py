"""Inflation of heads: for the larger target they make the same guesses as for the small demo target.

The larger target's states are the small target's states padded with zeros, after the layers that hold the old
layers. So a head computes the same if its input columns are padded with zeros. The weights of a norm over
padded states are scaled as in the norms of the target.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoConfig

from outrider.demo.inflation import Size, layer_slots, size_of

Tensors = dict[str, Tensor]
Config = dict[str, Any]
READ_LAYERS = "eagle_aux_hidden_state_layer_ids"  # layers of the target, counted by their outputs


def inflate_heads(source: Path, destination: Path, old_target: Path, target: Path) -> None:
    """Converts the heads in `source`, made for `old_target`, to the larger `target`, and writes them."""
    old, new = (size_of(AutoConfig.from_pretrained(folder)) for folder in (old_target, target))
    embedding = load_file(old_target / "model.safetensors")["model.embed_tokens.weight"]
    for name, inflated in INFLATED.items():
        (file,) = (source / name).glob("*.safetensors")
        config = json.loads((source / name / "config.json").read_text())
        tensors, changes = inflated(load_file(file), config, embedding, old, new)
        folder = destination / name
        folder.mkdir()
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / file.name)
        (folder / "config.json").write_text(json.dumps({**config, **changes}, indent=2))
        shutil.copyfile(source / name / "README.md", folder / "README.md")


def _eagle3(
    tensors: Tensors, config: Mapping[str, Any], embedding: Tensor, old: Size, new: Size
) -> tuple[Tensors, Config]:
    """Returns the head with its own width, and with copies of the embeddings that it shared with its target.

    The head's norms over the target's states keep their eps. Over padded states it has the effect of 4e-5
    instead of 1e-5 in the demo target, which is small beside mean squares of several hundred.
    """
    wide = {name: _norm(tensor, new) for name, tensor in tensors.items() if name.startswith("fc_norm.")}
    eagle, slots = dict(config["eagle_config"]), layer_slots(old, new)
    eagle[READ_LAYERS] = [slots[layer] for layer in eagle[READ_LAYERS]]
    return {**tensors, **wide, **_of_own_width(tensors, embedding, old, new)}, {"eagle_config": eagle}


def _dflash(
    tensors: Tensors, config: Mapping[str, Any], embedding: Tensor, old: Size, new: Size
) -> tuple[Tensors, Config]:
    """Returns the draft with its own width, and with copies of the embeddings that it shared."""
    slots = layer_slots(old, new)
    layers = [slots[layer] for layer in config["target_layer_ids"]]
    changes = {"target_layer_ids": layers, "num_target_layers": new.layers}
    return {**tensors, **_of_own_width(tensors, embedding, old, new)}, changes


def _of_own_width(tensors: Tensors, embedding: Tensor, old: Size, new: Size) -> Tensors:
    """Returns the weights by which a head of its own width reads the larger target's states and tokens."""
    fc = tensors["fc.weight"]
    of_layers = fc.view(len(fc), -1, old.hidden)
    return {
        "fc.weight": pad(of_layers, (0, new.hidden - old.hidden)).flatten(1),
        "embed_tokens.weight": embedding,
        "lm_head.weight": embedding.clone(),
    }


def _medusa(
    tensors: Tensors, _config: Mapping[str, Any], _embedding: Tensor, old: Size, new: Size
) -> tuple[Tensors, Config]:
    more = new.hidden - old.hidden
    return {name: pad(tensor, (0, more) * tensor.dim()) for name, tensor in tensors.items()}, {}


def _early_exit(
    tensors: Tensors, _config: Mapping[str, Any], _embedding: Tensor, old: Size, new: Size
) -> tuple[Tensors, Config]:
    more, slots, wide = new.hidden - old.hidden, layer_slots(old, new), {}
    for name, tensor in tensors.items():
        exits, number, part = name.split(".", 2)
        padded = _norm(tensor, new) if tensor.dim() == 1 else pad(tensor, (0, more, 0, more))
        wide[f"{exits}.{slots[int(number) - 1] + 1}.{part}"] = padded
    return wide, {"hidden_size": new.hidden}


def _norm(weight: Tensor, new: Size) -> Tensor:
    """Returns the weights of a norm over padded states: [old.hidden] -> [new.hidden]."""
    scaled = weight.float() * (len(weight) / new.hidden) ** 0.5
    return pad(scaled, (0, new.hidden - len(weight))).to(weight.dtype)


INFLATED = {"eagle3": _eagle3, "dflash": _dflash, "medusa": _medusa, "early_exit": _early_exit}
