"""Search for the part of a target that drafts best: its first layers, or all but some layers."""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from outrider.engine.drafters.trial import TrialResult
from outrider.engine.forward.part import layers_of
from outrider.engine.loading.text_part import served_config
from outrider.engine.settings import EngineSettings
from outrider.pace.acceptance import expected_tokens
from outrider.pace.settings import MAX_DEPTH

Layers = tuple[int, ...]

POSITIONS = 192  # positions of each candidate that are judged
LEAST_GAIN = 1.05  # least estimated speed of the best candidate, as a multiple of plain decoding
EIGHTHS = (1, 2, 3, 4, 5, 6)  # eighths of the layers that a candidate keeps
EVERY = (2, 3)  # a candidate leaves out every second or third inner layer


def candidates(count: int) -> list[Layers]:
    """Returns the parts of a model with ``count`` layers: each has from 1 to ``count - 1`` layers."""
    exits = [max(1, round(count * eighths / 8)) for eighths in EIGHTHS]
    parts = [tuple(range(leaves_after)) for leaves_after in exits]
    for every in EVERY:
        skipped = range(1, count - 1, every)
        parts.append(tuple(layer for layer in range(count) if layer not in skipped))
    return [part for part in dict.fromkeys(parts) if len(part) < count]


def costs(settings: EngineSettings, parts: Sequence[Layers]) -> dict[Layers, float]:
    """Returns the cost of a step of each part, in steps of the target, estimated by the weights read."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(served_config(settings.model))
    sizes = [_weights(layer) for layer in layers_of(model)]
    head = _weights(model.get_output_embeddings())
    whole = sum(sizes) + head
    return {part: (sum(sizes[layer] for layer in part) + head) / whole for part in parts}


def promised(acceptance_rate: float, cost: float) -> float:
    """Returns the speedup over plain decoding at the best depth, if drafted tokens slow no target step."""
    return max(
        expected_tokens(acceptance_rate, depth) / (1 + depth * cost) for depth in range(1, MAX_DEPTH + 1)
    )


class ExitSearch:
    """Judges all candidates at equal numbers of positions, and finds the largest estimated speedup."""

    def __init__(self, costs: dict[Layers, float]) -> None:
        """costs: cost of a step of each candidate, in steps of the target."""
        self._costs = costs
        self._agreed = dict.fromkeys(costs, 0)
        self._positions = dict.fromkeys(costs, 0)

    @property
    def next(self) -> Layers:
        """Candidate to be judged next: it has the fewest judged positions."""
        return min(self._positions, key=self._positions.__getitem__)

    def observe(self, layers: Layers, judged: TrialResult) -> None:
        """Adds the result of a trial."""
        self._agreed[layers] += judged.agreed
        self._positions[layers] += judged.positions

    @property
    def is_over(self) -> bool:
        return min(self._positions.values()) >= POSITIONS

    @property
    def best(self) -> Layers | None:
        """Best candidate; None: its estimated speedup is below LEAST_GAIN."""
        promises = {layers: self._promise(layers) for layers in self._costs}
        best = max(promises, key=promises.__getitem__)
        return best if promises[best] >= LEAST_GAIN else None

    def __str__(self) -> str:
        return ", ".join(
            f"{_name(layers)}: {self._agreed[layers] / max(self._positions[layers], 1):.2f} correct,"
            f" {self._promise(layers):.2f} times plain decoding"
            for layers in self._costs
        )

    def _promise(self, layers: Layers) -> float:
        rate = self._agreed[layers] / max(self._positions[layers], 1)
        return promised(rate, self._costs[layers])


def _name(layers: Layers) -> str:
    left_out = [str(layer) for layer in range(layers[-1]) if layer not in layers]
    return f"without layers {' '.join(left_out)}" if left_out else f"the first {len(layers)} layers"


def _weights(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
