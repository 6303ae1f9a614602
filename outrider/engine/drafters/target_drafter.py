"""Target drafters: they run in the target's process and draft with each Verdict."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from outrider.decoding.choice_context import to_device
from outrider.decoding.draft import Draft
from outrider.drafters.registry import row_of
from outrider.engine.cache.paged_cache import LayerShape, PagedCache
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.choosing.step_result import StepResult
from outrider.engine.drafters.drafter import Drafter
from outrider.engine.drafters.drafts_under_way import DraftForeseen, DraftRead, DraftsUnderWay
from outrider.engine.forward.attention import Paged
from outrider.engine.forward.batch import Batch
from outrider.engine.forward.graphs import ByRows, Graphs, RowGraphs
from outrider.engine.forward.kernel import Kernel
from outrider.engine.forward.output import ForwardOutput
from outrider.engine.inputs.block_tables import BlockTables
from outrider.engine.inputs.choice_input import ChoiceInput
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.inputs.told_tokens import told_tokens
from outrider.engine.parallel.drafter_step import DrafterStep
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.sequence import EngineSequence
from outrider.engine.settings import EngineSettings

if TYPE_CHECKING:
    from outrider.engine.forward.draft_graphs import DraftGraphs


@dataclass(frozen=True)
class CommittedStates:
    """Tokens of a sequence that a step has put into the target's cache for good."""

    sequence: EngineSequence
    start: int  # position of the first token
    hidden: Tensor  # [num_tokens, num_layers, hidden_size] of the drafter's layers
    is_wanted: bool  # whether a Draft of the drafter follows


@dataclass(frozen=True)
class Judging:
    """Sequence with a Draft that the device judges, and with the Draft that is wanted after the Verdict."""

    draft: Draft  # a chain and alternatives, which it judges
    request: DraftRequest  # its depth is the most that any Verdict leaves
    start: int  # position of the first token that the step feeds
    num_tokens: int  # fed tokens
    rows: range  # rows of the step's logits: after the last committed token, and after each node
    hidden: (
        Tensor | None
    )  # [num_tokens, num_layers, hidden_size] states of the drafter's layers; None: it reads none

    @property
    def told_tokens(self) -> list[int]:
        """Returns the Verdict's tokens as ``read_verdicts`` takes them."""
        return told_tokens(self.rows, self.draft.chain_length)

    @property
    def committed(self) -> CommittedStates:
        """Returns the states of all tokens that the step feeds."""
        assert self.hidden is not None
        return CommittedStates(self.request.engine_sequence, self.start, self.hidden, is_wanted=True)


class Target(Protocol):
    """Loaded target of a target drafter."""

    model: Any  # whole, or a rank's share
    dtype: torch.dtype  # type of the model
    device: torch.device
    group: RankGroup | None  # group of this rank; None: the model is whole
    settings: EngineSettings  # settings in force
    cache: PagedCache
    tables: BlockTables  # tables of the blocks of its cache
    kernel: Kernel | None  # kernel of attention; None: blocks are gathered

    def pass_over(self, part: Any) -> Callable[[Paged], Tensor]:
        """Returns the pass of a part of the model (forward/part.py) to logits [num_logits, vocab_size]."""

    def change_cache(self, step: StepInput) -> None:
        """Makes the step's changes of the target's cache. Raises CacheLostError."""

    def lay_out(self, step: StepInput, choice: ChoiceInput | None = None) -> Batch:
        """Returns a pass over the blocks of the target's cache. choice: its choosing rows, sent with it."""

    def are_finite(self, batch: Batch) -> Tensor:
        """Returns bool [num_tokens]: whether all numbers that ranks have cached for a token are finite."""

    def graphs_of(self, compute: Callable[[Batch], ForwardOutput]) -> Graphs:
        """Returns CUDA graphs of the passes, which all ranks capture together."""

    def draft_graphs_of(self, compute: Callable[[Batch], ForwardOutput]) -> "DraftGraphs":
        """Returns CUDA graphs of positions of chains, which all ranks capture together."""

    def row_graphs_of(self, functions: Sequence[ByRows], size: int) -> list[RowGraphs]:
        """Returns graphs from [num_rows, size] to logits [num_rows, vocab_size]; they share memory."""


class TargetDrafter(Drafter):
    """Target drafter, made before the target from its checkpoint's config, and loaded after it."""

    hidden_layers: tuple[int, ...] = ()  # layers of the target whose states it reads; -1 is the last
    cache_shapes: tuple[LayerShape, ...] = ()  # shapes of its own cached layers, at each rank
    weight_bytes = 0  # bytes of its own weights, at each rank
    # Best tokens, best first, at each position of each newest Draft's chain.
    top_tokens: Sequence[Sequence[tuple[int, ...]]] = ()
    # Probability that each node of each newest Draft is accepted if its parent is; empty: not known.
    promises: Sequence[Sequence[float]] = ()
    makes_chains = False  # whether the device makes its chains: not before its graphs are captured
    no_drafts_because = ""  # set once its Drafts are known never to pay

    def __init__(self, settings: EngineSettings, name: str) -> None:
        """
        Args:
            settings: settings of the target.
            name: name of the drafter in these settings.

        Raises:
            UnsupportedModelError: it does not suit this target.
        """
        self.info = row_of(name)
        self.number = [*settings.drafters].index(name)  # place among the drafters of the target
        checkpoint = settings.drafters[name].checkpoint
        self._from = "" if checkpoint is None else f".checkpoint={checkpoint!r}"

    def __str__(self) -> str:
        return f"drafters.{self.info.name}{self._from}"

    def steps(self, depth: int) -> float:
        """Returns the number of drafter steps for a Draft of this depth."""
        return self.info.steps_per_draft + depth * self.info.steps_per_token or 1.0

    @abstractmethod
    def load(self, target: Target) -> None:
        """Loads the weights onto the target's device, in its type. Raises UnsupportedModelError."""

    def follow(self, step: DrafterStep) -> None:
        """Computes a rank's part of a step that rank 0 sent. Raises RankLostError."""
        raise NotImplementedError  # a drafter that computes at rank 0 alone sends no step

    def allocate(self, num_blocks: int) -> None:
        """Allocates its cache: a block for each block of the target, and a block for padding."""

    def capture(self) -> tuple[str, ...]:
        """Captures passes, once there is a cache. Returns why some passes cannot be captured."""
        return ()

    def graph_bytes(self, rows: int, feeds: int, chains: int) -> int:
        """Returns the bytes that its graphs keep for up to ``rows`` rows.

        Args:
            feeds: bytes of the inputs of graphs of passes over the cache.
            chains: bytes that graphs of positions of chains keep.
        """
        return 0

    def waiting_bytes(self) -> int:
        """Returns the bytes at rank 0 for states of the target that wait until it takes them in."""
        return 0

    def take_in(self, committed: Sequence[CommittedStates]) -> None:
        """Takes in the tokens that a step committed; called after every step if it has ``cache_shapes``."""

    def clear(self, sequence: EngineSequence) -> None:
        """Clears what a Draft after the sequence has left in a cache, as it is not finite."""

    def begin_drafts(self, judging: Sequence[Judging], result: StepResult[Tensor]) -> DraftsUnderWay | None:
        """Begins Drafts on the device before the host knows the Verdicts; returns None if it cannot.

        result: result of the step's choice of tokens, on the device.
        """
        return None

    def read(self, foreseen: DraftForeseen, request: DraftRequest) -> DraftRead:
        """Returns a Draft that was begun, as it was asked for."""
        return foreseen.read(request)

    def keep(self, sequence: EngineSequence) -> None:
        """Keeps what it has cached of a sequence's Verdict: its Draft was begun there, and follows it."""

    def is_of_host(self, request: DraftRequest) -> bool:
        """Whether the host of a GPU chooses the tokens of this Draft, position by position."""
        return False

    def watch(self, sequences: Sequence[EngineSequence]) -> None:
        """Learns from the sequences of a step; called after every step."""


def last_state(request: DraftRequest) -> Tensor:
    """Returns the target's state with which the newest token was chosen: [hidden_size]."""
    assert request.hidden is not None
    return request.hidden[0]


def rows_at(rows: Tensor, places: list[int]) -> Tensor:
    """Returns a copy of these rows, without waiting for the device."""
    return rows[to_device(torch.tensor(places, dtype=torch.int64), rows.device)]


def feed_of(sequence: EngineSequence, tokens: list[int], start: int, num_logits: int = 0) -> Feed:
    """Returns the feed of a sequence's tokens, or of drafted tokens after them, at a position."""
    blocks, adapter, state = sequence.blocks, sequence.adapter.number, sequence.state
    return Feed(tokens, num_logits, start, blocks, None, adapter, state, sequence.cached)


def target_drafter(settings: EngineSettings, name: str) -> TargetDrafter:
    """Returns the target drafter with that name in the settings. Raises as ``TargetDrafter``."""
    made: TargetDrafter = row_of(name).load()(settings, name)
    return made
