"""Drafts of the nodes that pay: a target drafter's guesses, and those of indices over the text. Torch-free.

Under coupled verification a node is accepted if and only if it is what the target says there, whoever guessed
it. So a part of a Draft is a Draft, and so is the union of several Drafts. Nodes are taken best first, by the
survival that they promise. How often a guess is correct once its parent is, the text tells of every guess
whose parent was correct, whether the target verified it or not.

Source: a retrieved tree is merged with a draft model's in Quan et al., "RASD: retrieval-augmented speculative
decoding", 2025; survival by what each source has earned is ours.
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

DEEPEST = 16  # tokens: no index guesses deeper
MOST_DOUBLINGS = 4  # doublings of matched tokens that are told apart: 8 and more count as alike
MOST_CERTAIN = 4  # logit from which promises count as alike: a probability of 0.98
MOST_NODES = 31  # nodes: with the last token 32, which a GPU's captured graphs take of a sequence
# Chosen, not measured.
MEMORY = 400.0  # guesses after which an observation weighs 1/e
PRIOR_GUESSES = 8.0  # guesses that the prior rate counts as


class Role(Enum):
    """Place of a guess in the target drafter's Draft."""

    CHAIN = "chain"
    ALTERNATIVE = "alternative"
    BESIDE = "beside"  # only indices guess it, and the Draft has another guess there
    BEYOND = "beyond"  # only indices guess it, and the Draft has no guess there


# Rates at which guesses are correct once the guess before them is, until that is known. Chosen, not measured.
PRIOR_RATES = {Role.CHAIN: 0.7, Role.ALTERNATIVE: 0.1, Role.BESIDE: 0.1, Role.BEYOND: 0.5}
PRIOR_RATES_OF_PREDICTIONS = {**PRIOR_RATES, Role.BESIDE: 0.8, Role.BEYOND: 0.8}  # the request says so


class Kind(NamedTuple):
    """Guesses that count as alike."""

    role: Role
    source: int = 0  # number of the first index that guesses it, or else of the first that guesses there
    matched: int = 0  # doublings of the newest tokens that this index knew; 0: none guesses there
    agreeing: int = 0  # indices that guess it
    promised: int | None = None  # its drafter's promise, as a rounded logit; None: it promises nothing


class LearnedRates:
    """Learns how often guesses of each kind are correct, once the guess before them is."""

    def __init__(self, priors: Sequence[Mapping[Role, float]] = (PRIOR_RATES,)) -> None:
        """priors: rates of each index until guesses are known."""
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
        """Learns from a guess that the text has judged."""
        self._rates.setdefault(kind, Rate(MEMORY)).observe(is_correct)


@dataclass(frozen=True)
class _Guess:
    token: int
    parent: int  # index of the guess before it, or ROOT
    kind: Kind
    survival: float  # probability that it and all guesses before it are correct


class _Said(NamedTuple):
    """Guess of an index."""

    node: int
    source: int  # number of the index
    matched: int  # as in Kind


class DraftUnion:
    """Chooses the nodes of one text's Drafts, among them those of indices."""

    def __init__(self, indices: Sequence[ScoredIndex] = (), past: Sequence[int] = ()) -> None:
        """
        Args:
            indices: what guesses from the text. Of equal guesses the first index counts as the source.
            past: tokens that the indices take in before the text.
        """
        self._indices = indices
        self._past = past
        self._rates = LearnedRates()  # rates of the drafter that made the newest Draft
        self._guesses: list[_Guess] = []  # newest guesses, also those that were not worth a node
        self._base = 0  # tokens of the text that they follow

    def take_in(self, text: Sequence[int], most: int) -> int:
        """Takes new tokens in, ``most`` at the most, and those before the text first; returns how many."""
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
        """Returns how many tokens the indices have taken in."""
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
        """Returns a Draft of the best guesses: the likeliest path first, then the guesses next to it.

        No index guesses before all of the text is taken in.

        Args:
            text: committed tokens, at least those of the last call.
            draft: Draft of a target drafter.
            rates: learned from all sequences of that drafter.
            nodes: number of nodes that are taken if their price is not known.
            least_survival: probability from which a node pays; 0: not known.
            ends: tokens that end the text; no guess follows them.
            promises: probability of each node of the Draft if its parent is accepted; empty: not known.
        """
        self._learn(text)
        self._rates = rates
        found: list[Continuation] = []
        if self._known == len(self._past) + len(text):
            found = [index.guess(DEEPEST) for index in self._indices]
        self._guesses, self._base = self._merged(draft, promises, found, ends), len(text)
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
        said: defaultdict[int, list[_Said]] = defaultdict(list)  # what indices say, by the node before it
        for number, guessed in enumerate(found):
            newest = ROOT
            for token in takewhile(END.__ne__, guessed.tokens):
                node = places.setdefault((newest, token), len(tokens))
                if node == len(tokens):
                    tokens.append(token)
                    parents.append(newest)
                    roles.append(Role.BESIDE if newest in draft.parents else Role.BEYOND)
                said[newest].append(_Said(node, number, min(guessed.matched.bit_length(), MOST_DOUBLINGS)))
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
    """Returns the kind of a guess. said: what indices say at its place."""
    agreeing = [each for each in said if each.node == node]
    if not said:
        return Kind(role, promised=promised)
    first = (agreeing or said)[0]
    return Kind(role, first.source, first.matched, len(agreeing), promised)


def _logit(promise: float) -> int:
    """Returns the rounded logarithm of the odds, at most MOST_CERTAIN in either direction."""
    least = 1 / (1 + math.exp(MOST_CERTAIN))
    kept = min(max(promise, least), 1 - least)
    return round(math.log(kept / (1 - kept)))


def _best(guesses: Sequence[_Guess], nodes: int, least_survival: float) -> Draft:
    """Returns the Draft of the guesses that survive most often; arguments as for ``united``."""
    # No guess survives more often than its parent, which comes before it: so parents are taken first.
    order = sorted(range(len(guesses)), key=lambda number: (-guesses[number].survival, number))
    if least_survival:
        paying = sum(guess.survival >= least_survival for guess in guesses)
        nodes = max(paying, 1)  # a round judges something
    taken = order[: min(nodes, MOST_NODES)]
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
