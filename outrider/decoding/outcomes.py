"""Likely verdicts, learnt from earlier verdicts. Torch-free."""

from dataclasses import dataclass

from outrider.learning.mean import Mean, Rate

TopTokens = tuple[int, ...]  # tokens of a position, best first

RANKS = 6  # guesses per position that are counted, the draft's own guess first
RANKS_OF_CHAINS = 2  # guesses per position of a target drafter's chain; the second shows a tree's gain
PRIOR_RATE = 0.7  # acceptance rate before the first verdict
PRIOR_HITS = (0.4, 0.2, 0.1, 0.06, 0.04)  # prior hit rates of the alternatives, the best alternative first
PRIOR_VERDICTS = 10.0  # weight of the prior in verdicts
MEMORY = 100.0  # verdicts, for hit rates; drafted tokens, for the acceptance rate
SEQUENCE_MEMORY = 10.0  # drafted tokens, for the acceptance rate of one sequence


@dataclass(frozen=True)
class Branch:
    """Verdict on a chain, expressed in the draft's own guesses."""

    accepted: int  # number of accepted drafted tokens
    rank: int  # rank of the target's token among the draft's next guesses; 0: its first


def rank_of(token: int, top_tokens: TopTokens) -> int:
    """Returns the rank of a token among the best tokens, from 0; RANKS if the token is not among them."""
    return top_tokens.index(token) if token in top_tokens else RANKS


class Outcomes:
    """Counts verdicts: how much of a chain is accepted, and which alternative the target chooses next.

    After an accepted token, draft and target choose under the same keyed noise. So the target's own token is
    usually among the draft's alternatives, which are its next tokens by perturbed logits.
    """

    def __init__(self) -> None:
        self._acceptance = Mean(PRIOR_RATE, MEMORY)
        # How often each alternative is correct if the draft's own guess is not; rank 1 first.
        self._hits = [Rate(MEMORY, PRIOR_VERDICTS * share, PRIOR_VERDICTS) for share in PRIOR_HITS]

    @property
    def acceptance_rate(self) -> float:
        return self._acceptance.value

    def observe(self, accepted: int, reached: int, rank: int | None) -> None:
        """Learns from a verdict.

        Args:
            accepted: drafted tokens that were correct.
            reached: drafted tokens whose position was reached.
            rank: rank of the target's own token among the draft's guesses; RANKS if it is not among them;
                None if no drafted token was refused.
        """
        self._acceptance.observe(accepted / max(reached, 1), reached)
        if rank is not None:
            for place, hits in enumerate(self._hits, start=1):
                hits.observe(place == rank)

    def hit_rates(self) -> list[float]:
        """Returns how often each alternative is correct if the draft's own guess is not: [RANKS - 1]."""
        return [hits.value(0.0) for hits in self._hits]

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
        """Returns the likeliest verdicts that refuse a drafted token; their ranks are at least 1."""
        ways = self.likeliest(acceptance_rate, depth, RANKS * (depth + 1))
        return [way for way in ways if way.accepted < depth][:count]
