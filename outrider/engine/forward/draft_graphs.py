"""Drafting on the device: CUDA graphs of positions, each of which feeds its chosen tokens into the next."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.engine.forward.batch import Batch, paged_batch
from outrider.engine.forward.graphs import (
    Capture,
    CapturedSizes,
    Forward,
    Replay,
    draft_layout,
)
from outrider.engine.forward.output import ForwardOutput
from outrider.engine.inputs.block_tables import BlockTables
from outrider.engine.inputs.choice_input import ChoiceInput, PackedRows
from outrider.engine.inputs.paged_input import PagedInput, fill
from outrider.engine.inputs.step_input import NOTHING_FED, Feed
from outrider.engine.kernels.advance import ChainMemory, advance, begin, compile_begin
from outrider.engine.kernels.choice import DeviceChoice, choose_on_device
from outrider.engine.parallel.rank_group import RankGroup
from outrider.pace.settings import MAX_DEPTH


class DraftChains:
    """Drafts of a step, a chain for each sequence, made on the device without the host."""

    def __init__(self, memory: ChainMemory, replay: Replay) -> None:
        """memory: memory that holds the tokens of the first position."""
        self._memory, self._replay = memory, replay
        self.positions = 1

    def advance(self) -> None:
        """Launches the next position."""
        self._replay()
        self.positions += 1

    @property
    def found(self) -> Tensor:
        """Tokens of all positions, on the device; valid until other chains begin.

        int32 [positions, rows, ranks + 1]: the best tokens, and whether the row's numbers are finite.
        """
        return self._memory.found[: self.positions]


class DraftGraphs(CapturedSizes):
    """CUDA graphs of a position of Drafts: forward pass, choice of tokens, and input of the next position.

    A row is a sequence. From the first position of a step on, its token, its place in the cache and its
    settings are in the memory of a graph.
    """

    @torch.inference_mode()
    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        tables: BlockTables,
        dtype: torch.dtype,
        sizes: Sequence[int],
        ranks: int,
        group: RankGroup | None = None,
    ) -> None:
        """
        Args:
            forward, tables, sizes, group: arguments of Graphs. Rank 0 chooses.
            ranks: number of best tokens per position.
        """
        super().__init__(capture, sizes, group)
        self._forward, self.ranks = forward, ranks
        self._tables, self._dtype = tables, dtype
        self._every = torch.arange(sizes[-1], device=tables.device)
        self._memories: dict[int, ChainMemory] = {}  # memories by number of rows

    def fits(self, feeds: Sequence[Feed]) -> bool:
        """Whether a graph can continue after a first position with these feeds."""
        return self._size_for(len(feeds)) is not None

    def begin(self, batch: Batch, are_finite: Tensor, choice: DeviceChoice) -> DraftChains:
        """Begins chains with the tokens of the first position.

        Args:
            batch: first position: any number of tokens of each sequence, after the last of which a token is
                chosen. It fits a graph, and was sent to the device with the rows that choose tokens.
            are_finite: bool [num_tokens] output of its pass.
            choice: chosen tokens, ``ranks`` for each sequence.
        """
        assert batch.paged is not None
        assert batch.choice is not None
        size = self._size_for(len(batch.logit_rows))
        assert size is not None
        memory, places = self._memories[size], (self._tables.block_size, self._tables.spare_slot)
        begin(batch.paged, batch.choice, are_finite, choice, memory, *places)
        return DraftChains(memory, self._replays[size])

    def drafted(self, batch: Batch, output: ForwardOutput, positions: int) -> Tensor:
        """Chooses the tokens of ``positions`` positions; returns ``DraftChains.found``.

        Args:
            batch: argument of ``begin``.
            output: output of its pass.
        """
        assert batch.choice is not None
        chains = self.begin(batch, output.are_finite, self._choose(output.logits, batch.choice))
        return self._advanced(chains, positions)

    def after(self, batch: Batch, top_tokens: Tensor, positions: int) -> Tensor:
        """Drafts after tokens that are chosen already; returns ``DraftChains.found``, which begins with them.

        Args:
            batch: argument of ``begin``.
            top_tokens: int32 [num_sequences, ranks], the chosen token first.
            positions: positions of the longest chain, including the chosen token.
        """
        flags = torch.ones(batch.num_tokens, dtype=torch.bool, device=self._tables.device)
        choice = DeviceChoice(top_tokens, top_tokens[:0], flags, flags[:0])
        return self._advanced(self.begin(batch, flags, choice), positions)

    @staticmethod
    def _advanced(chains: DraftChains, positions: int) -> Tensor:
        for _ in range(1, positions):
            chains.advance()
        return chains.found

    def _work(self, rows: int) -> Callable[[], None]:
        self._memories[rows] = memory = self._memory_of(rows)
        compile_begin(memory, self._tables.block_size, self._tables.spare_slot)
        batch = paged_batch(memory.paged, self._every[:rows], self._tables.block_size, self._dtype)

        def work() -> None:
            computed = self._forward(batch)
            choice = self._choose(computed.logits, memory.rows)
            advance(choice, computed.are_finite, memory, self._tables.block_size, self._tables.spare_slot)

        return work

    def _choose(self, logits: Tensor, rows: PackedRows) -> DeviceChoice:
        """Chooses tokens at rank 0, whose device broadcasts them to the other ranks."""
        count = rows.integers.shape[1]
        if self._group is None or self._group.rank == 0:
            choice = choose_on_device(logits, rows, self.ranks)
        else:
            device = self._tables.device
            top_tokens = torch.empty(count, self.ranks, dtype=torch.int32, device=device)
            are_valid = torch.ones(count, dtype=torch.bool, device=device)  # rank 0 alone reads these flags
            choice = DeviceChoice(top_tokens, top_tokens[:0], are_valid, are_valid[:0])
        if self._group is not None:
            self._group.spread(choice.top_tokens)
        return choice

    def _memory_of(self, rows: int) -> ChainMemory:
        """Returns memory in which all rows are padding."""
        choice = ChoiceInput.without_choice([0] * rows)
        device = self._tables.device
        fields = fill(draft_layout(rows), NOTHING_FED, self._tables, choice).sent()
        return ChainMemory(
            PagedInput.of(fields, self._tables.on_device),
            replace(choice.at(fields), are_truncated=True),  # rows of later steps may be truncated
            torch.ones(2, rows, dtype=torch.int64, device=device),  # padding has no positions left to choose
            torch.zeros(MAX_DEPTH, rows, self.ranks + 1, dtype=torch.int32, device=device),
        )
