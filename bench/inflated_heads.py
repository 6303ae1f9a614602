"""Heads of a target, for that target inflated (bench/inflate.py): the same guesses at a larger cost.

The inflated target's states are the old ones with zeros behind them. A head of it has matrices of its size:
the old ones in their first rows and columns, and zeros, which cost as much as other numbers. The layers that
it reads are those where the old ones have gone.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from bench.inflate import InflationError, Size, kv_copies, layer_slots, query_slots
from outrider.engine.drafters.eagle3_head import READ_LAYERS


def inflate_exits(source: Path, destination: Path, old: Size, new: Size) -> None:
    """Writes trained exits of a target of the size `old` for that target inflated to `new`."""
    tensors: dict[str, Tensor] = {}
    for name, weight in _tensors(source).items():
        exits, number, part, kind = name.split(".")
        larger = _norm(weight, new.hidden) if part == "norm" else _matrix(weight, new.hidden, new.hidden)
        tensors[f"{exits}.{inflated_input(int(number), old, new)}.{part}.{kind}"] = larger
    _write(destination, tensors, _config(source))


def inflate_medusa(source: Path, destination: Path, new: Size) -> None:
    """Writes Medusa heads that share the target's output projection for that target inflated to `new`."""
    tensors = {
        name: _behind(weight, new.hidden) if weight.ndim == 1 else _matrix(weight, new.hidden, new.hidden)
        for name, weight in _tensors(source).items()
    }
    _write(destination, tensors, _config(source))


def inflate_eagle3(source: Path, destination: Path, old: Size, new: Size) -> None:
    """Writes an EAGLE-3 head of a target of the size `old` for that target inflated to `new`.

    Its layer becomes one of the size of the target's layers.

    Raises:
        InflationError: it normalizes all the states that it reads together, or its layer is not of the
            shape of the target's layers.
    """
    config = _config(source)
    given = config["eagle_config"]
    if given.get("norm_before_fc"):
        raise InflationError("norm_before_fc is true; only a head without it can be inflated")
    of_layer = Size(
        config["hidden_size"],
        old.layers,
        config["intermediate_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    if of_layer != replace(old, intermediate=of_layer.intermediate):
        raise InflationError(f"its layer is {of_layer}; only one like the target's, {old}, can be inflated")
    tensors = {
        name: _norm(weight, new.hidden) if weight.ndim == 1 else _eagle3_matrix(name, weight, of_layer, new)
        for name, weight in _tensors(source).items()
    }
    larger = {
        "hidden_size": new.hidden,
        "intermediate_size": new.intermediate,
        "num_attention_heads": new.heads,
        "num_key_value_heads": new.kv_heads,
        "rms_norm_eps": config["rms_norm_eps"] * old.hidden / new.hidden,
        "eagle_config": {
            **given,
            READ_LAYERS: [inflated_input(layer + 1, old, new) - 1 for layer in given[READ_LAYERS]],
        },
    }
    _write(destination, tensors, config | larger)


def inflated_input(layer: int, old: Size, new: Size) -> int:
    """Where the state that came before that layer comes now; one more than there are layers is the end."""
    return layer_slots(old, new)[layer - 1] + 1 if layer else 0


def _eagle3_matrix(name: str, weight: Tensor, old: Size, new: Size) -> Tensor:
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part == "fc":  # reads three states side by side
        return _beside(weight, 3, new.hidden, new.hidden)
    if part in ("gate_proj", "up_proj"):
        return _matrix(weight, new.intermediate, new.hidden)
    if part == "down_proj":
        return _matrix(weight, new.hidden, new.intermediate)
    head_dim = (weight.shape[1] if part == "o_proj" else weight.shape[0]) // (
        old.kv_heads if part in ("k_proj", "v_proj") else old.heads
    )
    if part == "o_proj":
        return _at_queries(_matrix(weight.T, weight.shape[1], new.hidden), head_dim, old, new).T.contiguous()
    read = _beside(weight, 2, len(weight), new.hidden)  # the embedding and the state
    if part == "q_proj":
        return _at_queries(read, head_dim, old, new)
    heads = read.view(old.kv_heads, head_dim, -1).repeat_interleave(kv_copies(old, new), dim=0)
    return _matrix(heads.flatten(0, 1), new.kv_heads * head_dim, 2 * new.hidden)


def _at_queries(weight: Tensor, head_dim: int, old: Size, new: Size) -> Tensor:
    """Rows of the old query heads, at the new ones that share their keys and values."""
    larger = torch.zeros(new.heads, head_dim, weight.shape[1])
    larger[query_slots(old, new)] = weight.view(old.heads, head_dim, -1)
    return larger.flatten(0, 1)


def _beside(weight: Tensor, count: int, rows: int, columns: int) -> Tensor:
    """A matrix that reads so many states side by side, of `columns` numbers each."""
    return torch.cat([_matrix(part, rows, columns) for part in weight.chunk(count, dim=1)], dim=1)


def _matrix(weight: Tensor, rows: int, columns: int) -> Tensor:
    return pad(weight, (0, columns - weight.shape[1], 0, rows - weight.shape[0]))


def _behind(vector: Tensor, size: int) -> Tensor:
    return pad(vector, (0, size - len(vector)))


def _norm(weight: Tensor, size: int) -> Tensor:
    """The mean square over a longer state is smaller."""
    return _behind(weight * (len(weight) / size) ** 0.5, size)


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def _tensors(folder: Path) -> dict[str, Tensor]:
    """In float32: of bfloat16 a norm's weights would be rounded twice."""
    (file,) = folder.glob("*.safetensors")
    return {name: tensor.float() for name, tensor in load_file(file).items()}


def _write(folder: Path, tensors: dict[str, Tensor], config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
