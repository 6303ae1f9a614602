"""Drafts that grow by a position at a time: chains, and beside them trees of what else is likely.

A chain is what the target would say if the drafter were right: best after best under the keyed noise, or
drawn for rejection sampling and block verification. Beside it grow as many nodes as were asked for, those
that are likeliest to stand.
Each has a probability, given that its parent stands, and what counts is their product along its path.

Where noise is keyed, the noise of the target's choice is known, and only its logits are not. So a token's
probability is not that of the drafter's distribution, which averages over noise. It is the softmax of its
perturbed logits, over the best few: so the target's choice is distributed if its logits differ from the
drafter's by as much as Gumbel noise does. Without noise that is the softmax of logits, as EAGLE-2 has it.

Source: Li et al., "EAGLE-2: faster inference of language models with dynamic draft trees", 2024.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.draft import ROOT, Draft, SparseProbs
from outrider.decoding.grammar import Mask
from outrider.decoding.outcomes import RANKS
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.choosing.sampler import Choices, choose_tokens
from outrider.engine.inputs.step_input import Feed
from outrider.engine.sequence import EngineSequence

TopTokens = tuple[int, ...]  # tokens of a position, best first


@dataclass(frozen=True, eq=False)
class _Node:
    token: int
    parent: "_Node | None"  # None: it follows the last committed token
    depth: int  # tokens up to it, itself included
    score: float  # logarithm of the probability that it is accepted
    is_on_chain: bool


class _Tree:
    """The Draft of one text. It ends at its depth, and each path at an end of the generation."""

    def __init__(self, request: DraftRequest) -> None:
        assert isinstance(request.sequence, EngineSequence)
        self.sequence, self.request = request.sequence, request
        self.is_coupled = request.sequence.sampling.verification == "coupled"
        self.alternatives = request.alternatives if self.is_coupled else 0
        self.chain: list[_Node] = []
        self.probs: list[
            SparseProbs
        ] = []  # probabilities of the chain, under rejection sampling and block verification
        self.top_tokens: list[TopTokens] = []  # at each of the chain's positions
        self.open: list[_Node | None] = (
            [None] if request.depth > 0 else []
        )  # after which tokens are chosen next
        self.fed: list[_Node] = []  # all that ever were, in their order
        self._beside: list[_Node] = []  # the likeliest nodes that are not on the chain
        self._to_feed = self.alternatives  # most nodes to feed
        self._passes = request.depth - 1  # passes that feed some of them

    def rows(self) -> list[ChoiceContext]:
        """Returns the context of choosing a token after each of ``open``."""
        sequence, tree = self.sequence, _draft_of(self.fed)
        generated = sequence.tokens[sequence.prompt_length :]
        nodes = range(len(self.fed) - len(self.open), len(self.fed)) if self.fed else [ROOT]
        masks: list[Mask | None] = [None] * len(nodes)
        if sequence.matcher is not None:
            masks = sequence.matcher.masks(generated, tree, [*nodes])
        paths = [tuple(tree.tokens[above] for above in tree.path(node)) for node in nodes]
        return [sequence.row(generated, *of_node) for of_node in zip(paths, masks, strict=True)]

    def extend(self, choices: Choices, are_sound: list[bool], scores: Sequence[Sequence[float]]) -> list[int]:
        """Nodes after those of ``open``, of which the likeliest are ``open`` now.

        Args:
            are_sound: [len(open)] whether a token may be chosen there.
            scores: [len(open)] logarithms of the probabilities of the top tokens.

        Returns for each of ``open`` the row of the node that it follows.
        """
        found: dict[_Node, int] = {}
        for row, (parent, is_sound) in enumerate(zip(self.open, are_sound, strict=True)):
            if is_sound:
                tokens = self._tokens(choices, row, parent)
                found |= dict.fromkeys(_following(parent, tokens, scores[row]), row)
        on_chain = [node for node in found if node.is_on_chain]
        self.chain += on_chain
        # Of equals the earlier one is kept, so that no node outlives its parent.
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
        """Draft so far: the chain, then its alternatives."""
        beside = sorted(self._beside, key=attrgetter("depth"))
        return replace(_draft_of([*self.chain, *beside]), draft_probs=tuple(self.probs))

    def feed(self, between: int, num_logits: int) -> Feed:
        """Feeds of ``open``, after what the text has cached and all that was fed before.

        Args:
            between: slots from the one to the other that hold something else.
            num_logits: wanted of each of them.
        """
        count = len(self.open)
        tokens, tree = [node.token for node in self.fed[-count:]], _draft_of(self.fed)
        start = self.sequence.cached + between + len(self.fed) - count
        blocks = self.sequence.table[: len(self.sequence.blocks)]
        return Feed(tokens, count * num_logits, start, blocks, None if tree.is_chain else tree)

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
        """Nodes beside the chain that go on from this position: the first leave as much to later ones."""
        return -(-self._to_feed // self._passes) if self._passes > 0 else 0

    def _goes_on(self, node: _Node) -> bool:
        return node.depth < self.request.depth and node.token not in self.sequence.end_token_ids


class Trees:
    """Trees of all requested Drafts."""

    def __init__(self, requests: Sequence[DraftRequest]) -> None:
        self._trees = [_Tree(request) for request in requests]
        most = max((tree.alternatives for tree in self._trees), default=0)
        self._ranks = min(1 + max(most, 1), RANKS)  # the second guess shows the worth of alternatives
        self.unsound: list[int] = []  # indices of requests whose numbers are not finite

    @property
    def growing(self) -> list[int]:
        """[num_rows] of those asked for: one for each node after which a token is chosen next."""
        return [index for index, tree in enumerate(self._trees) for _ in tree.open]

    def grow(self, logits: Tensor, are_finite: Tensor | None = None) -> list[int]:
        """Further nodes after those of ``growing``, from logits [num_rows, vocab_size].

        are_finite: bool [num_rows], of whatever else was computed for them.

        Returns for each that now grows the row of the node that it follows.
        """
        trees = [tree for tree in self._trees if tree.open]
        if are_finite is None:
            are_finite = logits.new_ones(len(logits), dtype=torch.bool)
        rows = [tree.rows() for tree in trees]
        choices, finite = choose_tokens(logits, rows, are_finite, min(self._ranks, logits.shape[1]))
        values = torch.from_numpy(np.concatenate([part.perturbed for part in choices]))
        scores: list[list[float]] = values.log_softmax(dim=1).tolist()
        going_on, first = [], 0
        for tree, of_tree in zip(trees, choices, strict=True):
            own = slice(first, first + len(tree.open))
            are_sound = [*map(min, of_tree.are_sound, finite[own])]
            if not all(are_sound):
                self.unsound.append(self._trees.index(tree))
            going_on += [first + row for row in tree.extend(of_tree, are_sound, scores[own])]
            first = own.stop
        return going_on

    def feeds(self, between: int = 0, num_logits: int = 0) -> list[Feed]:
        """Feeds of what grows, each text's tree in slots of its own. Arguments: those of ``_Tree.feed``."""
        return [tree.feed(between, num_logits) for tree in self._trees if tree.open]

    def drafts(self) -> list[Draft]:
        """Drafts so far."""
        return [tree.draft() for tree in self._trees]

    @property
    def top_tokens(self) -> list[list[TopTokens]]:
        """Top tokens of each Draft, at each position of its chain."""
        return [tree.top_tokens for tree in self._trees]


def with_room(request: DraftRequest, cache: PagedCache, unwritten: int = 0) -> DraftRequest:
    """Limits width and depth by the blocks there are to write to: nobody gives up cache for a guess.

    unwritten: tokens of a chain that need no slot beyond those that the text has cached.
    """
    sequence = request.sequence
    assert isinstance(sequence, EngineSequence)
    end = sequence.cached - unwritten
    if cache.reserve(sequence, end + request.depth + request.alternatives):
        return request
    if cache.reserve(sequence, end + request.depth):
        return replace(request, alternatives=0)
    return replace(request, depth=len(sequence.blocks) * cache.block_size - end, alternatives=0)


def _following(parent: _Node | None, tokens: TopTokens, scores: Sequence[float]) -> list[_Node]:
    """The nodes of these tokens; one that the settings ban has no chance and is none, unless it leads."""
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
