"""Generation in an engine: its tokens, and how many of them are cached."""

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
from outrider.engine.held_blocks import HeldBlocks, HeldWindow
from outrider.engine.held_state import HeldState
from outrider.engine.row_settings import row_settings

NO_DRAFT = Draft()
UNKNOWN = 0  # placeholder for a token of which only the position matters


@dataclass(frozen=True)
class SequenceAdapter:
    """LoRA adapter of a sequence."""

    number: int = 0  # number within the engine; 0: no adapter
    digest: bytes = b""  # part of the digests of cached blocks: adapters do not share cached prefixes


NO_ADAPTER = SequenceAdapter()


@dataclass
class DraftSequenceState:
    """State of a sequence that only the engine of a draft needs."""

    # Top tokens after a pending node or ROOT, best first, if known.
    top_tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    acceptance_rate: float = 0.0  # acceptance rate of its latest chains
    drafted: Draft = NO_DRAFT  # its newest Draft
    in_rounds: bool = False  # whether its newest tokens are the Verdict on its newest Draft


@dataclass
class TargetSequenceState:
    """State of a sequence that only the engine of a target needs."""

    round: int | None = None  # round of its newest Decode; None: its newest work was not a Decode
    is_plain: bool = False  # whether its newest Decode began plain decoding
    ahead: tuple[int, Draft] | None = None  # a committed length, and the Drafts sent ahead to follow it


@dataclass(eq=False)
class EngineSequence:
    """Tokens of one generation and its place in the cache.

    The cache holds ``tokens[:cached]`` at slots 0, 1, ... and after them the nodes of ``pending`` in order.
    The content of later slots is undefined. Nodes are pending only while every committed token is cached.
    """

    number: int  # number in order of opening: the youngest sequence has the highest
    prompt_length: int
    noise_key: int
    sampling: Sampling
    end_token_ids: frozenset[int]
    limit: int  # length at which the generation ends, in tokens, prompt included
    clock: Callable[[], float] = time.perf_counter  # clock of the engine, seconds
    adapter: SequenceAdapter = NO_ADAPTER
    texts: KnownTexts = NO_TEXTS  # texts from which its index drafters guess
    lists: TokenLists = field(init=False)  # token ids that the sampling settings name
    needs_no_text: bool = field(init=False)  # as in ChoiceContext
    row_settings: NDArray[np.float64] = field(init=False)  # sampling settings as numbers for kernels
    noise_origin: int = field(init=False)  # position from which its keyed noise is counted
    prompt: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    tokens: list[int] = field(default_factory=list)  # committed tokens
    cached: int = 0  # number of leading tokens in the cache
    pending: Draft = NO_DRAFT  # drafted tokens that may still be correct: their cache is kept
    draft: DraftSequenceState = field(default_factory=DraftSequenceState)
    target: TargetSequenceState = field(default_factory=TargetSequenceState)
    matcher: Matcher | None = None  # matcher of its grammar; None: no grammar, or not compiled yet
    blocks: HeldBlocks = field(default_factory=HeldBlocks)
    window: HeldWindow = field(default_factory=HeldWindow)  # unused without a pool for windowed layers
    state: HeldState = field(default_factory=HeldState)  # unused without recurrent layers
    preemptions: int = 0  # preemptions since its last result
    adopted: int = 0  # prompt tokens that were found in the cache; 0 after a result has reported them
    digests: list[bytes] = field(default_factory=list)  # digests of the leading blocks that were published
    hashes: list[bytes] = field(default_factory=list)  # digests of leading blocks, computed on demand

    def __post_init__(self) -> None:
        self.lists = TokenLists.of(self.sampling, self.end_token_ids)
        self.needs_no_text = needs_no_text(self.sampling)
        self.row_settings = row_settings(self.sampling)
        self.noise_origin = self.sampling.noise_origin(self.prompt_length)
        tells = self.sampling.logprobs is not None or self.sampling.verification != "coupled"
        self._asks_for_more = tells or not self.needs_no_text

    @property
    def is_special(self) -> bool:
        """Whether choosing its tokens needs more than logits, keyed noise and row settings.

        That is so if it has a grammar, or if its settings change or ban single tokens, want log-probabilities
        or verify by distributions.
        """
        return self._asks_for_more or self.matcher is not None

    @property
    def written(self) -> int:
        """Number of slots in use, and so the slot of the next fed token."""
        return self.cached + len(self.pending)

    def row(self, generated: Sequence[int], path: tuple[int, ...], mask: Mask | None = None) -> ChoiceContext:
        """Returns the context on which the choice of a token depends.

        Args:
            generated: its committed tokens after the prompt.
            path: drafted tokens that follow ``generated``.
            mask: mask of its grammar at this position.
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

        It does not raise if the grammar allows the answer to end here, since the answer is complete then.
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
        """Whether the grammar lets the answer end with ``token``, after the new tokens ``told``."""
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
        """Returns why the generation ends with ``token``, "stop" or "length"; None: it does not end.

        length: tokens of the sequence, including ``token``.
        """
        if token in self.end_token_ids:
            return "stop"
        return "length" if length >= self.limit else None
