"""Work of an engine for a sequence, and its results. Torch-free.

Every piece of work says what the sender holds committed: the engine's tokens up to ``base``, then ``tokens``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from outrider.decoding.draft import Draft, Verdict
from outrider.decoding.lease import Lease
from outrider.decoding.settings import TokenLogprobs
from outrider.pace.step import Step


class Decode(Struct, frozen=True, tag=True):
    """Decode on from the committed tokens.

    With a Draft, or with a lease whose depth is not 0, each answer is a Verdict. Without both, and with a
    lease, decoding is plain: one answer for each token until the lease ends. Without anything there is one
    token. After plain decoding under keyed noise the tokens that are known already stand, even if the sender
    had not seen them: what is left of the Draft after them is judged.

    A Decode of the round under way is no new work. Its Draft is that of the round once more, and after it
    what follows its likely verdicts: what a Verdict leaves of that tree is verified at once, with no lease.
    Its lease takes the place of the lease before; None leaves that as it is.
    """

    sequence: int  # its number
    base: int
    tokens: tuple[int, ...]
    draft: Draft
    round: int
    lease: Lease | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it asks for plain decoding."""
        return not self.draft and self.lease is not None and self.lease.until > 0 and not self.lease.depth


def plain_decoding(sequence: int, base: int, tokens: tuple[int, ...], count: int, round: int = 0) -> Decode:
    """Returns the work of plain decoding, up to ``count`` tokens beyond the committed tokens."""
    return Decode(sequence, base, tokens, Draft(), round, Lease(base + len(tokens) + count))


class Propose(Struct, frozen=True, tag=True):
    """Draft a chain of up to ``depth`` tokens beyond the committed tokens; 0: fill the cache.

    Next to it up to ``alternatives`` tokens, each for a position of the chain, the likeliest to be correct.
    """

    sequence: int  # its number
    base: int
    tokens: tuple[int, ...]
    depth: int
    round: int
    alternatives: int = 0


class Score(Struct, frozen=True, tag=True):
    """Tell the log-probabilities of the committed tokens from a position on; nothing is chosen."""

    sequence: int  # its number
    base: int
    tokens: tuple[int, ...]
    start: int  # position of the first of them, at least 1: nothing comes before the token at 0


class Audit(Struct, frozen=True, tag=True):
    """Tell how far each committed token after the prompt is from the choice under keyed noise.

    It yields to all other work.
    """

    sequence: int  # its number
    base: int
    tokens: tuple[int, ...]


Work = Decode | Propose | Score | Audit


@dataclass(frozen=True)
class AskedAdapter:
    """Adapter that a sequence asks for."""

    name: str = ""  # empty: none
    path: str = ""  # folder within ``adapter_folder``; empty: the settings name the adapter
    digest: bytes = (
        b""  # digest of its files when it was loaded first; empty: it is loaded for the first time
    )


NONE_ASKED = AskedAdapter()


class Timings(Struct, frozen=True):
    """Seconds of the parts of a piece of work."""

    queue: float  # before its first forward pass
    forward: float  # in forward passes that it took part in
    sample: float  # in choosing tokens after these
    step: float  # in steps that it took part in, from building the batch to token ids on the host
    total: float  # from submission to result
    last_step: Step  # the last of these steps
    steps: int
    preemptions: int  # times that its sequence lost its cache to an older sequence
    adopted: int = 0  # prompt tokens that were cached before the sequence came; the first result tells


@dataclass(frozen=True)
class Forced:
    """Part of the sequence's grammar in a Verdict."""

    tokens: int = 0  # number of forced tokens after the accepted nodes, which no Draft held
    nodes: tuple[int, ...] = ()  # nodes of the Draft whose tokens were the only allowed tokens


NOTHING_FORCED = Forced()


class Decoded(Struct, frozen=True, tag=True):
    """Tokens that a step added: a Verdict on a Draft, or tokens of plain decoding."""

    sequence: int  # its number
    round: int
    verdict: Verdict
    logprobs: tuple[TokenLogprobs, ...]  # a value per token of the Verdict; empty unless asked for
    finish: str | None  # "stop" or "length" when the generation ends here
    timings: Timings
    length: int  # tokens of the sequence, these included
    is_plain: bool = False  # tokens of plain decoding
    draft: Draft | None = None  # Draft that follows these tokens, as the lease asked
    drafter: str = ""  # target drafter that made the Draft
    forced: Forced = NOTHING_FORCED
    draft_step: Step | None = None  # a step that made the Draft
    # Whether the host of a GPU chose the Draft's tokens position by position, where the device makes chains.
    is_draft_of_host: bool = False
    # Place of the target's own token among the guesses of the target drafter, if the chain was wrong there.
    # 0 is the first; None: unknown.
    rank: int | None = None
    continues: bool = False  # the Draft is being verified: another Verdict of this round follows


@dataclass(frozen=True)
class AheadOutcome:
    """Outcome of draft-ahead: what was prepared for a Draft before it was asked for."""

    tokens: int  # tokens of the Draft's chain; 0: the Verdict was not foreseen
    rank: int | None  # place of the target's own token among the guesses, from 0; None: unknown
    saved: float  # seconds of steps
    wasted: int  # tokens that were drafted for other verdicts


class Proposed(Struct, frozen=True, tag=True):
    sequence: int  # its number
    round: int
    draft: Draft
    timings: Timings
    ahead: AheadOutcome | None  # None: nothing had been prepared


class PreparedTree(Struct, frozen=True, tag=True):
    """Draft of a round once more, and after it the Drafts that follow its likely verdicts."""

    sequence: int  # its number
    round: int
    draft: Draft
    timings: Timings


class Scored(Struct, frozen=True, tag=True):
    """Part of the result of a Score, in order."""

    sequence: int  # its number
    start: int  # position of its first token
    logprobs: tuple[TokenLogprobs, ...]  # raw log-probabilities, a value per token
    timings: Timings


class Audited(Struct, frozen=True, tag=True):
    """Part of the result of an Audit, in order."""

    sequence: int  # its number
    start: int  # position of its first token
    margins: tuple[float, ...]  # nats, a value per token; see outrider/decoding/margins.py
    timings: Timings


class Failed(Struct, frozen=True, tag=True):
    """Notice that the sequence was closed because a step could not go on with it. It is the last result."""

    sequence: int
    reason: str  # without anything of its text
    is_grammars: bool = False  # the fault of its grammar


Answered = Decoded | Proposed | PreparedTree | Scored | Audited
Result = Answered | Failed


@dataclass(frozen=True)
class EngineLoad:
    """Load of an engine."""

    decoding: int  # open sequences beyond their prompt, also between two rounds
    running: int  # sequences with work that hold cache
    waiting: int  # sequences with work that hold none yet
    free_blocks: int
    total_blocks: int
    no_drafts_because: Mapping[str, str] = field(default_factory=dict)  # reasons by target drafter
