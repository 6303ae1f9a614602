"""Captured forward passes for the shapes of decoding and verifying, replayed as a whole."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.engine.forward.batch import Batch
from outrider.engine.forward.varlen import Ragged

logger = logging.getLogger(__name__)

Computed = tuple[torch.Tensor, torch.Tensor | None]  # logits, and hidden states where they were asked for
Forward = Callable[[Batch], Computed]
Captured = tuple[Callable[[], None], Computed]  # what replays, and where its output lies
Capture = Callable[[Callable[[], Computed]], Captured]

MOST_QUERIES = 17  # tokens per sequence: the deepest Draft and the token before it
MOST_CAPTURED_TOKENS = 8192  # of all graphs together: each keeps the memory of a step of its size
WARM_UPS = 3


def capture_cuda(forward: Callable[[], Computed]) -> Captured:
    """A CUDA graph of it. Raises RuntimeError where something in it cannot be captured."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = forward()
    return graph.replay, output


@dataclass(frozen=True)
class _Shape:
    """What one graph is for."""

    sequences: int
    queries: int  # of each sequence
    blocks: int  # of each row of the block table

    @property
    def tokens(self) -> int:
        return self.sequences * self.queries


class Graphs:
    """Graphs by shape, captured when a shape first comes.

    The numbers of sequences and of blocks per sequence are padded to powers of two; the padding reads and
    writes ``spare_block``. Once the graphs are of ``MOST_CAPTURED_TOKENS`` together, no other is captured.
    """

    def __init__(self, forward: Forward, capture: Capture, block_size: int, spare_block: int) -> None:
        self._forward = forward
        self._capture = capture
        self._block_size = block_size
        self._spare_block = spare_block
        self._captured: dict[_Shape, tuple[Batch, Captured] | None] = {}  # None: it cannot be
        self._captured_tokens = 0

    def run(self, batch: Batch) -> Computed | None:
        """Of its ``logit_rows``; None for a batch that no graph is made for."""
        if batch.ragged is None:
            return None
        sequences = len(batch.spans)
        queries = batch.spans[0].count
        if queries > MOST_QUERIES or any(span.count != queries for span in batch.spans):
            return None
        shape = _Shape(_padded(sequences), queries, _padded(batch.ragged.block_table.shape[1]))
        if shape not in self._captured:
            if self._captured_tokens + shape.tokens > MOST_CAPTURED_TOKENS:
                return None
            self._captured_tokens += shape.tokens
            self._captured[shape] = self._graph(shape, batch)
        captured = self._captured[shape]
        if captured is None:
            return None
        static, (replay, (logits, hidden)) = captured
        self._fill(static, batch)
        replay()
        return logits[batch.logit_rows], None if hidden is None else hidden[batch.logit_rows]

    def _graph(self, shape: _Shape, batch: Batch) -> tuple[Batch, Captured] | None:
        static = self._empty(shape, batch)
        self._fill(static, batch)
        try:
            return static, self._capture(lambda: self._forward(static))
        except RuntimeError as error:
            logger.warning(
                "steps of %d sequences with %d tokens each go without a CUDA graph, slower: it could not be "
                "captured: %s",
                shape.sequences,
                shape.queries,
                error,
            )
            return None

    def _empty(self, shape: _Shape, like: Batch) -> Batch:
        """A batch of padding alone."""
        tokens, device = shape.tokens, like.token_ids.device

        def zeros(*sizes: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*sizes, dtype=dtype, device=device)

        starts = torch.arange(0, tokens + 1, shape.queries, dtype=torch.int32, device=device)
        ragged = Ragged(
            starts,
            zeros(shape.sequences, dtype=torch.int32),
            zeros(shape.sequences, shape.blocks, dtype=torch.int32),
            shape.queries,
            shape.blocks * self._block_size,
        )
        return Batch(
            zeros(1, tokens),
            zeros(1, tokens),
            zeros(tokens),
            torch.arange(tokens, device=device),
            [],
            self._block_size,
            like.dtype,
            ragged,
        )

    def _fill(self, static: Batch, batch: Batch) -> None:
        assert batch.ragged is not None
        assert static.ragged is not None
        assert isinstance(static.slots, torch.Tensor)
        tokens, sequences = batch.num_tokens, len(batch.spans)
        slots = batch.slots
        if isinstance(slots, slice):
            slots = torch.arange(slots.start, slots.stop, device=static.slots.device)
        static.token_ids.zero_()[:, :tokens] = batch.token_ids
        static.position_ids.zero_()[:, :tokens] = batch.position_ids
        static.slots.fill_(self._spare_block * self._block_size)[:tokens] = slots
        static.ragged.lengths.fill_(1)[:sequences] = batch.ragged.lengths
        table = batch.ragged.block_table
        static.ragged.block_table.fill_(self._spare_block)[:sequences, : table.shape[1]] = table


def _padded(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
