"""All drafters of a target, as its forward pass, its other ranks and its memory plan use them."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from outrider.engine.cache.key_values import LayerShape
from outrider.engine.drafters.target_drafter import Target, TargetDrafter, target_drafter
from outrider.engine.parallel.drafter_step import DrafterStep
from outrider.engine.settings import EngineSettings


class TargetDrafters:
    """Drafters of a target in the order of their numbers; there may be none."""

    def __init__(self, drafters: Sequence[TargetDrafter] = ()) -> None:
        self._drafters = drafters
        # Layers of the target whose hidden states any drafter reads.
        self.hidden_layers = tuple(
            dict.fromkeys(layer for drafter in drafters for layer in drafter.hidden_layers)
        )
        self.weight_bytes = sum(drafter.weight_bytes for drafter in drafters)  # bytes at each rank

    @classmethod
    def of(cls, settings: EngineSettings) -> "TargetDrafters":
        """Returns the drafters that the settings name. Raises as ``TargetDrafter``."""
        return cls([target_drafter(settings, name) for name in settings.drafters])

    def __iter__(self) -> Iterator[TargetDrafter]:
        return iter(self._drafters)

    def __bool__(self) -> bool:
        return bool(self._drafters)

    @property
    def numbered_shapes(self) -> dict[int, LayerShape]:
        """Shapes of the drafters' cached layers. Keys are -1, -2, ..., apart from the target's layers."""
        shapes = [shape for drafter in self._drafters for shape in drafter.cache_shapes]
        return {-index: shape for index, shape in enumerate(shapes, start=1)}

    def states_of(self, drafter: TargetDrafter, hidden: Tensor) -> Tensor:
        """Returns the states that a drafter reads: [..., its layers, hidden_size].

        hidden: [..., all layers of ``hidden_layers``, hidden_size].
        """
        if drafter.hidden_layers == self.hidden_layers:
            return hidden
        return hidden[..., [self.hidden_layers.index(layer) for layer in drafter.hidden_layers], :]

    def load(self, target: Target) -> None:
        """Loads the weights of all drafters. Raises UnsupportedModelError."""
        for drafter in self._drafters:
            drafter.load(target)

    def allocate(self, num_blocks: int) -> None:
        """Allocates the caches of all drafters, with as many blocks as the target's cache."""
        for drafter in self._drafters:
            drafter.allocate(num_blocks)

    def capture(self) -> tuple[str, ...]:
        """Captures the passes of all drafters. Returns a reason for each pass that cannot be captured."""
        return tuple(f"{drafter}: {reason}" for drafter in self._drafters for reason in drafter.capture())

    def graph_bytes(self, rows: int, feeds: int, chains: int) -> int:
        """Returns the bytes that all graphs keep. Arguments: as for ``TargetDrafter.graph_bytes``."""
        return sum(drafter.graph_bytes(rows, feeds, chains) for drafter in self._drafters)

    def waiting_bytes(self) -> int:
        """Returns the bytes at rank 0 for buffered states of the target: see ``WaitingStates``."""
        return sum(drafter.waiting_bytes() for drafter in self._drafters)

    def follow(self, step: DrafterStep) -> None:
        """Computes this rank's part of a step that rank 0 sent. Raises RankLostError."""
        self._drafters[step.drafter].follow(step)
