"""Adapters of a loaded target, by the names under which requests choose them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outrider.engine.adapters.adapted_linear import AdaptedLinear, PassUnderWay
from outrider.engine.adapters.checkpoint import ADAPTED, AdapterCheckpoint, LowRank
from outrider.engine.forward.batch import AdapterRows
from outrider.engine.forward.linear import Projection
from outrider.engine.parallel.layers import RowParallelLinear
from outrider.engine.sequence import NO_ADAPTER, SequenceAdapter


class Adapters:
    """Adapters by name. All ranks give them the same numbers: from 1 on, in the order of the settings."""

    def __init__(self, sources: Mapping[str, str], ranks: int = 1) -> None:
        """Reads configs and shapes, before any weight is read.

        Args:
            sources: folder or hub id of each adapter, by its name.
            ranks: number of processes that share the model.

        Raises:
            UnsupportedModelError: an adapter cannot be used.
        """
        self._checkpoints = [AdapterCheckpoint(*named) for named in sources.items()]
        self._rank, self._ranks = 0, ranks
        self._by_name: dict[str, SequenceAdapter] = {}
        self._under_way = PassUnderWay()

    @property
    def num_weights(self) -> int:
        """Numbers in the weights of all adapters, at most."""
        return sum(checkpoint.num_weights for checkpoint in self._checkpoints)

    def find(self, name: str) -> SequenceAdapter:
        """Returns the adapter with that name; the empty name stands for none. Raises ValueError."""
        if not name:
            return NO_ADAPTER
        if (found := self._by_name.get(name)) is None:
            known = ", ".join(map(repr, self._by_name)) or "none"
            raise ValueError(f"adapter={name!r} is not there: there are {known}")
        return found

    def apply_to(self, rows: AdapterRows) -> None:
        """Says which rows of the next pass have which adapters."""
        self._under_way.rows = rows

    def load(self, model: Any, rank: int) -> None:
        """Loads the weights and replaces the layers that they change, in place.

        Args:
            model: whole, or a rank's share; its layers may have been packed and joined.
            rank: number of this process in its group; 0: it is alone.

        Raises:
            UnsupportedModelError: an adapter does not fit the model.
        """
        if not self._checkpoints:
            return
        self._rank = rank
        layers = _adapted_layers(model, self._under_way)
        for number, checkpoint in enumerate(self._checkpoints, 1):
            found: dict[AdaptedLinear, dict[int, LowRank]] = {}
            for name, change in checkpoint.changes().items():
                if (place := layers.get(name)) is None:
                    raise checkpoint.refusal(f"it changes {name}, which {type(model).__name__} does not have")
                share = self._share_of(change, place)
                expected = (place.width, place.layer.in_features)
                if (shape := (len(share.expand), share.shrink.shape[1])) != expected:
                    raise checkpoint.refusal(
                        f"its change of {name} is {[*shape]} and must be {[*expected]} for this model"
                    )
                found.setdefault(place.layer, {})[place.projection] = share
            for layer, changes in found.items():
                layer.take(number, changes, model.dtype, model.device)
            self._by_name[checkpoint.name] = SequenceAdapter(number, checkpoint.digest)

    def _share_of(self, change: LowRank, place: "_LayerPlace") -> LowRank:
        """Returns the part of a change that this rank's share of the layer needs.

        A rank has some outputs of a layer, or some inputs. Several ranks may hold the same heads of keys and
        values, if ranks outnumber heads.
        """
        shrink, expand = change.shrink, change.expand
        if place.is_by_inputs:
            return LowRank(_part(shrink, 1, place.layer.in_features, self._rank, self._ranks), expand)
        return LowRank(shrink, _part(expand, 0, place.width, self._rank, self._ranks))


@dataclass(frozen=True)
class _LayerPlace:
    """Place of a layer of transformers' model in the layers that are computed."""

    layer: AdaptedLinear
    projection: int  # number among the joined projections
    width: int  # output features here
    is_by_inputs: bool  # ranks share its inputs, not its outputs


def _adapted_layers(model: nn.Module, under_way: PassUnderWay) -> Mapping[str, _LayerPlace]:
    """Replaces all layers that an adapter may change; returns their places by transformers' names."""
    places: dict[str, _LayerPlace] = {}
    joined: dict[int, AdaptedLinear] = {}  # key: id of the shared product
    for name, module in [*model.named_modules()]:
        if name.rpartition(".")[2] not in ADAPTED or ".experts." in name:
            continue
        if isinstance(module, Projection):
            shared = module.shared
            if id(shared) not in joined:
                joined[id(shared)] = AdaptedLinear(shared.product, shared.widths, under_way)
                shared.product = joined[id(shared)]
            places[name] = _LayerPlace(joined[id(shared)], module.index, shared.widths[module.index], False)
        elif isinstance(module, RowParallelLinear):
            adapted = AdaptedLinear(module.linear, [int(module.linear.out_features)], under_way)
            module.linear = adapted  # type: ignore[assignment]
            places[name] = _LayerPlace(adapted, 0, adapted.out_features, True)
        elif hasattr(module, "in_features"):
            adapted = AdaptedLinear(module, [int(module.out_features)], under_way)
            model.set_submodule(name, adapted)
            places[name] = _LayerPlace(adapted, 0, adapted.out_features, False)
    return places


def _part(weight: torch.Tensor, dim: int, width: int, rank: int, ranks: int) -> torch.Tensor:
    """Returns a rank's part of a dimension; all of it if the parts of ranks that have ``width`` are not it.

    The last rank may have less than the others.
    """
    whole = weight.shape[dim]
    copies = max(1, min(ranks, width * ranks // whole))  # ranks that hold the same part
    usual = -(-whole // (ranks // copies))
    first = rank // copies * usual
    return weight.narrow(dim, first, width) if width == min(usual, whole - first) else weight
