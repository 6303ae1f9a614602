"""Recurrent layers by the class of transformers' module."""

from collections.abc import Callable, Mapping
from typing import Any

from outrider.engine.forward import delta_net, mamba2
from outrider.engine.forward.recurrent_layer import RecurrentLayer, keeps_states

_LAYERS: Mapping[str, Callable[[Any], RecurrentLayer]] = {
    **dict.fromkeys(delta_net.KINDS, delta_net.DeltaNet),
    **dict.fromkeys(mamba2.KINDS, mamba2.Mamba2),
}


def use_recurrent_layers(model: Any) -> bool:
    """Replaces transformers' recurrent layers by ours, in place; returns whether the model has any."""
    for parent in [*model.modules()]:
        for name, module in [*parent.named_children()]:
            made = _LAYERS.get(type(module).__name__)
            if made is not None and not isinstance(parent, RecurrentLayer):
                setattr(parent, name, made(module))
    return keeps_states(model)
