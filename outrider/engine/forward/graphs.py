"""Forward passes of decoding and verifying, captured at load and replayed as a whole."""

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import torch

from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.choice_input import NUMBERS_OF_ROW
from outrider.engine.forward.batch import Batch, feed_chosen, paged_batch
from outrider.engine.forward.output import ForwardOutput
from outrider.engine.forward.paged_input import FEW_QUERIES, LONGEST_PATH, NO_TAIL, Layout, fill
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.step_input import Feed, Numbers
from outrider.engine.step_timings import Path

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 513, 64))
MOST_BLOCKS = 2**14  # of a sequence: a longer one goes without a graph

Forward = Callable[[Batch], ForwardOutput]
Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]


def captured_sizes(most_rows: int) -> tuple[int, ...]:
    """Rows of the graphs for steps of at most so many, as far as there are graphs."""
    return ROWS[: bisect_left(ROWS, most_rows) + 1]


class CudaCapture:
    """Makes CUDA graphs that share their memory: one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Callable[[], None]) -> Replay:
        """Raises RuntimeError where something in it cannot be captured."""
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            work()  # libraries and kernels set themselves up, which cannot be captured
        before.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # A capture that fails leaves its stream the current one: the outer context puts it right.
        # Other threads may go on: NCCL's asks how far exchanges before have come.
        capturing = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with torch.cuda.stream(before), capturing:
            work()
        return graph.replay


@dataclass(frozen=True)
class GraphBatch(Batch):
    """A step that a graph computes, from what it copies into the graph's memory."""

    compute: Callable[[torch.Tensor | None], ForwardOutput]  # takes the tokens, as feed_chosen does

    @property
    def path(self) -> Path:
        return "graph"


class Graphs:
    """A graph for each of some numbers of rows; a step takes the next larger one, and padding fills it.

    Which sequences the rows belong to, how many each feeds, how long its context is and whether its Draft
    branches is data: graphs need no other shapes.
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
        sizes: Items[int],
        group: RankGroup | None = None,
        *,
        as_chains: bool,
    ) -> None:
        """
        Args:
            forward: a pass, without a wait for the device.
            blocks: of the longest sequence.
            sizes: numbers of rows, ascending.
            group: that this process is a rank of: all ranks capture, and replay, the same.
            as_chains: as Layout.padded has it.
        """
        self._forward = forward
        self._capture = capture
        self._spare_slot = cache.spare_block * cache.block_size
        self._block_size, self._dtype = cache.block_size, dtype
        self._blocks = min(blocks, MOST_BLOCKS)
        self._as_chains = as_chains
        # What a graph reads lives as long as the graph.
        largest = replace(self._layout(sizes[-1]), tail=NUMBERS_OF_ROW * sizes[-1])
        self._buffer = torch.empty(largest.size, dtype=torch.int64, device=device)
        self._every = torch.arange(sizes[-1], device=device)
        self._output: ForwardOutput | None = None  # of the largest, whose memory the others share
        self._graphs: dict[int, Replay] = {}  # by rows
        failures: dict[int, str] = {}  # by rows
        for rows in reversed(sizes):  # memory that the largest needs is enough for all
            try:
                self._graphs[rows] = self._captured(rows)
            except RuntimeError as error:
                failures[rows] = str(error)
            if group is not None and not group.least(rows in self._graphs) and rows in self._graphs:
                del self._graphs[rows]
                failures[rows] = "another rank cannot"
        self.slow_because = _told(failures)
        self._sizes = sorted(self._graphs)
        logger.info("%d CUDA graphs, of %s tokens", len(self._sizes), ", ".join(map(str, self._sizes)))

    def batch(self, feeds: Items[Feed], tail: Numbers = NO_TAIL) -> GraphBatch | None:
        """The step, in a graph's memory; None where there is no graph for it. tail: as PagedInput has it."""
        rows = sum(len(feed.tokens) for feed in feeds)
        size = bisect_left(self._sizes, rows)
        if size == len(self._sizes) or not all(map(self._has_room, feeds)):
            return None
        replay = self._graphs[self._sizes[size]]
        layout = replace(self._layout(self._sizes[size]), lanes=len(feeds), tail=len(tail))
        filled = fill(layout, feeds, self._block_size, self._spare_slot, tail)
        given = layout.split(self._buffer[: layout.size])
        logit_rows = given.logit_rows[: sum(feed.num_logits for feed in feeds)]
        token_ids = given.token_ids[:, :rows]
        kept = slice(rows) if len(logit_rows) == rows else logit_rows

        def compute(chosen: torch.Tensor | None) -> ForwardOutput:
            self._buffer[: layout.size].copy_(filled, non_blocking=True)
            if chosen is not None:
                feed_chosen(token_ids, chosen)
            replay()
            assert self._output is not None
            hidden = None if self._output.hidden is None else self._output.hidden[:rows]
            return ForwardOutput(self._output.logits[kept], hidden, self._output.are_finite[:rows])

        return GraphBatch(
            token_ids,
            given.position_ids[:, :rows],
            given.slots[:rows],
            logit_rows,
            [],
            self._block_size,
            self._dtype,
            given,
            compute,
        )

    def _layout(self, rows: int) -> Layout:
        return Layout.padded(rows, self._blocks, as_chains=self._as_chains)

    def _has_room(self, feed: Feed) -> bool:
        if len(feed.blocks) > self._blocks:
            return False
        if not self._as_chains:
            return len(feed.tokens) <= FEW_QUERIES
        return feed.tree is None or max(feed.tree.depths) < LONGEST_PATH

    def _captured(self, rows: int) -> Replay:
        layout = self._layout(rows)
        filled = fill(layout, [], self._block_size, self._spare_slot)
        self._buffer[: layout.size].copy_(filled, non_blocking=True)
        given = layout.split(self._buffer[: layout.size])
        batch = paged_batch(given, self._every[:rows], self._block_size, self._dtype)

        def work() -> None:
            computed = self._forward(batch)
            if self._output is None:
                self._output = computed.like()
            self._output.take(computed)

        return self._capture(work)


def _told(failures: Mapping[int, str]) -> tuple[str, ...]:
    """By rows, the largest first."""
    if not failures:
        return ()
    sizes = ", ".join(map(str, sorted(failures)))
    reason, *_ = failures.values()
    return (
        f"no CUDA graph of {sizes} tokens could be captured, so that such steps take a larger one or none:"
        f" {reason}",
    )
