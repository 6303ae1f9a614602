"""Likely verdicts, learnt from earlier verdicts. Torch-free."""

from dataclasses import dataclass

RANKS = 6  # guesses for one position that are counted each, the draft's own first
PRIOR_RATE = 0.7  # acceptance rate before the first verdict
PRIOR_HITS = (0.4, 0.2, 0.1, 0.06, 0.04)  # shares of alternatives, the best first
PRIOR_VERDICTS = 10.0  # verdicts that the prior counts as
FORGETTING = 0.01  # weight of the newest observation
FORGETTING_OF_ONE = 0.1  # weight in the rate of one sequence


@dataclass(frozen=True)
class Branch:
    """Verdict on a chain as the draft sees it."""

    accepted: int  # accepted drafted tokens
    rank: int  # rank of the target's token among the draft's next guesses; 0: its first


class Outcomes:
    """Counts verdicts: how much of a chain is accepted, and which alternative the target chooses next.

    Draft and target choose after an accepted token under the same keyed noise. So the target's own token is
    mostly among the draft's alternatives: the next tokens by perturbed logits.
    """

    def __init__(self) -> None:
        self.acceptance_rate = PRIOR_RATE
        self._refusals = PRIOR_VERDICTS
        self._hits = [PRIOR_VERDICTS * share for share in PRIOR_HITS]  # rank 1 first

    def observe(self, accepted: int, reached: int, rank: int | None) -> None:
        """Learns from a verdict.

        Args:
            accepted: drafted tokens that were correct.
            reached: drafted tokens whose position was reached.
            rank: of the target's own token among the draft's guesses, RANKS for a token further down; None if
                no drafted token was refused.
        """
        self.acceptance_rate = faded(self.acceptance_rate, accepted, reached, FORGETTING)
        if rank is None:
            return
        kept = 1.0 - FORGETTING
        self._refusals = kept * self._refusals + 1.0
        self._hits = [kept * hits for hits in self._hits]
        if 1 <= rank < RANKS:
            self._hits[rank - 1] += 1.0

    def hit_rates(self) -> list[float]:
        """Returns how often each alternative is correct if the draft's own guess is not: [RANKS - 1]."""
        return [hits / self._refusals for hits in self._hits]

    def likeliest(self, acceptance_rate: float, depth: int, count: int) -> list[Branch]:
        """Returns the ``count`` likeliest verdicts on a chain, the likeliest first.

        acceptance_rate: acceptance rate of the sequence's chains.
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

    def alternatives(self, acceptance_rate: float, depth: int, count: int) -> list[Branch]:
        """Returns the likeliest verdicts that refuse a drafted token; ranks from 1."""
        ways = self.likeliest(acceptance_rate, depth, RANKS * (depth + 1))
        return [way for way in ways if way.accepted < depth][:count]


def faded(acceptance_rate: float, accepted: int, reached: int, forgetting: float) -> float:
    """Returns the exponential mean of the acceptance rate after ``reached`` more tokens.

    forgetting: weight of each token.
    """
    kept = (1.0 - forgetting) ** reached
    return kept * acceptance_rate + (1.0 - kept) * accepted / reached if reached else acceptance_rate
