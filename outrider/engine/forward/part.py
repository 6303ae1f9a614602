"""Part of a model: some of its layers, with its embedding and output projection. Weights are shared."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.attention import Probe


def part_of(model: Any, layers: Sequence[int], norm: nn.Module | None = None) -> Any:
    """Returns a model that runs these layers alone; the given model is unchanged.

    A layer keeps its index, so that it uses the cache of this layer in the whole model.

    Args:
        layers: indices from 0, ascending.
        norm: module for the last layer's states [num_tokens, hidden_size], in place of the model's own norm.

    Raises:
        UnsupportedModelError: the model does not run its layers in the order of a list.
    """
    path = _path_of_layers(model)
    part = parent = _shallow(model)
    count = model.config.get_text_config().num_hidden_layers
    for name in path[:-1]:
        _shorten(parent, layers, count)
        child = _shallow(parent._modules[name])
        parent._modules[name] = child
        parent = child
    _shorten(parent, layers, count)
    every = parent._modules[path[-1]]
    parent._modules[path[-1]] = nn.ModuleList([every[layer] for layer in layers])
    if norm is not None:
        parent._modules[_name_of_norm(model)] = norm
    _check_layers(part, layers)
    return part


def layers_of(model: Any) -> nn.ModuleList:
    """Returns the layers in order. Raises UnsupportedModelError if the model has no list of them."""
    layers: nn.ModuleList = model.get_submodule(".".join(_path_of_layers(model)))
    return layers


def _path_of_layers(model: Any) -> list[str]:
    """Returns the path to the list of layers, as names of modules."""
    count = model.config.get_text_config().num_hidden_layers
    path: str
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            indices = [{getattr(part, "layer_idx", None) for part in layer.modules()} for layer in module]
            if all(index in found for index, found in enumerate(indices)):
                return path.split(".")
    raise UnsupportedModelError(f"{type(model).__name__} has no list of its {count} layers")


def last_norm_of(model: Any) -> nn.Module:
    """Returns the norm after the last layer. Raises UnsupportedModelError if it is ambiguous or missing."""
    norm: nn.Module = _parent_of_layers(model).get_submodule(_name_of_norm(model))
    return norm


def _parent_of_layers(model: Any) -> nn.Module:
    parent: nn.Module = model.get_submodule(".".join(_path_of_layers(model)[:-1]))
    return parent


def _name_of_norm(model: Any) -> str:
    shape = (model.config.get_text_config().hidden_size,)
    names = [
        name
        for name, child in _parent_of_layers(model).named_children()
        if isinstance(weight := getattr(child, "weight", None), torch.Tensor) and weight.shape == shape
    ]
    if len(names) != 1:
        raise UnsupportedModelError(f"{type(model).__name__} has {len(names)} norms beside its layers, not 1")
    return names[0]


def _shallow(module: Any) -> Any:
    """Returns a copy of the module whose children can be replaced."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied


def _shorten(module: Any, layers: Sequence[int], count: int) -> None:
    """Restricts the config of a module to these layers, if the config has ``count`` layers."""
    config = getattr(module, "config", None)
    if config is None or getattr(config, "num_hidden_layers", None) != count:
        return
    module.config = shortened = copy.copy(config)
    shortened.num_hidden_layers = len(layers)
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == count:
            setattr(shortened, name, [value[layer] for layer in layers])


def _check_layers(part: Any, layers: Sequence[int]) -> None:
    probe, token = Probe(), torch.zeros(1, 1, dtype=torch.int64, device=part.device)
    with torch.inference_mode():
        part(input_ids=token, position_ids=token, use_cache=False, outrider=probe)
    if [*probe.shapes] != [*layers]:
        raise UnsupportedModelError(
            f"{type(part).__name__} passes through layers {[*probe.shapes]} where {[*layers]} are wanted"
        )
