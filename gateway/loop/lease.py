"""Lease: how far the target may decode without hearing from the gateway."""

from dataclasses import dataclass

from gateway.sequence import GatewaySequence

LEASE_TOKENS = 64  # a turn per token would cost a message each; the client still notices a stop soon


@dataclass(frozen=True)
class Lease:
    """A value. A longer one takes its place; it never shrinks while a Decode is unanswered."""

    until: int = 0  # length of the sequence, tokens; 0: the target waits after its Verdict
    depth: int = 0  # tokens of the Drafts that the target's own drafter makes meanwhile
    alternatives: int = 0  # most alternatives of these Drafts

    @classmethod
    def of(cls, sequence: GatewaySequence, depth: int = 0, alternatives: int = 0) -> "Lease":
        """Returns the longest lease from the committed tokens on."""
        return cls(min(len(sequence) + LEASE_TOKENS, sequence.limit), depth, alternatives)

    def is_used_up(self, sequence: GatewaySequence) -> bool:
        """Whether half of it is decoded, so that the target must hear of the next one."""
        return self.until - len(sequence) <= LEASE_TOKENS // 2 and self.until < sequence.limit
