"""Drafts as programs of the device: graphs of their positions, each of which feeds what it chooses."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.settings import Sampling
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.forward.batch import Batch, paged_batch
from outrider.engine.forward.graphs import (
    MOST_BLOCKS,
    Capture,
    CapturedSizes,
    Forward,
    GraphBatch,
    Replay,
    draft_layout,
)
from outrider.engine.forward.output import ForwardOutput
from outrider.engine.inputs.choice_input import ChoiceInput
from outrider.engine.inputs.paged_input import PagedInput, fill
from outrider.engine.kernels.advance import ChainMemory, advance, begin, compile_begin
from outrider.engine.kernels.choice import choose_on_device
from outrider.pace.settings import MAX_DEPTH


class DraftChains:
    """Drafts of a step, a chain for each sequence, which the device makes without the host."""

    def __init__(self, memory: ChainMemory, replay: Replay) -> None:
        """memory: with the tokens of the first position."""
        self._memory, self._replay = memory, replay
        self.positions = 1

    def advance(self) -> None:
        """Launches the next position."""
        self._replay()
        self.positions += 1

    def sent(self) -> Tensor:
        """Begins to copy the tokens of all positions to the host; returns the memory that they reach.

        int32 [positions, rows, ranks + 1]: the best tokens, and whether a token may come from the row.
        """
        return self._memory.found[: self.positions].to("cpu", non_blocking=True)  # in pinned memory


class DraftGraphs(CapturedSizes):
    """Graphs of a position of Drafts: the pass, the choice of its tokens, and how the next position follows.

    A row is a sequence. Its token, its place in the cache and its settings lie in the memory of a graph from
    the first position of a step on.
    """

    @torch.inference_mode()
    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        cache: PagedCache,
        dtype: torch.dtype,
        device: torch.device,
        blocks: int,
        sizes: Sequence[int],
        ranks: int,
    ) -> None:
        """
        Args:
            forward, blocks, sizes: arguments of Graphs.
            ranks: best tokens that are wanted at each position.
        """
        super().__init__(capture, sizes)
        self._forward, self._ranks = forward, ranks
        self._block_size, self._spare_slot = cache.block_size, cache.spare_block * cache.block_size
        self._dtype, self._device = dtype, device
        self._blocks = min(blocks, MOST_BLOCKS)
        # Graphs of all sizes share the largest of their memory, as one runs at a time.
        self._block_table = torch.zeros(sizes[-1], self._blocks, dtype=torch.int64, device=device)
        self._every = torch.arange(sizes[-1], device=device)
        self._memories: dict[int, ChainMemory] = {}  # memories by number of rows

    def begin(self, batch: Batch, output: ForwardOutput, positions: int) -> DraftChains | None:
        """Chooses the tokens of the first position; None if no graph can go on from there.

        Args:
            batch: the first position: any number of tokens of each sequence, of which the last chooses.
            output: output of its pass.
            positions: positions for which the sequences have blocks.
        """
        size = self._size_for(len(batch.logit_rows))
        # Without a graph the block table ends with the blocks of the first position.
        if size is None or not isinstance(batch, GraphBatch) or batch.paged is None or batch.choice is None:
            return None
        choice = choose_on_device(output.logits, batch.choice, self._ranks)
        memory, places = self._memories[size], (self._block_size, self._spare_slot)
        begin(batch.paged, batch.choice, output.are_finite, choice, memory, positions, *places)
        return DraftChains(memory, self._replays[size])

    def _work(self, rows: int) -> Callable[[], None]:
        self._memories[rows] = memory = self._memory_of(rows)
        compile_begin(memory, self._block_size, self._spare_slot)
        every, paged = self._every[:rows], vars(memory.paged)
        batch = paged_batch(paged, every, self._block_size, self._dtype)

        def work() -> None:
            computed = self._forward(batch)
            choice = choose_on_device(computed.logits, memory.rows, self._ranks)
            advance(choice, computed.are_finite, memory, self._block_size)

        return work

    def _memory_of(self, rows: int) -> ChainMemory:
        """Returns memory in which all rows are padding."""
        layout = draft_layout(rows, self._blocks)
        choice = ChoiceInput.of_rows([ChoiceContext(Sampling(temperature=0.0), 0, 0, (), ())] * rows)
        places = self._block_size, self._spare_slot
        fields = fill(layout, [], *places, choice, device=self._device).sent()
        return ChainMemory(
            replace(PagedInput.of(fields), block_table=self._block_table[:rows]),
            replace(choice.at(fields), are_truncated=True),  # as some rows of a later step may be
            torch.zeros(2, rows, dtype=torch.int64, device=self._device),
            torch.zeros(MAX_DEPTH, rows, self._ranks + 1, dtype=torch.int32, device=self._device),
        )
