"""Generation as the engine sees it: tokens, and the cached part of them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.decoding.choice_context import ChoiceContext, TokenLists
from outrider.decoding.draft import ROOT, Draft
from outrider.decoding.grammar import GrammarError, Mask, Matcher
from outrider.decoding.sampling import needs_no_text
from outrider.decoding.settings import Sampling
from outrider.drafters.known_texts import NO_TEXTS, KnownTexts
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.held_state import HeldState
from outrider.engine.row_settings import row_settings

NO_DRAFT = Draft()
UNKNOWN = 0  # placeholder of a token whose position alone counts


@dataclass(frozen=True)
class SequenceAdapter:
    """Adapter of a sequence."""

    number: int = 0  # number at the engine; 0: none
    digest: bytes = b""  # what it has cached differs from what other weights have cached


NO_ADAPTER = SequenceAdapter()


@dataclass
class DraftSequenceState:
    """State of a sequence that only a draft needs."""

    # Top tokens after a pending node or ROOT, best first, if known.
    top_tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    acceptance_rate: float = 0.0  # acceptance of its latest chains
    drafted: Draft = NO_DRAFT  # its newest Draft
    in_rounds: bool = False  # its newest tokens came as the Verdict on its last Draft


@dataclass
class TargetSequenceState:
    """State of a sequence that only a target needs."""

    round: int | None = None  # round of its newest Decode; None: its newest work was no Decode
    is_plain: bool = False  # whether that began plain decoding
    ahead: tuple[int, Draft] | None = None  # the next Drafts, and the length of the sequence that they follow


@dataclass(eq=False)
class EngineSequence:
    """Tokens of one generation and its place in the cache.

    The cache holds ``tokens[:cached]`` at slots 0, 1, ... and after them the nodes of ``pending`` in order.
    What lies beyond is garbage. Nodes are pending only while every committed token is cached.
    """

    number: int  # order of opening: the youngest has the highest
    prompt_length: int
    noise_key: int
    sampling: Sampling
    end_token_ids: frozenset[int]
    limit: int  # tokens at which the generation ends, prompt included
    clock: Callable[[], float] = time.perf_counter  # the engine's, seconds
    adapter: SequenceAdapter = NO_ADAPTER
    texts: KnownTexts = NO_TEXTS  # texts that its indices guess from
    lists: TokenLists = field(init=False)  # what the sampling settings name
    needs_no_text: bool = field(init=False)  # as a ChoiceContext has it
    row_settings: NDArray[np.float64] = field(init=False)  # settings of its rows, as kernels read them
    noise_origin: int = field(init=False)  # position at which its noise begins to count
    prompt: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    tokens: list[int] = field(default_factory=list)  # committed
    cached: int = 0
    pending: Draft = NO_DRAFT  # drafted tokens that may still be correct: their cache is kept
    draft: DraftSequenceState = field(default_factory=DraftSequenceState)
    target: TargetSequenceState = field(default_factory=TargetSequenceState)
    matcher: Matcher | None = None  # matcher of its grammar, once that is compiled
    blocks: HeldBlocks = field(default_factory=HeldBlocks)
    state: HeldState = field(default_factory=HeldState)  # empty without recurrent layers
    preemptions: int = 0  # since its last result
    adopted: int = 0  # prompt tokens that were cached before it came, until a result tells
    digests: list[bytes] = field(default_factory=list)  # digests of the leading blocks that are published
    hashes: list[bytes] = field(
        default_factory=list
    )  # hashes of leading blocks of tokens, as far as they were asked for

    def __post_init__(self) -> None:
        self.lists = TokenLists.of(self.sampling, self.end_token_ids)
        self.needs_no_text = needs_no_text(self.sampling)
        self.row_settings = row_settings(self.sampling)
        self.noise_origin = self.sampling.noise_origin(self.prompt_length)
        tells = self.sampling.logprobs is not None or self.sampling.verification != "coupled"
        self._asks_for_more = tells or not self.needs_no_text

    @property
    def is_special(self) -> bool:
        """Whether its settings ask for more than noise.

        They change or ban single tokens, want log-probabilities, or judge by distributions.
        """
        return self._asks_for_more or self.matcher is not None

    @property
    def written(self) -> int:
        """Slots that hold something: the next token fed goes here."""
        return self.cached + len(self.pending)

    def row(self, generated: Sequence[int], path: tuple[int, ...], mask: Mask | None = None) -> ChoiceContext:
        """Returns the context on which the choice of a token depends.

        Args:
            generated: its committed tokens after the prompt.
            path: drafted tokens that follow them.
            mask: of its grammar there.
        """
        return ChoiceContext(
            sampling=self.sampling,
            noise_key=self.noise_key,
            position=len(self.tokens) + len(path) - self.noise_origin,
            prompt=self.prompt,
            generated=generated,
            path=path,
            end_token_ids=self.end_token_ids,
            given_lists=self.lists,
            mask=mask,
            needs_no_text=self.needs_no_text,
        )

    @property
    def names_tokens_beside_a_form(self) -> bool:
        """Whether the caller's lists of tokens may contradict the grammar."""
        lists = self.sampling.allowed_token_ids is not None or bool(self.sampling.bad_token_ids)
        return self.matcher is not None and lists

    def check_next_token(self) -> None:
        """Raises GrammarError if the caller's lists leave no token that the grammar allows next.

        An end that the grammar allows is never in the way: the answer has its form there.
        """
        if self.matcher is None or not self.names_tokens_beside_a_form:
            return
        (mask,) = self.matcher.masks(self.tokens[self.prompt_length :], NO_DRAFT, [ROOT])
        assert mask is not None
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        left = allowed
        if self.sampling.allowed_token_ids is not None:
            left = np.intersect1d(left, self.lists.allowed)
        if not np.setdiff1d(left, self.lists.bad).size and not np.isin(self.lists.ends, allowed).any():
            raise GrammarError(
                "allowed_token_ids and bad_token_ids leave no token that the form of the answer allows next"
            )

    def ends_in_form(self, told: Sequence[int], token: int) -> bool:
        """Whether the grammar lets the answer end with ``token``, after the tokens ``told``."""
        if self.matcher is None or not self.names_tokens_beside_a_form:
            return True
        return self.matcher.may_end([*self.tokens[self.prompt_length :], *told], token)

    def forget_pending(self) -> None:
        """Forgets all pending nodes."""
        self.pending, self.draft.top_tokens = NO_DRAFT, {}

    @property
    def has_ended(self) -> bool:
        """Whether the generation has ended."""
        return self.finish_of(self.tokens[-1], len(self.tokens)) is not None

    def finish_of(self, token: int, length: int) -> str | None:
        """Why the generation ends with ``token`` as its ``length``-th: "stop", "length" or None."""
        if token in self.end_token_ids:
            return "stop"
        return "length" if length >= self.limit else None
