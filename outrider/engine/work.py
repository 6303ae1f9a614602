"""What an engine is asked to do for a sequence, and what it answers. Torch-free.

Every piece of work says what the sender holds committed: the engine's tokens up to ``base``, then ``tokens``.
"""

from dataclasses import dataclass

from msgspec import Struct

from outrider.decoding.draft import Draft, Verdict
from outrider.decoding.settings import TokenLogprobs
from outrider.pace.step import Step


class Verify(Struct, frozen=True, tag=True):
    """Judge a Draft that follows the committed tokens. An empty one asks for one token.

    After a Generate under keyed noise the tokens that are known already stand, also where the sender had not
    seen them: of the Draft that is judged which follows those.
    """

    sequence: int  # its number
    base: int
    tokens: tuple[int, ...]
    draft: Draft
    round: int
    next_depth: int = 0  # of the Draft that is to come with the Verdict, from a drafter beside the target
    next_leaves: int = 0
    until: int = 0  # length of the sequence, up to which such Drafts are verified without being sent


class Extend(Struct, frozen=True, tag=True):
    """To the Verify of the same round: its Draft once more, and after it what follows its likely verdicts.

    Where the Verdict leaves something of that tree, it is verified at once, as the same round.
    """

    sequence: int  # its number
    base: int
    tokens: tuple[int, ...]
    draft: Draft
    round: int


class Generate(Struct, frozen=True, tag=True):
    """Decode freely, up to ``count`` tokens beyond the committed ones."""

    sequence: int  # its number
    base: int
    tokens: tuple[int, ...]
    count: int


class Propose(Struct, frozen=True, tag=True):
    """Draft a chain of up to ``depth`` tokens beyond the committed ones; 0: fill the cache.

    Beside it ``leaves`` runners-up, each for one of its positions: where they are likeliest to be right.
    """

    sequence: int  # its number
    base: int
    tokens: tuple[int, ...]
    depth: int
    round: int
    leaves: int = 0


class TopUp(Struct, frozen=True, tag=True):
    """To the Generate or Verify before: go on up to ``count`` tokens beyond the committed ones.

    No token is sent twice.
    """

    sequence: int  # its number
    base: int
    tokens: tuple[int, ...]
    count: int
    next_depth: int = 0  # to a Verify: as there
    next_leaves: int = 0


class Score(Struct, frozen=True, tag=True):
    """Tell the log-probabilities of the committed tokens from a position on; nothing is chosen."""

    sequence: int  # its number
    base: int
    tokens: tuple[int, ...]
    start: int  # position of the first of them, at least 1: nothing comes before the token at 0


Work = Verify | Extend | Generate | TopUp | Propose | Score


@dataclass(frozen=True)
class Timings:
    """Where the time of a piece of work went, in seconds."""

    queue: float  # before its first forward pass
    forward: float  # in forward passes that it took part in
    sample: float  # in choosing tokens after these
    step: float  # in steps that it took part in, from building the batch to token ids on the host
    total: float  # from submission to result
    last_step: Step  # of these
    steps: int
    preemptions: int  # times that its sequence lost its cache to an older one


@dataclass(frozen=True)
class Forced:
    """What the sequence's grammar had to do with a Verdict."""

    tokens: int = 0  # that stand after the accepted nodes': no Draft held them
    nodes: tuple[int, ...] = ()  # of the Draft, whose tokens were the only ones allowed


NOTHING_FORCED = Forced()


class Verified(Struct, frozen=True, tag=True):
    sequence: int  # its number
    round: int
    verdict: Verdict
    logprobs: tuple[TokenLogprobs, ...]  # one per token of the Verdict; empty unless asked for
    finish: str | None  # "stop" or "length" when the generation ends here
    timings: Timings
    draft: Draft | None = None  # that follows these tokens, as next_depth asked
    forced: Forced = NOTHING_FORCED
    draft_step: Step | None = None  # one of those that made it
    # Of the target's own token among the guesses of a drafter beside it, where the chain was wrong; 0 is the
    # first. None: unknown.
    rank: int | None = None
    continues: bool = False  # that Draft is being verified: another Verdict of this round follows


class Generated(Struct, frozen=True, tag=True):
    sequence: int  # its number
    position: int  # of the token
    token: int
    logprobs: tuple[TokenLogprobs, ...]  # of the forced tokens and this one; empty unless asked for
    finish: str | None
    timings: Timings
    forced: tuple[int, ...] = ()  # tokens before it, in the same step, that the sequence's grammar forced


@dataclass(frozen=True)
class AheadOutcome:
    """What was prepared for a Draft before it was asked for, and what in vain."""

    tokens: int  # of the Draft's chain; 0: the Verdict was not foreseen
    rank: int | None  # of the target's own token among the guesses for it, 0 being the first; None: unknown
    saved: float  # seconds of steps
    wasted: int  # tokens that were drafted for other verdicts


class Proposed(Struct, frozen=True, tag=True):
    sequence: int  # its number
    round: int
    draft: Draft
    timings: Timings
    ahead: AheadOutcome | None  # None: nothing had been prepared


class Prepared(Struct, frozen=True, tag=True):
    """The Draft of a round once more, and after it those that follow its likely verdicts."""

    sequence: int  # its number
    round: int
    draft: Draft
    timings: Timings


class Scored(Struct, frozen=True, tag=True):
    """A part of what a Score asked for, in order."""

    sequence: int  # its number
    start: int  # position of its first token
    logprobs: tuple[TokenLogprobs, ...]  # raw, one per token
    timings: Timings


class Failed(Struct, frozen=True, tag=True):
    """The sequence was closed, because a step could not go on with it. Nothing more comes for it."""

    sequence: int
    reason: str  # without anything of its text
    is_grammars: bool = False  # the fault of its grammar


Answered = Verified | Generated | Proposed | Prepared | Scored
Result = Answered | Failed


@dataclass(frozen=True)
class Load:
    """How busy an engine is."""

    decoding: int  # open sequences beyond their prompt, those between two rounds too
    running: int  # sequences with work that hold cache
    waiting: int  # sequences with work that hold none yet
    free_blocks: int
    total_blocks: int
    no_drafts_because: str = ""  # why a drafter beside the target is out of use
