"""A Draft on its way from a drafter to the target."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from gateway.sequence import GatewaySequence
from outrider.decoding.draft import Draft
from outrider.pace.step import Step


@dataclass(frozen=True)
class AheadReport:
    """What was prepared for a Draft before it was asked for, and what in vain."""

    tokens: int  # of the Draft's chain; 0: the Verdict was not foreseen
    rank: int | None  # of the target's own token among the guesses for it; 0 is the first, None: unknown
    saved_s: float  # in steps of the draft
    wasted: int  # tokens that were drafted for other verdicts


async def nothing_follows() -> Draft | None:
    """Of a drafter that does not prepare the next Draft."""
    return None


@dataclass(frozen=True)
class Proposal:
    """A Draft, and how it came about."""

    draft: Draft
    base: int = 0  # tokens of the sequence that it follows
    worker: str = ""  # that made it, by address, where the drafter has workers of its own
    step: Step | None = None  # the drafter's newest, where it has a model
    step_s: float = 0.0  # steps of the drafter's model for this Draft
    worker_s: float = 0.0  # from when the drafter's worker was asked to its answer
    ahead: AheadReport | None = None  # None: nothing had been prepared
    ahead_hit: bool | None = None  # whether it was there before it was asked for; None: nothing was prepared
    # Waits for the same Draft with what follows its likely verdicts behind it; None: that never comes.
    following: Callable[[], Awaitable[Draft | None]] = nothing_follows
    seconds: float = 0.0  # that it was waited for
    drafter: str = ""  # that made it
    asked: str = ""  # drafter that was asked for it: a mixed one asks another
    because: str = ""  # why that one drafts; a RouteReason
    wanted: int = 0  # tokens of its chain that were asked for

    @property
    def overhead_s(self) -> float:
        """Of the time that it was waited for, outside of the drafter's worker."""
        return self.seconds - self.worker_s

    def trimmed(self, sequence: GatewaySequence) -> "Proposal":
        """What is left of it now that the sequence has gone on."""
        tokens = sequence.since(self.base)
        if not tokens:
            return self
        wanted = max(self.wanted - len(tokens), 0)
        return replace(self, draft=self.draft.after(tokens), base=len(sequence), wanted=wanted)


NO_PROPOSAL = Proposal(Draft())
