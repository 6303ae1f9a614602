"""Lease of a sequence: how far its target may decode without hearing from the gateway."""

from dataclasses import replace

from gateway.sequence import GatewaySequence
from outrider.decoding.lease import NO_LEASE, Lease

LEASE_TOKENS = 64  # tokens; saves a turn per token, and a target still stops soon without renewals


def longest_lease(sequence: GatewaySequence, drafts: Lease = NO_LEASE) -> Lease:
    """Returns the longest lease from the committed tokens on. drafts: lease that sets its Drafts."""
    return replace(drafts, until=min(len(sequence) + LEASE_TOKENS, sequence.limit))


def is_used_up(lease: Lease, sequence: GatewaySequence) -> bool:
    """Returns whether half of the lease is used, so that the target needs the next lease."""
    return lease.until - len(sequence) <= LEASE_TOKENS // 2 and lease.until < sequence.limit
