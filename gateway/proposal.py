"""A Draft on its way from a drafter to the target."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from gateway.sequence import GatewaySequence
from outrider.decoding.draft import Draft
from outrider.pace.step import Step


@dataclass(frozen=True)
class AheadReport:
    """Result of drafting ahead: tokens that a draft worker drafted before the Draft was requested."""

    tokens: int  # prepared tokens of the Draft's chain; 0: nothing was prepared for this Verdict
    rank: int | None  # rank of the target's own token among the guesses for it; 0 is the first; None: unknown
    saved_s: float  # seconds of draft steps that the Draft no longer needed
    wasted: int  # tokens that were drafted for other verdicts


async def nothing_follows() -> Draft | None:
    """Returns None: the drafter does not prepare the next Draft."""
    return None


@dataclass(frozen=True)
class Proposal:
    """A Draft with its origin and its timings."""

    draft: Draft
    base: int = 0  # length of the sequence that it continues, in tokens
    worker: str = ""  # address of the draft worker; empty: no worker made the Draft
    step: Step | None = None  # newest step of the drafter's model; None: the drafter has no model
    step_s: float = 0.0  # seconds of the model's steps for this Draft
    worker_s: float = 0.0  # seconds in the draft worker, from request to reply
    ahead: AheadReport | None = None  # None: nothing was prepared
    ahead_hit: bool | None = None  # whether the Draft had been prepared; None: nothing had been prepared
    # Waits for the Draft extended by the Drafts for its likely verdicts; returns None if these never come.
    following: Callable[[], Awaitable[Draft | None]] = nothing_follows
    seconds: float = 0.0  # seconds that a round waited for the Draft
    drafter: str = ""  # drafter that made the Draft
    asked: str = ""  # drafter that was asked; a mixed drafter passes the request on to another drafter
    because: str = ""  # reason why that drafter drafts; a RouteReason
    wanted: int = 0  # requested depth, tokens
    is_of_host: bool = False  # whether the host of the target's GPU chose the tokens, position by position

    @property
    def overhead_s(self) -> float:
        """Seconds of the wait that were spent outside of the draft worker."""
        return self.seconds - self.worker_s

    @property
    def asked_length(self) -> int:
        """Length of the chain up to the requested depth; an index may guess deeper."""
        return min(self.draft.chain_length, self.wanted or self.draft.chain_length)

    def trimmed(self, sequence: GatewaySequence) -> "Proposal":
        """Returns the part of the proposal that follows the committed tokens."""
        tokens = sequence.since(self.base)
        if not tokens:
            return self
        wanted = max(self.wanted - len(tokens), 0)
        return replace(self, draft=self.draft.after(tokens), base=len(sequence), wanted=wanted)


NO_PROPOSAL = Proposal(Draft())
