"""CUDA graphs of functions of independent rows."""

from collections.abc import Callable, Sequence

import torch

from outrider.engine.forward.graphs import Capture, CapturedSizes
from outrider.engine.parallel.rank_group import RankGroup

ByRows = Callable[[torch.Tensor], torch.Tensor]  # [num_rows, ...] to [num_rows, ...], each row independently


class RowGraphs(CapturedSizes):
    """Graphs of a function of independent rows, such as logits of states. They may share memory."""

    def __init__(
        self,
        function: ByRows,
        capture: Capture,
        taken: torch.Tensor,
        given: torch.Tensor,
        sizes: Sequence[int],
        group: RankGroup | None = None,
    ) -> None:
        """
        Args:
            taken: memory for the input of the function, with the rows of the largest graph.
            given: memory for the output of the function, with the columns that are read.
            sizes, group: arguments of CapturedSizes.
        """
        super().__init__(capture, sizes, group)
        self._function = function
        self.taken, self._given = taken, given

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the function's result, valid until the memory is used again."""
        size = self._size_for(len(rows))
        if size is None:
            return self._function(rows)
        self.taken[: len(rows)].copy_(rows)
        self._replays[size]()
        return self._given[: len(rows)]

    def _work(self, rows: int) -> Callable[[], None]:
        def work() -> None:
            computed = self._function(self.taken[:rows])
            self._given[:rows].copy_(computed[:, : self._given.shape[1]])

        return work
