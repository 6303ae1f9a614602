"""Lease: how far a target may decode before it hears from the gateway again."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Lease:
    """Limits of decoding without the gateway. A renewal replaces the lease, and never shortens it."""

    until: int = 0  # length of the sequence in tokens; 0: the target waits after its Verdict
    depth: int = 0  # tokens of the Drafts that a target drafter makes meanwhile; 0: no Drafts
    alternatives: int = 0  # most alternatives of these Drafts
    drafter: str = ""  # name of the target drafter that makes these Drafts
    least_survival: float = 0.0  # probability of acceptance from which a node pays; 0: all requested nodes

    def asks_like(self, other: "Lease") -> bool:
        """Whether both leases ask for the same Drafts."""
        drafts = self.depth, self.alternatives, self.drafter
        return drafts == (other.depth, other.alternatives, other.drafter)

    def renewed(self, by: "Lease") -> "Lease":
        """Returns the lease that replaces this lease: it asks for the Drafts of ``by``, and is no shorter."""
        return replace(by, until=max(self.until, by.until))


NO_LEASE = Lease()
