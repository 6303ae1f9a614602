"""A Draft on its way from a drafter to the target."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from gateway.sequence import GatewaySequence
from outrider.decoding.draft import Draft
from outrider.pace.step import Step


@dataclass(frozen=True)
class AheadReport:
    """Tokens that a draft worker prepared before the Draft was asked for: those of use, and the rest."""

    tokens: int  # prepared tokens of the Draft's chain; 0: the Verdict was not foreseen
    rank: int | None  # rank of the target's own token among the guesses for it; 0 is the first; None: unknown
    saved_s: float  # seconds of steps of the draft
    wasted: int  # tokens that were drafted for other verdicts


async def nothing_follows() -> Draft | None:
    """Returns None: the drafter does not prepare the next Draft."""
    return None


@dataclass(frozen=True)
class Proposal:
    """A Draft, and how it came about."""

    draft: Draft
    base: int = 0  # tokens of the sequence that it follows
    worker: str = ""  # address of the draft worker; empty: none made it
    step: Step | None = None  # newest step of the drafter's model; None: it has none
    step_s: float = 0.0  # seconds of the model's steps for this Draft
    worker_s: float = 0.0  # seconds in the draft worker, from question to answer
    ahead: AheadReport | None = None  # None: nothing was prepared
    ahead_hit: bool | None = None  # whether it was prepared; None: nothing was
    # Waits for the Draft with what follows its likely verdicts; returns None if that never comes.
    following: Callable[[], Awaitable[Draft | None]] = nothing_follows
    seconds: float = 0.0  # time that a round waited for it
    drafter: str = ""  # drafter that made it
    asked: str = ""  # drafter that was asked for it: a mixed drafter asks another
    because: str = ""  # why that drafter drafts; a RouteReason
    wanted: int = 0  # depth that was asked for, tokens
    is_of_host: bool = False  # the host of the target's GPU chose its tokens, position by position

    @property
    def overhead_s(self) -> float:
        """Seconds of the wait outside of the draft worker."""
        return self.seconds - self.worker_s

    @property
    def asked_length(self) -> int:
        """Nodes of the chain that are within the depth that was asked for; an index may guess deeper."""
        return min(self.draft.chain_length, self.wanted or self.draft.chain_length)

    def trimmed(self, sequence: GatewaySequence) -> "Proposal":
        """Returns the part that still follows the committed tokens."""
        tokens = sequence.since(self.base)
        if not tokens:
            return self
        wanted = max(self.wanted - len(tokens), 0)
        return replace(self, draft=self.draft.after(tokens), base=len(sequence), wanted=wanted)


NO_PROPOSAL = Proposal(Draft())
