"""How verdicts are likely to fall, learnt from those that came. Torch-free."""

from dataclasses import dataclass

RANKS = 6  # guesses for one position that are told apart, the draft's own first
PRIOR_RATE = 0.7  # of acceptance, before anything is known
PRIOR_HITS = (0.4, 0.2, 0.1, 0.06, 0.04)  # of runners-up, the best first, when the draft's own guess is wrong
PRIOR_VERDICTS = 10.0  # with which these are believed
FORGETTING = 0.01  # weight of the newest observation
FORGETTING_OF_ONE = 0.1  # and in a sequence's own rate


@dataclass(frozen=True)
class Branch:
    """One way in which a Verdict can fall."""

    accepted: int  # drafted tokens that stand
    rank: int  # of the target's own token among the draft's guesses that follow these, its first being 0


class Outcomes:
    """Counts verdicts: how far chains stand, and which runner-up follows where they fall.

    Whatever comes after a drafted token that stands was drafted under the same keyed noise, so the target's
    own token is mostly among the runners-up of the draft's perturbed logits.
    """

    def __init__(self) -> None:
        self.acceptance_rate = PRIOR_RATE
        self._refusals = PRIOR_VERDICTS
        self._hits = [PRIOR_VERDICTS * share for share in PRIOR_HITS]  # by rank, from 1

    def observe(self, accepted: int, verified: int, rank: int | None) -> None:
        """
        Args:
            verified: drafted tokens whose position was reached, ``accepted`` of them being right.
            rank: of the target's own token, if a drafted token was refused; RANKS for one further down,
                None where none was refused.
        """
        self.acceptance_rate = faded(self.acceptance_rate, accepted, verified, FORGETTING)
        if rank is None:
            return
        kept = 1.0 - FORGETTING
        self._refusals = kept * self._refusals + 1.0
        self._hits = [kept * hits for hits in self._hits]
        if 1 <= rank < RANKS:
            self._hits[rank - 1] += 1.0

    def hit_rates(self) -> list[float]:
        """[RANKS - 1] of the runners-up, the best first, given that the draft's own guess is wrong."""
        return [hits / self._refusals for hits in self._hits]

    def likeliest(self, acceptance_rate: float, depth: int, count: int) -> list[Branch]:
        """The likeliest ``count`` ways in which the Verdict on a chain can fall, the likeliest first.

        acceptance_rate: of the sequence's chains.
        """
        hit_rates = self.hit_rates()
        reached = 1.0  # probability
        ways: list[tuple[float, Branch]] = []
        for accepted in range(depth + 1):
            if accepted == depth:
                ways.append((reached * acceptance_rate, Branch(accepted, 0)))
            refused = reached * (1.0 - acceptance_rate)
            ways += [(refused * hit, Branch(accepted, rank)) for rank, hit in enumerate(hit_rates, start=1)]
            reached *= acceptance_rate
        ways.sort(key=lambda way: -way[0])
        return [branch for _, branch in ways[:count]]

    def runners_up(self, acceptance_rate: float, depth: int, count: int) -> list[Branch]:
        """The likeliest ways in which a drafted token can be refused; ranks from 1."""
        ways = self.likeliest(acceptance_rate, depth, RANKS * (depth + 1))
        return [way for way in ways if way.accepted < depth][:count]


def faded(acceptance_rate: float, accepted: int, verified: int, forgetting: float) -> float:
    """The rate after so many more drafted tokens, of which each weighs so much."""
    kept = (1.0 - forgetting) ** verified
    return kept * acceptance_rate + (1.0 - kept) * accepted / verified if verified else acceptance_rate
