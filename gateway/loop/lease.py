"""Lease of a sequence: how far its target may decode without hearing from the gateway."""

from dataclasses import replace

from gateway.sequence import GatewaySequence
from outrider.decoding.lease import NO_LEASE, Lease

LEASE_TOKENS = 64  # a turn per token would cost a message each; the client still notices a stop soon


def longest_lease(sequence: GatewaySequence, drafts: Lease = NO_LEASE) -> Lease:
    """Returns the longest lease from the committed tokens on. drafts: a lease with its Drafts."""
    return replace(drafts, until=min(len(sequence) + LEASE_TOKENS, sequence.limit))


def is_used_up(lease: Lease, sequence: GatewaySequence) -> bool:
    """Whether half of the lease is decoded, so that the target needs the next lease."""
    return lease.until - len(sequence) <= LEASE_TOKENS // 2 and lease.until < sequence.limit
