"""CUDA graphs of forward passes for decoding and verification, captured at load."""

import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from outrider.decoding.outcomes import RANKS, RANKS_OF_CHAINS
from outrider.engine.forward.batch import Batch, paged_batch
from outrider.engine.forward.output import ForwardOutput
from outrider.engine.inputs.block_tables import BlockTables
from outrider.engine.inputs.choice_input import ChoiceInput, fields_of_choice
from outrider.engine.inputs.paged_input import FEW_QUERIES, PagedInput, PagedLayout, fill
from outrider.engine.inputs.step_buffer import Field, StepBuffer, buffer_size
from outrider.engine.inputs.step_input import NOTHING_FED, Feed, StepInput
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.settings import EngineSettings
from outrider.engine.step_timings import Path
from outrider.learning.lru import Lru
from outrider.pace.settings import MAX_DEPTH

logger = logging.getLogger(__name__)

# Rows of graphs. From 64 rows on at most a fifth of them is padding.
CAPTURED_SIZES = (
    *(1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32)),
    *(*range(256, 512, 64), *range(512, 1024, 128), *range(1024, 2305, 256)),
)
LEAST_CHUNK = 64  # rows of the smallest graph for steps that include prompts
MOST_DRAFTED = 512  # rows of the graphs of target drafters, at most
MOST_CHUNK_LOGITS = 512  # rows of logits of a step that includes prompts, at most
# New blocks of a step, 128 KB: more than a prompt of 131,072 tokens has. A step with more has no graph.
MOST_NEW_BLOCKS = 2**14
KEPT_VIEWS = 256  # shapes of steps whose views of a graph's memory are cached

Forward = Callable[[Batch], ForwardOutput]
Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]


def captured_sizes(settings: EngineSettings) -> tuple[int, ...]:
    """Returns the rows of the graphs, ascending: up to a step of all sequences, or the largest graph."""
    return CAPTURED_SIZES[: bisect_left(CAPTURED_SIZES, settings.max_sequences * (1 + MAX_DEPTH)) + 1]


def drafting_sizes(settings: EngineSettings) -> tuple[int, ...]:
    """Returns the rows of the graphs of target drafters, ascending."""
    sizes = captured_sizes(settings)
    return sizes[: bisect_left(sizes, MOST_DRAFTED) + 1]


def chunk_sizes(settings: EngineSettings, chunk: int) -> tuple[int, ...]:
    """Returns the rows of the graphs for steps that include prompts, ascending.

    chunk: prompt tokens in a step.
    """
    sizes = [size for size in CAPTURED_SIZES if size >= LEAST_CHUNK]
    return (*sizes[: bisect_left(sizes, chunk + settings.max_sequences) + 1],)


def chunk_logits(settings: EngineSettings) -> int:
    """Returns the largest number of rows of logits of a step that includes prompts."""
    return min(settings.max_sequences * (1 + MAX_DEPTH), MOST_CHUNK_LOGITS)


def layout_of(
    rows: int, sequences: int, *, as_chains: bool, logits: int | None = None, adapters: int = 0
) -> PagedLayout:
    """Returns the layout of a graph's input.

    Args:
        sequences: sequences of a step, at most.
        as_chains: argument of PagedLayout.padded.
        logits: rows of logits, at most, of a step that includes prompts; None: steps include no prompts.
        adapters: adapters that rows may have; 0: rows have none.
    """
    layout = PagedLayout.padded(rows, as_chains=as_chains).with_adapters(adapters)
    layout = replace(layout, lanes=min(rows, sequences), new_blocks=MOST_NEW_BLOCKS)
    return layout if logits is None else layout.with_prompts(min(rows, logits))


def feed_bytes(layout: PagedLayout) -> int:
    """Returns the bytes of a step's input, including the choice of a token for each row of logits."""
    return buffer_size(layout.fields | fields_of_choice(layout.logits))


def sizes_of_drafts(settings: EngineSettings) -> tuple[int, ...]:
    """Returns the rows of the graphs for positions of Drafts, ascending; a row is a sequence."""
    sizes = CAPTURED_SIZES if settings.is_draft else drafting_sizes(settings)
    return sizes[: bisect_left(sizes, settings.max_sequences) + 1]


def ranks_of_drafts(settings: EngineSettings) -> int:
    """Returns the number of best tokens per position of Drafts; target drafters' graphs make only chains."""
    return RANKS if settings.is_draft else RANKS_OF_CHAINS


def draft_layout(rows: int) -> PagedLayout:
    """Returns the layout of a position of Drafts; its new blocks came with the first position."""
    return replace(PagedLayout.padded(rows, as_chains=False), lanes=0)


def draft_bytes(settings: EngineSettings) -> int:
    """Returns the bytes of memory that the graphs of positions of Drafts hold."""
    sizes = sizes_of_drafts(settings)
    kept = Field((sizes[-1],)).size
    for rows in sizes:
        fields = draft_layout(rows).fields | fields_of_choice(rows, draft_numbers=0)
        found = Field((MAX_DEPTH, rows, ranks_of_drafts(settings) + 1), "int32")
        kept += buffer_size(fields) + Field((2, rows)).size + found.size
    return kept


class CudaCapture:
    """Captures CUDA graphs that share their memory, so only a single graph may run at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Callable[[], None]) -> Replay:
        """Captures a function. Raises RuntimeError if an operation in it cannot be captured."""
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            work()  # warm-up, because the set-up of libraries and kernels cannot be captured
        before.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # A failed capture leaves its stream current, and the outer context restores the previous stream.
        # Other threads may call CUDA meanwhile: NCCL's watchdog polls the state of collectives.
        capturing = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with torch.cuda.stream(before), capturing:
            work()
        return graph.replay


@dataclass(frozen=True)
class GraphBatch(Batch):
    """Step that a graph computes from input that is copied into the graph's memory."""

    send: Callable[[], None]  # copies its input to the graph's memory
    compute: Callable[[], ForwardOutput]  # replays the graph

    @property
    def path(self) -> Path:
        return "graph"


@dataclass(frozen=True)
class _Views:
    """Views of a step's fields in a graph's memory; making them takes longer than a step of few sequences."""

    fields: Mapping[str, torch.Tensor]
    paged: PagedInput[torch.Tensor]
    token_ids: torch.Tensor  # from here on without rows of padding, as in a Batch
    position_ids: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor


@dataclass
class GraphMemory:
    """Memory of graphs of which only one runs at a time."""

    buffer: torch.Tensor  # uint8, input of any of the graphs
    output: ForwardOutput | None = None  # output of the largest graph; all graphs share its memory


class CapturedSizes(ABC):
    """Graphs by number of rows; work on fewer rows uses the next larger graph."""

    def __init__(self, capture: Capture, sizes: Sequence[int], group: RankGroup | None = None) -> None:
        """
        Args:
            sizes: numbers of rows to capture, ascending.
            group: group of this process: all ranks capture and replay the same graphs.
        """
        self._capture = capture
        self._group = group
        self._left = [*sizes]
        self._replays: dict[int, Replay] = {}  # replays by number of rows, ascending
        self._failures: dict[int, str] = {}  # reasons by number of rows

    @abstractmethod
    def _work(self, rows: int) -> Callable[[], None]:
        """Returns the function to capture for a number of rows. Its memory lives as long as the graph."""

    def capture(self) -> tuple[str, ...]:
        """Captures all sizes. Returns why work of some sizes is slower than it could be."""
        while self._left:
            self.capture_next()
        return self.slow_because

    @torch.inference_mode()
    def capture_next(self) -> None:
        """Captures the largest remaining size: its memory is enough for all smaller sizes."""
        rows = self._left.pop()
        try:
            replays = {rows: self._capture(self._work(rows))}
        except RuntimeError as error:
            replays = {}
            self._failures[rows] = str(error)
        if self._group is not None and not self._group.least(bool(replays)) and replays:
            replays = {}
            self._failures[rows] = "another rank cannot"
        self._replays = replays | self._replays
        if not self._left:
            captured = ", ".join(map(str, self._replays))
            logger.info("%d CUDA graphs, of %s tokens", len(self._replays), captured)

    @property
    def is_complete(self) -> bool:
        """Whether all sizes are captured; until then work might use a graph of far more rows."""
        return not self._left

    @property
    def slow_because(self) -> tuple[str, ...]:
        """Returns a sentence if some sizes could not be captured."""
        return _reasons(self._failures)

    def _size_for(self, rows: int) -> int | None:
        """Returns the rows of the graph for this number of rows; None: there is no graph."""
        if self.is_complete:
            for size in self._replays:
                if size >= rows:
                    return size
        return None


class Graphs(CapturedSizes):
    """Graphs of passes over the paged cache; their unused rows are padding.

    The sequences of the rows, the lengths of their contexts and the branches of their Drafts are data. So
    graphs differ in their number of rows alone.
    """

    @torch.inference_mode()
    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        tables: BlockTables,
        dtype: torch.dtype,
        sequences: int,
        sizes: Sequence[int],
        group: RankGroup | None = None,
        *,
        as_chains: bool,
        logits: int | None = None,
        adapters: int = 0,
        beside: "Graphs | None" = None,
    ) -> None:
        """
        Args:
            forward: computes a pass without waiting for the device.
            tables: tables of the blocks of the cache.
            sequences, as_chains, logits, adapters: arguments of layout_of.
            sizes, group: arguments of CapturedSizes.
            beside: graphs of no less input and output, whose memory these use too; None: memory of their own.
        """
        super().__init__(capture, sizes, group)
        self._forward = forward
        self._tables, self._dtype = tables, dtype
        self._layouts = {
            rows: layout_of(rows, sequences, as_chains=as_chains, logits=logits, adapters=adapters)
            for rows in sizes
        }
        if beside is None:
            size = feed_bytes(self._layouts[sizes[-1]])
            self._memory = GraphMemory(torch.empty(size, dtype=torch.uint8, device=tables.device))
        else:
            self._memory = beside._memory
        self._views = Lru[tuple[object, ...], _Views](KEPT_VIEWS)

    def batch(self, step: StepInput, choice: ChoiceInput | None = None) -> GraphBatch | None:
        """Returns the step in a graph's memory; None if no graph fits the step. choice: argument of fill."""
        feeds, counts = step.feeds, [len(feed.tokens) for feed in step.feeds]
        rows, num_logits = sum(counts), sum([feed.num_logits for feed in feeds])
        size = self._size_for(rows)
        if size is None:
            return None
        layout = self._layouts[size]
        if num_logits > layout.logits or not _has_room(layout, feeds, counts):
            return None
        replay = self._replays[size]
        layout = replace(layout, new_blocks=len(step.new_blocks))
        filled = fill(layout, step, self._tables, choice)
        # The last of batch-invariant passes has the choice of all passes, and new blocks may be many.
        memory = self._memory
        if filled.size > len(memory.buffer):
            return None
        of_choice = None if choice is None else (choice.integers.shape[1], len(choice.drafts))
        shape = size, layout.new_blocks, rows, num_logits, of_choice
        views = self._views.get(shape, lambda: self._views_of(filled, rows, num_logits))

        def send() -> None:
            filled.send_to(memory.buffer)

        def compute() -> ForwardOutput:
            replay()
            output = memory.output
            assert output is not None
            hidden = None if output.hidden is None else output.hidden[:rows]
            return ForwardOutput(
                output.logits[:num_logits], hidden, output.are_finite[:rows], output.experts_read
            )

        return GraphBatch(
            views.token_ids,
            views.position_ids,
            views.slots,
            views.logit_rows,
            [],
            self._tables.block_size,
            self._dtype,
            views.paged,
            None if choice is None else choice.at(views.fields),
            send,
            compute,
        )

    def _views_of(self, filled: StepBuffer, rows: int, num_logits: int) -> _Views:
        """Returns the views of a step with this number of rows, and of rows of logits."""
        fields = filled.at(self._memory.buffer)
        paged = PagedInput.of(fields, self._tables.on_device)
        of_rows = paged.token_ids[:, :rows], paged.position_ids[:, :rows], paged.slots[:rows]
        return _Views(fields, paged, *of_rows, paged.logit_rows[:num_logits])

    def _work(self, rows: int) -> Callable[[], None]:
        filled = fill(self._layouts[rows], NOTHING_FED, self._tables)
        memory = self._memory
        filled.send_to(memory.buffer)
        given = PagedInput.of(filled.at(memory.buffer), self._tables.on_device)
        batch = paged_batch(given, given.logit_rows, self._tables.block_size, self._dtype)

        def work() -> None:
            computed = self._forward(batch)
            if memory.output is None:
                memory.output = computed.like()
            memory.output.take(computed)

        return work


def _has_room(layout: PagedLayout, feeds: Sequence[Feed], counts: Sequence[int]) -> bool:
    """Whether the sequences of a step fit into a graph's layout. counts: tokens of each sequence."""
    if layout.path_length:
        return max([feed.tree.depth for feed in feeds if feed.tree], default=0) <= layout.path_length
    return layout.many_tiles > 0 or max(counts) <= FEW_QUERIES


def _reasons(failures: Mapping[int, str]) -> tuple[str, ...]:
    """Returns a sentence on the sizes that could not be captured; empty if all were captured."""
    if not failures:
        return ()
    sizes = ", ".join(map(str, sorted(failures)))
    reason, *_ = failures.values()
    return (
        f"no CUDA graph of {sizes} tokens could be captured, so that such steps take a larger one or none:"
        f" {reason}",
    )
