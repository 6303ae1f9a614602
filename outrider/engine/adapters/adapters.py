"""Adapters of a loaded target, whole or as a rank's share."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from outrider.engine.adapters.adapted_linear import AdaptedLinear, KernelRoom, PassUnderWay
from outrider.engine.adapters.checkpoint import AdapterCheckpoint, LowRank, may_change
from outrider.engine.blame import says_broken
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.batch import AdapterRows
from outrider.engine.forward.linear import Projection
from outrider.engine.parallel.adapter_change import AdapterChange
from outrider.engine.parallel.layers import RowParallelLinear
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.sequence import NO_ADAPTER, SequenceAdapter
from outrider.engine.work import AskedAdapter

logger = logging.getLogger(__name__)


class Adapters:
    """Adapters by number; the numbers agree at all ranks.

    Adapters of the settings have the numbers from 1 on, and are never dropped. Further adapters are loaded
    and dropped between two steps.
    """

    def __init__(
        self, sources: Mapping[str, str], ranks: int = 1, folder: str | None = None, max_rank: int = 0
    ) -> None:
        """Reads configs and shapes, before any weight is read.

        Args:
            sources: folder or hub id of each adapter of the settings, by its name.
            ranks: number of processes that share the model.
            folder: folder of further adapters; None: no further adapter can be loaded.
            max_rank: largest LoRA rank of a further adapter.

        Raises:
            UnsupportedModelError: an adapter cannot be used.
        """
        self._checkpoints = [AdapterCheckpoint(*named) for named in sources.items()]
        self._rank, self._ranks = 0, ranks
        self.folder, self._max_rank = folder, max_rank
        self._by_name: dict[str, SequenceAdapter] = {}
        self._under_way = PassUnderWay()

    @property
    def num_weights(self) -> int:
        """Upper bound on the number of weights of all adapters of the settings."""
        return sum(checkpoint.num_weights for checkpoint in self._checkpoints)

    def find(self, name: str) -> SequenceAdapter:
        """Returns the adapter of the settings with that name; the empty name stands for no adapter.

        Raises:
            ValueError: there is no such adapter.
        """
        if not name:
            return NO_ADAPTER
        if (found := self._by_name.get(name)) is None:
            known = ", ".join(map(repr, self._by_name)) or "none"
            raise ValueError(f"adapter={name!r} is not there: there are {known}")
        return found

    def apply_to(self, rows: AdapterRows) -> None:
        """Sets which rows of the next pass have which adapters."""
        self._under_way.rows = rows

    def load(self, model: Any, rank: int, most: int) -> None:
        """Loads the weights and replaces the layers that they change, in place.

        Args:
            model: whole model, or a rank's share; its layers may have been packed and joined.
            rank: rank of this process in its group; 0 without a group.
            most: adapters at a time that a GPU kernel computes; 0: no kernel computes them.

        Raises:
            UnsupportedModelError: an adapter does not fit the model.
        """
        if not self._checkpoints and self.folder is None:
            return
        self._rank, self._model = rank, model
        ranks = [checkpoint.rank for checkpoint in self._checkpoints]
        highest = max([*ranks, 0 if self.folder is None else self._max_rank])
        room = KernelRoom(most, highest) if most else None
        self._layers = _adapted_layers(model, self._under_way, room)
        if room is not None and self.folder is not None:  # an adapter of any layer may follow
            for place in self._layers.values():
                place.layer.make_table(model.device)
        for number, checkpoint in enumerate(self._checkpoints, 1):
            self._take(number, self._changes_of(checkpoint))
            self._by_name[checkpoint.name] = SequenceAdapter(number, checkpoint.digest)

    def read(self, asked: AskedAdapter) -> AdapterCheckpoint:
        """Returns the checkpoint of an adapter that a request names.

        Raises:
            UnsupportedModelError: it cannot be used, or its files have changed.
        """
        if self.folder is None:  # a request could otherwise name any path
            raise UnsupportedModelError(
                f"adapters.{asked.name}={asked.path!r}: target.adapter_folder is not set"
            )
        checkpoint = AdapterCheckpoint(asked.name, asked.path, self.folder)
        if checkpoint.rank > self._max_rank:
            raise checkpoint.refusal(
                f"r={checkpoint.rank}, at most target.max_adapter_rank={self._max_rank} is accepted"
            )
        if asked.digest not in (b"", checkpoint.digest):
            raise checkpoint.refusal("its files are not those that were loaded first")
        return checkpoint

    def add(self, number: int, read: Callable[[], AdapterCheckpoint], group: RankGroup | None = None) -> None:
        """Loads an adapter under a new number. All ranks call it between the same two steps.

        Raises:
            UnsupportedModelError: it cannot be used here or at another rank; then no rank keeps it.
        """
        changes: dict[AdaptedLinear, dict[int, LowRank]] = {}
        refusal: Exception | None = None
        try:
            changes = self._changes_of(read())
        except Exception as error:  # any error: the other ranks wait for this rank's vote
            refusal = error
        if group is not None and not group.least(refusal is None) and refusal is None:
            refusal = UnsupportedModelError("another rank of the target refuses it: its log says why")
        if refusal is not None:
            raise refusal
        self._take(number, changes)

    def drop(self, number: int) -> None:
        """Frees the adapter with that number."""
        for layer in {place.layer for place in self._layers.values()}:
            layer.drop(number)

    def follow(self, change: AdapterChange, group: RankGroup) -> None:
        """Applies a change at a rank other than 0. Raises only if the process is broken."""
        if change.asked is None:
            self.drop(change.number)
            return
        try:
            self.add(change.number, partial(self.read, change.asked), group)
        except Exception as error:
            if says_broken(error):
                raise
            logger.error("this rank has not loaded adapter %r: %s", change.asked.name, error)

    def _changes_of(self, checkpoint: AdapterCheckpoint) -> dict[AdaptedLinear, dict[int, LowRank]]:
        """Returns the changes of each layer by projection. Raises UnsupportedModelError."""
        found: dict[AdaptedLinear, dict[int, LowRank]] = {}
        for name, change in checkpoint.changes().items():
            if (place := self._layers.get(name)) is None:
                model = type(self._model).__name__
                raise checkpoint.refusal(f"it changes {name}, which {model} does not have")
            share = self._share_of(change, place)
            expected = (place.width, place.layer.in_features)
            if (shape := (len(share.expand), share.shrink.shape[1])) != expected:
                raise checkpoint.refusal(
                    f"its change of {name} is {[*shape]} and must be {[*expected]} for this model"
                )
            found.setdefault(place.layer, {})[place.projection] = share
        return found

    def _take(self, number: int, changes: dict[AdaptedLinear, dict[int, LowRank]]) -> None:
        for layer, of_layer in changes.items():
            layer.take(number, of_layer, self._model.dtype, self._model.device)

    def _share_of(self, change: LowRank, place: "_LayerPlace") -> LowRank:
        """Returns the part of a change that this rank's share of the layer needs.

        A rank holds some outputs of a layer, or some inputs. If ranks outnumber the key/value heads, several
        ranks hold the same heads.
        """
        shrink, expand = change.shrink, change.expand
        if place.is_by_inputs:
            return LowRank(_part(shrink, 1, place.layer.in_features, self._rank, self._ranks), expand)
        return LowRank(shrink, _part(expand, 0, place.width, self._rank, self._ranks))


@dataclass(frozen=True)
class _LayerPlace:
    """Location of a layer of transformers' model in the adapted layer that computes it."""

    layer: AdaptedLinear
    projection: int  # index among the joined projections
    width: int  # output features at this rank
    is_by_inputs: bool  # whether ranks divide its inputs instead of its outputs


def _adapted_layers(
    model: nn.Module, under_way: PassUnderWay, room: KernelRoom | None
) -> Mapping[str, _LayerPlace]:
    """Replaces all layers that an adapter may change; returns their places by transformers' names."""
    places: dict[str, _LayerPlace] = {}
    joined: dict[int, AdaptedLinear] = {}  # key: id of the shared product
    for name, module in [*model.named_modules()]:
        if not may_change(name):
            continue
        if isinstance(module, Projection):
            shared = module.shared
            if id(shared) not in joined:
                joined[id(shared)] = AdaptedLinear(shared.product, shared.widths, under_way, room)
                shared.product = joined[id(shared)]
            places[name] = _LayerPlace(joined[id(shared)], module.index, shared.widths[module.index], False)
        elif isinstance(module, RowParallelLinear):
            adapted = AdaptedLinear(module.linear, [int(module.linear.out_features)], under_way, room)
            module.linear = adapted  # type: ignore[assignment]
            places[name] = _LayerPlace(adapted, 0, adapted.out_features, True)
        elif hasattr(module, "in_features"):
            adapted = AdaptedLinear(module, [int(module.out_features)], under_way, room)
            model.set_submodule(name, adapted)
            places[name] = _LayerPlace(adapted, 0, adapted.out_features, False)
    return places


def _part(weight: torch.Tensor, dim: int, width: int, rank: int, ranks: int) -> torch.Tensor:
    """Returns a rank's part of a dimension; the whole weight if that part does not have ``width``.

    The caller refuses such a weight. The last part may be smaller than the other parts.
    """
    whole = weight.shape[dim]
    copies = max(1, min(ranks, width * ranks // whole))  # ranks that hold the same part
    usual = -(-whole // (ranks // copies))
    first = rank // copies * usual
    return weight.narrow(dim, first, width) if width == min(usual, whole - first) else weight
