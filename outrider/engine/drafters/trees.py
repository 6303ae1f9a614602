"""Drafts that grow position by position: chains with alternatives.

A chain has the drafter's best token at each position under the keyed noise. For rejection sampling and block
verification its tokens are drawn instead. The alternatives are the requested number of nodes that are
likeliest to be accepted. Each node has a probability of acceptance, given that its parent is accepted. Its
likelihood is the product of these probabilities along its path.

The drafter knows the keyed noise in advance, but not the target's logits. So a token's probability of
acceptance is not its probability in the drafter's distribution, which averages over noise. It is the softmax
of the perturbed logits over the best tokens. This is the distribution of the target's choice if its logits
differ from the drafter's by Gumbel noise. Without noise it is the softmax of logits, as in EAGLE-2.

Source: Li et al., "EAGLE-2: faster inference of language models with dynamic draft trees", 2024.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.draft import ROOT, Draft, SparseProbs
from outrider.decoding.grammar import Mask
from outrider.decoding.outcomes import RANKS, RANKS_OF_CHAINS, TopTokens
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.choosing.sampler import Choices, choose_tokens
from outrider.engine.inputs.step_input import Feed

LEAST_DOUBT = 1e-4  # least distance of a probability from 0 and 1, so that its logit is finite
DOUBT = 2.0  # factor by which a promise may be too small: calibrated rates prune the Draft again later


@dataclass(frozen=True, eq=False)
class _Node:
    token: int
    parent: "_Node | None"  # None: it follows the last committed token
    depth: int  # number of tokens of its path
    score: float  # logarithm of the probability that it is accepted
    is_on_chain: bool


class _Tree:
    """Draft of one sequence. Each of its paths ends at the requested depth, or earlier at an end token."""

    def __init__(self, request: DraftRequest, is_free: bool) -> None:
        self._is_free = is_free
        self.sequence, self.request = request.engine_sequence, request
        self.is_coupled = self.sequence.sampling.verification == "coupled"
        self.alternatives = request.alternatives if self.is_coupled else 0
        self.chain: list[_Node] = []
        self.probs: list[
            SparseProbs
        ] = []  # probabilities of the chain's tokens, unless verification is coupled
        self.top_tokens: list[TopTokens] = []  # top tokens at each position of the chain
        # Nodes after which tokens are chosen next; None: the last committed token.
        self.open: list[_Node | None] = [None] if request.depth > 0 else []
        self.fed: list[_Node] = []  # all nodes that were fed, in order
        self._beside: list[_Node] = []  # likeliest nodes that are not on the chain
        self._to_feed = self.alternatives  # number of alternatives that may still be fed
        self._passes = request.depth - 1  # number of passes that may still feed nodes

    def rows(self) -> list[ChoiceContext]:
        """Returns the context of the choice of a token after each node of ``open``."""
        sequence, tree = self.sequence, _draft_of(self.fed)
        generated = sequence.tokens[sequence.prompt_length :]
        nodes = range(len(self.fed) - len(self.open), len(self.fed)) if self.fed else [ROOT]
        masks: list[Mask | None] = [None] * len(nodes)
        if sequence.matcher is not None:
            masks = sequence.matcher.masks(generated, tree, [*nodes])
        paths = [tuple(tree.tokens[above] for above in tree.path(node)) for node in nodes]
        return [sequence.row(generated, *of_node) for of_node in zip(paths, masks, strict=True)]

    def extend(self, choices: Choices, are_valid: list[bool], scores: Sequence[Sequence[float]]) -> list[int]:
        """Adds children to the nodes of ``open``, and opens the likeliest children.

        Args:
            are_valid: [len(open)] whether a token may be chosen there.
            scores: [len(open)] logarithms of the probabilities of the top tokens.

        Returns:
            for each newly opened node, the row of its parent.
        """
        found: dict[_Node, int] = {}
        for row, (parent, is_valid) in enumerate(zip(self.open, are_valid, strict=True)):
            if is_valid:
                tokens = self._tokens(choices, row, parent)
                found |= dict.fromkeys(_following(parent, tokens, scores[row]), row)
        on_chain = [node for node in found if node.is_on_chain]
        self.chain += on_chain
        # nlargest keeps the earlier of nodes with equal scores, so no node outlives its parent.
        beside = [node for node in found if not node.is_on_chain]
        self._beside = heapq.nlargest(self.alternatives, self._beside + beside, key=attrgetter("score"))
        newest = [node for node in self._beside if node in found and self._goes_on(node)]
        going_on = [*filter(self._goes_on, on_chain), *newest[: self._quota()]]
        self._to_feed -= sum(not node.is_on_chain for node in going_on)
        self._passes -= 1
        self.open = [*going_on]
        self.fed += going_on
        return [found[node] for node in going_on]

    def draft(self) -> Draft:
        """Returns the Draft so far: the chain, then its alternatives."""
        return replace(_draft_of(self._nodes), draft_probs=tuple(self.probs))

    def feed(self, between: int, num_logits: int) -> Feed:
        """Returns the feed of ``open``, at the slots after the cached tokens and the nodes fed before.

        Args:
            between: number of slots between cached tokens and fed nodes that hold something else.
            num_logits: number of rows of logits wanted for each node.
        """
        count = len(self.open)
        tokens, tree = [node.token for node in self.fed[-count:]], _draft_of(self.fed)
        start = self.sequence.cached + between + len(self.fed) - count
        blocks = self.sequence.blocks
        return Feed(tokens, count * num_logits, start, blocks, None if tree.is_chain else tree)

    def whole_feed(self, back: int) -> Feed:
        """Returns the feed of all fed nodes, starting ``back`` slots before the end of the cached tokens."""
        tree, sequence = _draft_of(self.fed), self.sequence
        branches = None if tree.is_chain else tree
        return Feed([*tree.tokens], len(self.open), sequence.cached - back, sequence.blocks, branches)

    def _tokens(self, choices: Choices, row: int, parent: _Node | None) -> TopTokens:
        if not self.is_coupled:
            token, probs = choices.sample_draft_token(self.request.round, row)
            self.probs.append(probs)
            return (token,)
        top_tokens = choices.top_tokens[row]
        if parent is None or parent.is_on_chain:
            self.top_tokens.append(top_tokens)
        return top_tokens if self.alternatives else top_tokens[:1]

    def _quota(self) -> int:
        """Returns how many alternatives may go on here: the rest is divided evenly over the passes left."""
        if self._is_free:
            return self.alternatives
        return -(-self._to_feed // self._passes) if self._passes > 0 else 0

    def _goes_on(self, node: _Node) -> bool:
        pays = DOUBT * math.exp(node.score) >= self.request.least_survival
        return pays and node.depth < self.request.depth and node.token not in self.sequence.end_token_ids

    @property
    def _nodes(self) -> list[_Node]:
        return [*self.chain, *sorted(self._beside, key=attrgetter("depth"))]

    @property
    def promises(self) -> list[float]:
        """Returns the probability of each node of the Draft, given that its parent is accepted."""
        scores = ((node.score, node.parent.score if node.parent else 0.0) for node in self._nodes)
        return [math.exp(score - before) for score, before in scores]


class Trees:
    """Trees of all requested Drafts."""

    def __init__(self, requests: Sequence[DraftRequest], *, is_free: bool = False) -> None:
        """is_free: whether all logits are known already, so that every node goes on at no cost."""
        self._trees = [_Tree(request, is_free) for request in requests]
        most = max((tree.alternatives for tree in self._trees), default=0)
        self._ranks = min(max(1 + most, RANKS_OF_CHAINS), RANKS)
        self.invalid: list[int] = []  # indices of requests whose numbers are not finite

    @property
    def growing(self) -> list[int]:
        """Index of the Draft for each node after which a token is chosen next: [num_rows]."""
        return [index for index, tree in enumerate(self._trees) for _ in tree.open]

    @property
    def newest(self) -> list[int]:
        """Token of each node of ``growing``, or the last committed token: [num_rows]."""
        return [
            tree.sequence.tokens[-1] if node is None else node.token
            for tree in self._trees
            for node in tree.open
        ]

    def grow(
        self, logits: Tensor, are_finite: Tensor | None = None, confidences: Tensor | None = None
    ) -> list[int]:
        """Adds children to the nodes of ``growing``, from logits [num_rows, vocab_size].

        Args:
            are_finite: bool [num_rows], whether all other numbers computed for a row are finite.
            confidences: [num_rows] the drafter's own logits that the best guess is correct.

        Returns:
            for each node of the new ``growing``, the row of its parent.
        """
        trees = [tree for tree in self._trees if tree.open]
        if are_finite is None:
            are_finite = logits.new_ones(len(logits), dtype=torch.bool)
        rows = [tree.rows() for tree in trees]
        choices, finite = choose_tokens(logits, rows, are_finite, min(self._ranks, logits.shape[1]))
        values = torch.from_numpy(np.concatenate([part.perturbed for part in choices]))
        of_ranks = values.log_softmax(dim=1)
        if confidences is not None:
            of_ranks = _weighed(of_ranks, confidences.cpu())
        scores: list[list[float]] = of_ranks.tolist()
        going_on, first = [], 0
        for tree, of_tree in zip(trees, choices, strict=True):
            own = slice(first, first + len(tree.open))
            are_valid = [*map(min, of_tree.are_valid, finite[own])]
            if not all(are_valid):
                self.invalid.append(self._trees.index(tree))
            going_on += [first + row for row in tree.extend(of_tree, are_valid, scores[own])]
            first = own.stop
        return going_on

    def feeds(self, between: int = 0, num_logits: int = 0) -> list[Feed]:
        """Returns the feeds of all growing Drafts. Arguments: as for ``_Tree.feed``."""
        return [tree.feed(between, num_logits) for tree in self._trees if tree.open]

    def whole_feeds(self, back: int) -> dict[int, Feed]:
        """Returns the feeds of all nodes of growing Drafts, by index of the Draft; open nodes want logits.

        back: number of slots before the end of the cached tokens at which the nodes start.
        """
        return {index: tree.whole_feed(back) for index, tree in enumerate(self._trees) if tree.open}

    def drafts(self) -> list[Draft]:
        """Returns the Drafts so far."""
        return [tree.draft() for tree in self._trees]

    @property
    def promises(self) -> list[list[float]]:
        """Probability of each node of each Draft, given that its parent is accepted."""
        return [tree.promises for tree in self._trees]

    @property
    def top_tokens(self) -> list[list[TopTokens]]:
        """Top tokens of each Draft, at each position of its chain."""
        return [tree.top_tokens for tree in self._trees]


def _weighed(scores: Tensor, confidences: Tensor) -> Tensor:
    """Returns scores [num_rows, ranks], combined with the drafter's own confidence in the best guesses.

    Scores depend on the noise, and confidences on the text. So the odds of a best guess become the geometric
    mean of both. The other guesses share the remaining probability in unchanged proportions.
    """
    first = scores[:, :1].exp().clamp(LEAST_DOUBT, 1.0 - LEAST_DOUBT)
    odds = (first.logit() + confidences[:, None]) / 2
    rest = scores[:, 1:] - (-first).log1p() + logsigmoid(-odds)
    return torch.cat([logsigmoid(odds), rest], dim=1)


def with_room(request: DraftRequest, cache: PagedCache, unwritten: int = 0) -> DraftRequest:
    """Returns the request, limited to the free blocks: no sequence is preempted for a Draft.

    unwritten: number of tokens of a chain that need no slot after the cached tokens.
    """
    sequence = request.engine_sequence
    end = sequence.cached - unwritten
    if cache.reserve(sequence, end + request.depth + request.alternatives):
        return request
    if cache.reserve(sequence, end + request.depth):
        return replace(request, alternatives=0)
    return replace(request, depth=cache.room(sequence) - end, alternatives=0)


def _following(parent: _Node | None, tokens: TopTokens, scores: Sequence[float]) -> list[_Node]:
    """Returns the child nodes with these tokens. Banned tokens are left out, except the first token."""
    depth = 1 if parent is None else parent.depth + 1
    before = 0.0 if parent is None else parent.score
    is_chains = parent is None or parent.is_on_chain
    pairs = enumerate(zip(tokens, scores, strict=False))
    return [
        _Node(token, parent, depth, before + score, is_chains and rank == 0)
        for rank, (token, score) in pairs
        if rank == 0 or score > -torch.inf
    ]


def _draft_of(nodes: Sequence[_Node]) -> Draft:
    index: dict[_Node | None, int] = {None: ROOT} | {node: place for place, node in enumerate(nodes)}
    return Draft(tuple(node.token for node in nodes), tuple(index[node.parent] for node in nodes))
