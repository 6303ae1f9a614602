"""Lease of a sequence: how far its target may decode without hearing from the gateway."""

from gateway.sequence import GatewaySequence
from outrider.decoding.lease import Lease

LEASE_TOKENS = 64  # a turn per token would cost a message each; the client still notices a stop soon


def longest_lease(sequence: GatewaySequence, depth: int = 0, alternatives: int = 0) -> Lease:
    """Returns the longest lease from the committed tokens on."""
    return Lease(min(len(sequence) + LEASE_TOKENS, sequence.limit), depth, alternatives)


def is_used_up(lease: Lease, sequence: GatewaySequence) -> bool:
    """Whether half of the lease is decoded, so that the target needs the next lease."""
    return lease.until - len(sequence) <= LEASE_TOKENS // 2 and lease.until < sequence.limit
