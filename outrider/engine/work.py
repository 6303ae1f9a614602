"""Work of an engine for a sequence, and its results. Torch-free.

Each piece of work states the committed tokens that its sender knows: the engine's first ``base`` tokens, then
``tokens``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from outrider.decoding.draft import Draft, Verdict
from outrider.decoding.lease import Lease
from outrider.decoding.settings import TokenLogprobs
from outrider.pace.step import Step


class Decode(Struct, frozen=True, tag=True):
    """Request to decode after the committed tokens.

    With a Draft, or with a lease whose depth is not 0, each answer is a Verdict. With a lease of depth 0 and
    no Draft, decoding is plain: one answer for each token until the lease ends. With neither, one token is
    decoded. After plain decoding under keyed noise, the engine keeps tokens that it has decoded and that the
    sender did not know yet. It then judges only the rest of the Draft after these tokens.

    A Decode of the current round updates this round. Its Draft repeats the round's Draft and extends it by
    Drafts for likely verdicts. The part of this tree that follows the Verdict is verified at once, without a
    lease. A new lease replaces the current lease; None keeps it.
    """

    sequence: int  # number of the sequence
    base: int
    tokens: tuple[int, ...]
    draft: Draft
    round: int
    lease: Lease | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the request is for plain decoding."""
        return not self.draft and self.lease is not None and self.lease.until > 0 and not self.lease.depth


def plain_decoding(sequence: int, base: int, tokens: tuple[int, ...], count: int, round: int = 0) -> Decode:
    """Returns a request for plain decoding of up to ``count`` tokens after the committed tokens."""
    return Decode(sequence, base, tokens, Draft(), round, Lease(base + len(tokens) + count))


class Propose(Struct, frozen=True, tag=True):
    """Request to draft a chain of up to ``depth`` tokens after the committed tokens; 0: only fill the cache.

    The Draft may also have up to ``alternatives`` alternatives, at the positions of the chain where they are
    likeliest to be correct.
    """

    sequence: int  # number of the sequence
    base: int
    tokens: tuple[int, ...]
    depth: int
    round: int
    alternatives: int = 0


class Score(Struct, frozen=True, tag=True):
    """Request for the log-probabilities of the committed tokens from ``start`` on; no token is chosen."""

    sequence: int  # number of the sequence
    base: int
    tokens: tuple[int, ...]
    start: int  # position, at least 1: the token at position 0 has no context


class Audit(Struct, frozen=True, tag=True):
    """Request to compare each committed token after the prompt with the choice under keyed noise.

    All other work has priority over it.
    """

    sequence: int  # number of the sequence
    base: int
    tokens: tuple[int, ...]


Work = Decode | Propose | Score | Audit


@dataclass(frozen=True)
class AskedAdapter:
    """Adapter that a sequence asks for."""

    name: str = ""  # empty: no adapter
    path: str = ""  # folder within ``adapter_folder``; empty: the settings name the adapter
    digest: bytes = b""  # digest of its files at the first load; empty: this is the first load


NONE_ASKED = AskedAdapter()


class Timings(Struct, frozen=True):
    """Times of a piece of work, in seconds, and counts."""

    queue: float  # wait before the first forward pass
    forward: float  # forward passes that the work took part in
    sample: float  # choice of tokens after these passes
    step: float  # steps that the work took part in, from building the batch to token ids on the host
    total: float  # time from submission to result
    last_step: Step  # newest of these steps
    steps: int
    preemptions: int  # times that its sequence lost its cache to an older sequence
    adopted: int = 0  # prompt tokens that were found in the cache; the first result reports them


@dataclass(frozen=True)
class Forced:
    """Tokens of a Verdict that the sequence's grammar has forced."""

    tokens: int = 0  # number of forced tokens after the accepted nodes that were not drafted
    nodes: tuple[int, ...] = ()  # nodes of the Draft whose tokens were the only allowed tokens


NOTHING_FORCED = Forced()


class Decoded(Struct, frozen=True, tag=True):
    """Tokens that a step added: a Verdict on a Draft, or tokens of plain decoding."""

    sequence: int  # number of the sequence
    round: int
    verdict: Verdict
    logprobs: tuple[TokenLogprobs, ...]  # a value per token of the Verdict; empty unless asked for
    finish: str | None  # "stop" or "length" when the generation ends here
    timings: Timings
    length: int  # tokens of the sequence, including these tokens
    is_plain: bool = False  # whether these are tokens of plain decoding
    draft: Draft | None = None  # Draft that follows these tokens, if the lease asks for it
    drafter: str = ""  # target drafter that made the Draft
    forced: Forced = NOTHING_FORCED
    draft_step: Step | None = None  # drafter step that made the Draft
    # Whether the host chose the Draft's tokens position by position, although the engine has a GPU.
    is_draft_of_host: bool = False
    # Rank of the target's own token among the target drafter's guesses, from 0, where the chain was wrong.
    # None: unknown.
    rank: int | None = None
    continues: bool = False  # whether the Draft is being verified: another Verdict of this round follows


@dataclass(frozen=True)
class AheadOutcome:
    """Outcome of draft-ahead: how much of a Draft was prepared before it was requested."""

    tokens: int  # prepared tokens of the chain; 0: nothing was prepared for this Verdict
    rank: int | None  # rank of the target's own token among the guesses, from 0; None: unknown
    saved: float  # saved seconds of steps
    wasted: int  # tokens that were drafted for other verdicts


class Proposed(Struct, frozen=True, tag=True):
    sequence: int  # number of the sequence
    round: int
    draft: Draft
    timings: Timings
    ahead: AheadOutcome | None  # None: nothing had been prepared


class PreparedTree(Struct, frozen=True, tag=True):
    """Draft of a round, extended by Drafts for its likely verdicts."""

    sequence: int  # number of the sequence
    round: int
    draft: Draft
    timings: Timings


class Scored(Struct, frozen=True, tag=True):
    """Part of the result of a Score; the parts come in order."""

    sequence: int  # number of the sequence
    start: int  # position of its first token
    logprobs: tuple[TokenLogprobs, ...]  # raw log-probabilities, a value per token
    timings: Timings


class Audited(Struct, frozen=True, tag=True):
    """Part of the result of an Audit; the parts come in order."""

    sequence: int  # number of the sequence
    start: int  # position of its first token
    margins: tuple[float, ...]  # nats, a value per token; see outrider/decoding/margins.py
    timings: Timings


class Failed(Struct, frozen=True, tag=True):
    """Last result of a sequence that could not continue and was closed."""

    sequence: int
    reason: str  # reason, which reveals nothing of the text
    is_grammars: bool = False  # whether its grammar caused the failure


Answered = Decoded | Proposed | PreparedTree | Scored | Audited
Result = Answered | Failed


@dataclass(frozen=True)
class EngineLoad:
    """Load of an engine."""

    decoding: int  # open sequences past their prompt, also between two rounds
    running: int  # sequences with work that hold cache
    waiting: int  # sequences with work that hold no cache yet
    free_blocks: int
    total_blocks: int
    no_drafts_because: Mapping[str, str] = field(default_factory=dict)  # reasons by disabled drafter
