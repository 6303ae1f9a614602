"""One Draft of two drafters: a target drafter's guesses, and those of an index over the text. Torch-free.

Under coupled verification a node is accepted if and only if it is what the target says there, whoever guessed
it. So the union of two Drafts is a Draft. Its nodes are taken best first, by the survival that they promise.
How often a guess is correct once its parent is, the text tells of every guess whose parent was correct,
whether the target verified it or not.

Source: a retrieved tree is merged with a draft model's in Quan et al., "RASD: retrieval-augmented speculative
decoding", 2025; survival by what each source has earned is ours.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from outrider.decoding.draft import ROOT, Draft
from outrider.drafters.index import ScoredIndex
from outrider.drafters.occurrences import Continuation
from outrider.learning.mean import Rate

DEEPEST = 16  # tokens: the index guesses no deeper
MOST_DOUBLINGS = 4  # doublings of matched tokens that are told apart: 8 and more count as alike
MOST_NODES = 31  # nodes: with the last token 32, which a GPU's captured graphs take of a sequence
# Chosen, not measured.
MEMORY = 400.0  # guesses after which an observation weighs 1/e
PRIOR_GUESSES = 8.0  # guesses that the prior rate counts as


class Role(Enum):
    """Place of a guess in the target drafter's Draft."""

    CHAIN = "chain"
    ALTERNATIVE = "alternative"
    BESIDE = "beside"  # only the index guesses it, and the Draft has another guess there
    BEYOND = "beyond"  # only the index guesses it, and the Draft has no guess there


# Rates at which guesses are correct once the guess before them is, until that is known. Chosen, not measured.
PRIOR_RATES = {Role.CHAIN: 0.7, Role.ALTERNATIVE: 0.1, Role.BESIDE: 0.1, Role.BEYOND: 0.5}
PRIOR_RATES_OF_PREDICTIONS = {**PRIOR_RATES, Role.BESIDE: 0.8, Role.BEYOND: 0.8}  # the request says so


class Kind(NamedTuple):
    """Guesses that count as alike."""

    role: Role
    matched: int  # doublings of the newest tokens that the index knew; 0: it guesses nothing there
    is_of_index: bool


class LearnedRates:
    """Learns how often guesses of each kind are correct, once the guess before them is."""

    def __init__(self, priors: Mapping[Role, float] = PRIOR_RATES) -> None:
        self._priors = priors
        self._rates: dict[Kind, Rate] = {}

    def rate(self, kind: Kind) -> float:
        """Returns the probability that a guess is correct if its parent is."""
        rate = self._rates.get(kind)
        prior = self._priors[kind.role]
        return prior if rate is None else rate.value(prior, PRIOR_GUESSES)

    def observe(self, kind: Kind, is_correct: bool) -> None:
        """Learns from a guess that the text has judged."""
        self._rates.setdefault(kind, Rate(MEMORY)).observe(is_correct)


@dataclass(frozen=True)
class _Guess:
    token: int
    parent: int  # index of the guess before it, or ROOT
    kind: Kind
    survival: float  # probability that it and all guesses before it are correct


class DraftUnion:
    """Adds the guesses of an index over one text to the Drafts of target drafters."""

    def __init__(self, index: ScoredIndex) -> None:
        self._index = index
        self._rates = LearnedRates()  # rates of the drafter that made the newest Draft
        self._guesses: list[_Guess] = []  # newest guesses, also those that were not worth a node
        self._base = 0  # tokens of the text that they follow

    def take_in(self, text: Sequence[int], most: int) -> int:
        """Takes new tokens of the text in, ``most`` at the most; returns how many."""
        known = len(self._index)
        self._index.append(list(text[known : known + most]))
        return len(self._index) - known

    def united(
        self,
        text: Sequence[int],
        draft: Draft,
        rates: LearnedRates,
        nodes: int,
        least_survival: float,
        ends: Collection[int],
    ) -> Draft:
        """Returns a Draft of the best guesses: the likeliest path first, then the guesses next to it.

        The index guesses nothing before it has taken all of the text in.

        Args:
            text: committed tokens, at least those of the last call.
            draft: Draft of a target drafter.
            rates: learned from all sequences of that drafter.
            nodes: number of nodes that are taken in any case.
            least_survival: probability from which further nodes pay.
            ends: tokens that end the text; no guess follows them.
        """
        self._learn(text)
        self._rates = rates
        found = Continuation()
        if len(self._index) == len(text):
            found = self._index.guess(DEEPEST)
        self._guesses, self._base = self._merged(draft, found, ends), len(text)
        return _best(self._guesses, nodes, least_survival)

    def _learn(self, text: Sequence[int]) -> None:
        """Learns from the newest guesses as far as the text has come, and drops them."""
        before = ROOT
        for token in text[self._base :]:
            after = ROOT
            for number, guess in enumerate(self._guesses):
                if guess.parent == before:
                    self._rates.observe(guess.kind, guess.token == token)
                    after = number if guess.token == token else after
            if after == ROOT:
                break
            before = after
        self._guesses = []

    def _merged(self, draft: Draft, found: Continuation, ends: Collection[int]) -> list[_Guess]:
        """Returns the guesses of both, each after its parent; those of the Draft come first, in its order."""
        tokens, parents = [*draft.tokens], [*draft.parents]
        roles = [Role.CHAIN] * draft.chain_length + [Role.ALTERNATIVE] * (len(draft) - draft.chain_length)
        of_index: dict[int, int] = {}  # the index's guesses, by their parents
        newest = ROOT
        for token in found.tokens:
            guess = draft.child(newest, token)
            if guess is None:
                guess = len(tokens)
                tokens.append(token)
                parents.append(newest)
                roles.append(Role.BESIDE if newest in draft.parents else Role.BEYOND)
            of_index[newest], newest = guess, guess
            if token in ends:
                break
        matched = min(found.matched.bit_length(), MOST_DOUBLINGS)
        guesses: list[_Guess] = []
        for number, (token, parent, role) in enumerate(zip(tokens, parents, roles, strict=True)):
            kind = Kind(role, matched if parent in of_index else 0, of_index.get(parent) == number)
            before = 1.0 if parent == ROOT else guesses[parent].survival
            guesses.append(_Guess(token, parent, kind, before * self._rates.rate(kind)))
        return guesses


def _best(guesses: Sequence[_Guess], nodes: int, least_survival: float) -> Draft:
    """Returns the Draft of the guesses that survive most often; arguments as for ``united``."""
    # No guess survives more often than its parent, which comes before it: so parents are taken first.
    order = sorted(range(len(guesses)), key=lambda number: (-guesses[number].survival, number))
    taken = [
        number
        for place, number in enumerate(order[:MOST_NODES])
        if place < nodes or guesses[number].survival >= least_survival
    ]
    likeliest: dict[int, int] = {}  # likeliest guess after each parent
    for number in taken:
        likeliest.setdefault(guesses[number].parent, number)
    chain, newest = [], ROOT
    while newest in likeliest:
        newest = likeliest[newest]
        chain.append(newest)
    nodes_of = [*chain, *sorted({*taken} - {*chain})]
    places = {ROOT: ROOT} | {number: place for place, number in enumerate(nodes_of)}
    return Draft(
        tuple(guesses[number].token for number in nodes_of),
        tuple(places[guesses[number].parent] for number in nodes_of),
    )
