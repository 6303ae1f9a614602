"""Interface of target drafters, which run in the target's process and make a Draft with each Verdict."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from outrider.decoding.choice_context import to_device
from outrider.decoding.draft import Draft
from outrider.drafters.registry import row_of
from outrider.engine.cache.key_values import LayerShape
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.choosing.step_result import StepResult
from outrider.engine.drafters.drafter import Drafter
from outrider.engine.drafters.drafts_under_way import DraftForeseen, DraftRead, DraftsUnderWay
from outrider.engine.forward.attention import Paged
from outrider.engine.forward.batch import Batch
from outrider.engine.forward.graphs import Graphs
from outrider.engine.forward.kernel import Kernel
from outrider.engine.forward.output import ForwardOutput
from outrider.engine.forward.row_graphs import ByRows, RowGraphs
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
    """Hidden states of a sequence's tokens that a step has committed to the target's cache."""

    sequence: EngineSequence
    start: int  # position of the first token
    hidden: Tensor  # [num_tokens, num_layers, hidden_size] of the drafter's layers
    is_wanted: bool  # whether the drafter makes a Draft after these tokens


@dataclass(frozen=True)
class Judging:
    """Draft that the device is judging, and the request for the Draft after its Verdict."""

    draft: Draft  # judged Draft: a chain and alternatives
    request: DraftRequest  # request for the next Draft, with the largest depth that any Verdict allows
    start: int  # position of the first token that the step feeds
    num_tokens: int  # number of fed tokens
    rows: range  # rows of the step's logits: after the last committed token, and after each node
    hidden: (
        Tensor | None
    )  # [num_tokens, num_layers, hidden_size] states of the drafter's layers; None: it reads none

    @property
    def told_tokens(self) -> list[int]:
        """Returns placeholders of the Verdict's tokens, which ``read_verdicts`` replaces."""
        return told_tokens(self.rows, self.draft.chain_length)

    @property
    def committed(self) -> CommittedStates:
        """Returns the states of all tokens that the step feeds."""
        assert self.hidden is not None
        return CommittedStates(self.request.engine_sequence, self.start, self.hidden, is_wanted=True)


class Target(Protocol):
    """Loaded target, as its drafters use it."""

    model: Any  # whole model, or a rank's share
    dtype: torch.dtype  # type of the model
    device: torch.device
    group: RankGroup | None  # group of this rank; None: the model is whole
    settings: EngineSettings  # resolved settings: no value is left open
    cache: PagedCache
    tables: BlockTables  # block tables of its cache
    kernel: Kernel | None  # attention kernel; None: blocks are gathered

    def pass_over(self, part: Any) -> Callable[[Paged], Tensor]:
        """Returns the forward pass of a part of the model (forward/part.py).

        It returns logits [num_logits, vocab_size].
        """

    def change_cache(self, step: StepInput) -> None:
        """Applies the step's changes to the target's cache. Raises CacheLostError."""

    def lay_out(self, step: StepInput, choice: ChoiceInput | None = None) -> Batch:
        """Returns the input of a pass over the target's cache. choice: input of the choice of tokens."""

    def are_finite(self, paged: Paged) -> Tensor:
        """Returns bool [num_tokens]: whether all ranks have cached only finite numbers for a token."""

    def graphs_of(self, compute: Callable[[Batch], ForwardOutput]) -> Graphs:
        """Returns CUDA graphs of the passes, which all ranks capture together."""

    def draft_graphs_of(self, compute: Callable[[Batch], ForwardOutput]) -> "DraftGraphs":
        """Returns CUDA graphs that draft a position of chains; all ranks capture them together."""

    def row_graphs_of(self, functions: Sequence[ByRows], size: int) -> list[RowGraphs]:
        """Returns CUDA graphs of functions from [num_rows, size] to logits [num_rows, vocab_size].

        The graphs share memory.
        """


class TargetDrafter(Drafter):
    """Drafter in the target's process. It is made from configs before the target, and loaded after it."""

    hidden_layers: tuple[int, ...] = ()  # layers of the target whose states it reads; -1: the last layer
    cache_shapes: tuple[LayerShape, ...] = ()  # shapes of its own cached layers, at each rank
    weight_bytes = 0  # bytes of its own weights, at each rank
    # Best tokens at each position of the chain of each newest Draft, best first.
    top_tokens: Sequence[Sequence[tuple[int, ...]]] = ()
    # Estimated probability that a node of each newest Draft is accepted if its parent is; empty: not known.
    promises: Sequence[Sequence[float]] = ()
    makes_chains = False  # whether the device drafts whole chains; False until its graphs are captured
    no_drafts_because = ""  # reason, once its Drafts are known never to pay

    def __init__(self, settings: EngineSettings, name: str) -> None:
        """
        Args:
            settings: settings of the target.
            name: name of the drafter in these settings.

        Raises:
            UnsupportedModelError: the drafter does not fit this target.
        """
        self.info = row_of(name)
        self.number = [*settings.drafters].index(name)  # index among the drafters of the target
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
        """Computes this rank's part of a step that rank 0 sent. Raises RankLostError."""
        raise NotImplementedError  # a drafter that computes at rank 0 alone sends no step

    def allocate(self, num_blocks: int) -> None:
        """Allocates its cache: a block for each block of the target, and a block for padding."""

    def capture(self) -> tuple[str, ...]:
        """Captures CUDA graphs after ``allocate``. Returns a reason for each pass that cannot be captured."""
        return ()

    def graph_bytes(self, rows: int, feeds: int, chains: int) -> int:
        """Returns the bytes that its graphs keep for up to ``rows`` rows.

        Args:
            feeds: bytes of the input buffers of graphs of passes over the cache.
            chains: bytes that the graphs of positions of chains keep.
        """
        return 0

    def waiting_bytes(self) -> int:
        """Returns the bytes at rank 0 for buffered states of the target: see ``WaitingStates``."""
        return 0

    def take_in(self, committed: Sequence[CommittedStates]) -> None:
        """Processes the tokens that a step committed. Called after every step if it has ``cache_shapes``."""

    def clear(self, sequence: EngineSequence) -> None:
        """Clears the cache entries that a Draft left after the sequence, because they are not finite."""

    def begin_drafts(self, judging: Sequence[Judging], result: StepResult[Tensor]) -> DraftsUnderWay | None:
        """Launches Drafts on the device before the host knows the Verdicts; returns None if it cannot.

        result: result of the step's choice of tokens, on the device.
        """
        return None

    def read(self, foreseen: DraftForeseen, request: DraftRequest) -> DraftRead:
        """Returns a Draft that ``begin_drafts`` launched, cut to the request."""
        return foreseen.read(request)

    def keep(self, sequence: EngineSequence) -> None:
        """Commits what the drafter has cached for a Verdict, since the Draft that it began follows it."""

    def is_of_host(self, request: DraftRequest) -> bool:
        """Whether the host chooses the tokens of this Draft, and waits for a GPU at each position."""
        return False

    def watch(self, sequences: Sequence[EngineSequence]) -> None:
        """Learns from the sequences of a step; called after every step."""


def last_state(request: DraftRequest) -> Tensor:
    """Returns the target's hidden state from which the newest token was chosen: [hidden_size]."""
    assert request.hidden is not None
    return request.hidden[0]


def rows_at(rows: Tensor, places: list[int]) -> Tensor:
    """Returns a copy of these rows, without waiting for the device."""
    return rows[to_device(torch.tensor(places, dtype=torch.int64), rows.device)]


def feed_of(sequence: EngineSequence, tokens: list[int], start: int, num_logits: int = 0) -> Feed:
    """Returns the feed of committed or drafted tokens of a sequence, from position ``start`` on."""
    blocks, adapter, state = sequence.blocks, sequence.adapter.number, sequence.state
    return Feed(tokens, num_logits, start, blocks, None, adapter, state, sequence.cached)


def target_drafter(settings: EngineSettings, name: str) -> TargetDrafter:
    """Returns the target drafter with that name in the settings. Raises as ``TargetDrafter``."""
    made: TargetDrafter = row_of(name).load()(settings, name)
    return made
