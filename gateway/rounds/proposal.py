"""A Draft on its way from a drafter to the target."""

from dataclasses import dataclass, replace

from gateway.rounds.sequence import Sequence
from protos import rounds_pb2
from protos.conversions import draft_from_message, draft_to_message


@dataclass(frozen=True)
class Proposal:
    """A Draft, and how it came about."""

    draft: rounds_pb2.Draft
    base: int = 0  # tokens of the sequence that it follows
    seconds: float = 0.0  # that it was waited for
    overhead_s: float = 0.0  # of these, outside of the draft worker
    ahead_hit: bool | None = None  # whether it was prepared before it was asked for; None: none was
    step_s: float = 0.0  # steps of the draft in that time
    rank: int | None = None  # among the draft's guesses, of the target's token that it follows

    def trimmed(self, sequence: Sequence) -> "Proposal":
        """What is left of it now that the sequence has gone on."""
        tokens = sequence.since(self.base)
        if not tokens:
            return self
        left = draft_from_message(self.draft).after(tokens)
        return replace(self, draft=draft_to_message(left), base=len(sequence))


NO_PROPOSAL = Proposal(rounds_pb2.Draft())


def refused(draft: rounds_pb2.Draft, reply: rounds_pb2.TargetReply) -> int:
    """1 if the Draft had a guess for the position of the target's own token, and it was wrong."""
    end_of_path = reply.accepted[-1] if reply.accepted else -1
    return int(end_of_path in draft.parents)
