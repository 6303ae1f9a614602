"""Lease: how far a target may decode before it hears from the gateway again."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Lease:
    """A value: a longer one takes its place, and it never shrinks."""

    until: int = 0  # length of the sequence, tokens; 0: the target waits after its Verdict
    depth: int = 0  # tokens of the Drafts that a target drafter makes meanwhile; 0: none
    alternatives: int = 0  # most alternatives of these Drafts
    drafter: str = ""  # target drafter that makes them
    least_survival: float = (
        0.0  # probability from which a node pays; 0: Drafts have the nodes that were asked for
    )

    def asks_like(self, other: "Lease") -> bool:
        """Whether both ask for the same Drafts."""
        drafts = self.depth, self.alternatives, self.drafter
        return drafts == (other.depth, other.alternatives, other.drafter)

    def renewed(self, by: "Lease") -> "Lease":
        """Returns the lease that takes the place of this lease: with other Drafts, and no shorter."""
        return replace(by, until=max(self.until, by.until))


NO_LEASE = Lease()
