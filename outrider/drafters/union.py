"""Drafts of the nodes that pay, from guesses of a target drafter and of indices over the text. Torch-free.

Under coupled verification a node is accepted if and only if it is the target's own token, whoever guessed it.
So a part of a Draft is a valid Draft, and so is the union of several Drafts. Nodes are taken in descending
order of their estimated survival, which is the probability that a node and all its ancestors are correct. It
is a product of learned rates: how often a guess is correct given that its parent is. The text shows this for
every guess whose parent was correct, even if the target did not verify the guess.

Source: Quan et al., "RASD: retrieval-augmented speculative decoding", 2025, merge a retrieved tree with the
tree of a draft model. The estimate of survival from the record of each source is ours.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from typing import NamedTuple

from outrider.decoding.draft import ROOT, Draft
from outrider.drafters.index import ScoredIndex
from outrider.drafters.occurrences import END, Continuation
from outrider.learning.mean import Rate

DEEPEST = 16  # tokens; largest depth of an index's guesses
MAX_DOUBLINGS = 4  # doublings of matched tokens that are distinguished: 8 and more are one class
MAX_LOGIT = 4  # logit from which promises are one class: a probability of 0.98
MAX_UNION_NODES = 31  # nodes; with the last token 32, the most per sequence in captured CUDA graphs
# Chosen, not measured.
MEMORY = 400.0  # guesses after which an observation weighs 1/e
PRIOR_GUESSES = 8.0  # weight of the prior rate in guesses


class Role(Enum):
    """Place of a guess relative to the target drafter's Draft."""

    CHAIN = "chain"
    ALTERNATIVE = "alternative"
    BESIDE = "beside"  # only indices guess it, and the Draft has another guess there
    BEYOND = "beyond"  # only indices guess it, and the Draft has no guess there


# Prior probabilities that a guess is correct given that its parent is. Chosen, not measured.
PRIOR_RATES = {Role.CHAIN: 0.7, Role.ALTERNATIVE: 0.1, Role.BESIDE: 0.1, Role.BEYOND: 0.5}
PRIOR_RATES_OF_PREDICTIONS = {**PRIOR_RATES, Role.BESIDE: 0.8, Role.BEYOND: 0.8}  # from the request


class Kind(NamedTuple):
    """Class of guesses that share a learned rate."""

    role: Role
    source: int = 0  # number of the first index with this guess, else of the first index with any guess
    matched: int = 0  # doublings of the newest tokens that this index matched; 0: no index guesses there
    agreeing: int = 0  # number of indices with this guess
    promised: int | None = None  # rounded logit of the probability that its drafter gives; None: not known


class LearnedRates:
    """Learns how often guesses of each kind are correct, given that their parent is."""

    def __init__(self, priors: Sequence[Mapping[Role, float]] = (PRIOR_RATES,)) -> None:
        """priors: prior rates of each index, which hold until guesses are judged."""
        self._priors = priors
        self._rates: dict[Kind, Rate] = {}

    def rate(self, kind: Kind) -> float:
        """Returns the probability that a guess is correct if its parent is."""
        rate = self._rates.get(kind)
        if kind.promised is None:
            prior = self._priors[kind.source][kind.role]
        else:
            prior = 1 / (1 + math.exp(-kind.promised))
        return prior if rate is None else rate.value(prior, PRIOR_GUESSES)

    def observe(self, kind: Kind, is_correct: bool) -> None:
        """Learns from a guess that the text has confirmed or refuted."""
        self._rates.setdefault(kind, Rate(MEMORY)).observe(is_correct)


@dataclass(frozen=True)
class _Guess:
    token: int
    parent: int  # index of the preceding guess, or ROOT
    kind: Kind
    survival: float  # probability that it and all guesses before it are correct


class _Said(NamedTuple):
    """Guess of an index."""

    node: int
    source: int  # number of the index
    matched: int  # as in Kind


class DraftUnion:
    """Chooses the nodes of one text's Drafts from guesses of its target drafter and of indices."""

    def __init__(self, indices: Sequence[ScoredIndex] = (), past: Sequence[int] = ()) -> None:
        """
        Args:
            indices: indices over the text. If several indices guess a token, the first index is its source.
            past: tokens that the indices read before the text.
        """
        self._indices = indices
        self._past = past
        self._rates = LearnedRates()  # rates of the drafter that made the newest Draft
        self._guesses: list[_Guess] = []  # newest guesses, including guesses that did not become a node
        self._base = 0  # length of the text that these guesses follow, in tokens

    def take_in(self, text: Sequence[int], most: int) -> int:
        """Feeds at most ``most`` new tokens to the indices, past tokens first; returns their number."""
        if not self._indices:
            return 0
        known, before = self._known, len(self._past)
        new = [*self._past[known : known + most]]
        new += text[max(known - before, 0) : max(known + most - before, 0)]
        for index in self._indices:
            index.append(new)
        return self._known - known

    @property
    def _known(self) -> int:
        """Number of tokens that the indices have read."""
        return len(self._indices[0]) if self._indices else 0

    def united(
        self,
        text: Sequence[int],
        draft: Draft,
        rates: LearnedRates,
        nodes: int,
        least_survival: float,
        ends: Collection[int],
        promises: Sequence[float] = (),
    ) -> Draft:
        """Returns a Draft of the best guesses: the likeliest path first, then the other guesses.

        Indices guess only after they have read the whole text.

        Args:
            text: committed tokens; it extends the text of the last call.
            draft: Draft of a target drafter.
            rates: rates that were learned from all sequences of that drafter.
            nodes: number of nodes to take if ``least_survival`` is not known.
            least_survival: survival from which a node pays; 0: not known.
            ends: tokens that end the text; no guess follows them.
            promises: the drafter's probability of each node if its parent is correct; empty: not known.
        """
        self._learn(text)
        self._rates = rates
        found: list[Continuation] = []
        if self._known == len(self._past) + len(text):
            found = [index.guess(DEEPEST) for index in self._indices]
        self._guesses, self._base = self._merged(draft, promises, found, ends), len(text)
        return _best(self._guesses, nodes, least_survival)

    def _learn(self, text: Sequence[int]) -> None:
        """Learns from the newest guesses that the text has reached, and drops all guesses."""
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

    def _merged(
        self,
        draft: Draft,
        promises: Sequence[float],
        found: Sequence[Continuation],
        ends: Collection[int],
    ) -> list[_Guess]:
        """Returns all guesses, each after its parent; those of the Draft come first, in its order."""
        tokens, parents = [*draft.tokens], [*draft.parents]
        roles = [Role.CHAIN] * draft.chain_length + [Role.ALTERNATIVE] * (len(draft) - draft.chain_length)
        places = {key: node for node, key in enumerate(zip(parents, tokens, strict=True))}
        said: defaultdict[int, list[_Said]] = defaultdict(list)  # guesses of indices, by the parent node
        for number, guessed in enumerate(found):
            newest = ROOT
            for token in takewhile(END.__ne__, guessed.tokens):
                node = places.setdefault((newest, token), len(tokens))
                if node == len(tokens):
                    tokens.append(token)
                    parents.append(newest)
                    roles.append(Role.BESIDE if newest in draft.parents else Role.BEYOND)
                said[newest].append(_Said(node, number, min(guessed.matched.bit_length(), MAX_DOUBLINGS)))
                newest = node
                if token in ends:
                    break
        guesses: list[_Guess] = []
        for number, (token, parent, role) in enumerate(zip(tokens, parents, roles, strict=True)):
            promised = _logit(promises[number]) if number < len(promises) else None
            kind = _kind_of(number, role, said.get(parent, ()), promised)
            before = 1.0 if parent == ROOT else guesses[parent].survival
            guesses.append(_Guess(token, parent, kind, before * self._rates.rate(kind)))
        return guesses


def _kind_of(node: int, role: Role, said: Sequence[_Said], promised: int | None) -> Kind:
    """Returns the kind of a guess. said: guesses of indices at the same place."""
    agreeing = [each for each in said if each.node == node]
    if not said:
        return Kind(role, promised=promised)
    first = (agreeing or said)[0]
    return Kind(role, first.source, first.matched, len(agreeing), promised)


def _logit(promise: float) -> int:
    """Returns the rounded logarithm of the odds, at most MAX_LOGIT in either direction."""
    least = 1 / (1 + math.exp(MAX_LOGIT))
    kept = min(max(promise, least), 1 - least)
    return round(math.log(kept / (1 - kept)))


def _best(guesses: Sequence[_Guess], nodes: int, least_survival: float) -> Draft:
    """Returns the Draft of the guesses with the highest survival; arguments as for ``united``."""
    # The survival of a guess never exceeds that of its parent, which precedes it. So parents are taken first.
    order = sorted(range(len(guesses)), key=lambda number: (-guesses[number].survival, number))
    if least_survival:
        paying = sum(guess.survival >= least_survival for guess in guesses)
        nodes = max(paying, 1)  # a round has at least one node
    taken = order[: min(nodes, MAX_UNION_NODES)]
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
