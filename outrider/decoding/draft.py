"""Draft and Verdict: the proposal of a drafter, and the answer of the target. Torch-free."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from msgspec import Struct

MAX_NODES = 1024  # most nodes of a verified Draft, with the branches that draft-ahead adds
SUM_TOLERANCE = 1e-3  # largest accepted difference between the sum of probabilities and 1
ROOT = -1  # parent of a node that follows the last committed token


@dataclass(frozen=True)
class SparseProbs:
    """Distribution from which a drafted token was sampled, stored on its support only."""

    token_ids: tuple[int, ...]  # [support]
    probs: tuple[float, ...]  # [support], sums to 1

    def check(self, drawn: int, vocab_size: int) -> None:
        """Checks that the token was drawn from this distribution.

        drawn: drafted token.

        Raises:
            ValueError: this is not a distribution over the vocabulary, or the token is not in its support.
        """
        if not len(self.token_ids) == len(self.probs) == len({*self.token_ids}):
            raise ValueError("draft_probs: each token id must occur once, with its probability")
        if drawn not in self.token_ids:
            raise ValueError(f"draft_probs: drafted token {drawn} must be in the support it was drawn from")
        largest = max(self.token_ids)
        if min(self.token_ids) < 0 or largest >= vocab_size:
            raise ValueError(f"draft_probs: token id {largest} must be 0 to {vocab_size - 1}")
        if not all(0.0 < prob <= 1.0 + SUM_TOLERANCE for prob in self.probs):
            raise ValueError("draft_probs: each probability must be above 0, and at most 1")
        if not math.isclose(sum(self.probs), 1.0, abs_tol=SUM_TOLERANCE):
            raise ValueError(f"draft_probs: probabilities sum to {sum(self.probs):g}, and must sum to 1")


@dataclass(frozen=True)
class Draft:
    """Proposed tokens as a tree in which each parent comes before its children.

    Node i holds ``tokens[i]`` and follows node ``parents[i]``, or the last committed token if that is ROOT.
    ``draft_probs`` is given only for chains, under rejection sampling and block verification.

    Raises:
        ValueError: lengths differ, a parent does not precede its child, or siblings hold the same token.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    draft_probs: tuple[SparseProbs, ...] = field(default=())

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.tokens):
            raise ValueError(
                f"parents has {len(self.parents)} entries, tokens has {len(self.tokens)}: give one each"
            )
        if not self.is_chain:
            self._check_branches()
        if self.draft_probs and (len(self.draft_probs) != len(self.tokens) or not self.is_chain):
            raise ValueError("draft_probs must be empty or one per node of a chain")

    def _check_branches(self) -> None:
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"parents[{node}]={parent} must be {ROOT} or an earlier node")
        if len(set(zip(self.parents, self.tokens, strict=True))) != len(self.tokens):
            raise ValueError("siblings must hold different tokens")

    @classmethod
    def chain(cls, tokens: Sequence[int], draft_probs: Sequence[SparseProbs] = ()) -> "Draft":
        """Returns a chain: each token follows its predecessor."""
        return cls(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)), tuple(draft_probs))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(ROOT, len(self.tokens) - 1))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node: the number of its ancestors. The position of a node is base + depth."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def depth(self) -> int:
        """Number of tokens of the longest path."""
        return len(self) if self.is_chain else max(self.depths, default=-1) + 1

    def path(self, node: int) -> tuple[int, ...]:
        """Returns the nodes on the path from the root to ``node``, inclusive; empty for ROOT."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def child(self, node: int, token: int) -> int | None:
        """Returns the child of ``node`` (or of ROOT) that holds ``token``; None if there is no such child."""
        return self._children.get((node, token))

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        return {key: node for node, key in enumerate(zip(self.parents, self.tokens, strict=True))}

    @cached_property
    def chain_length(self) -> int:
        """Number of nodes of the leading chain; the nodes after it are alternatives."""
        return next((node for node, parent in enumerate(self.parents) if parent != node - 1), len(self))

    def up_to(self, depth: int) -> "Draft":
        """Returns the Draft of the nodes at the first ``depth`` positions."""
        if depth >= self.depth:
            return self
        return self.part(ROOT, [node for node, before in enumerate(self.depths) if before < depth])

    def leading(self, count: int) -> "Draft":
        """Returns the Draft of the first ``count`` nodes."""
        if count >= len(self):
            return self
        return Draft(self.tokens[:count], self.parents[:count], self.draft_probs[:count])

    def below(self, node: int) -> list[int]:
        """Returns all descendants of ``node`` (or of ROOT), in order."""
        found = {node}
        for later in range(node + 1, len(self)):
            if self.parents[later] in found:
                found.add(later)
        return sorted(found - {node})

    def part(self, node: int, below: Sequence[int]) -> "Draft":
        """Returns the nodes ``below``, all of them descendants of ``node``, as a Draft of their own."""
        index = {node: ROOT} | {later: place for place, later in enumerate(below)}
        return Draft(
            tuple(self.tokens[later] for later in below),
            tuple(index[self.parents[later]] for later in below),
            tuple(self.draft_probs[later] for later in below) if self.draft_probs else (),
        )

    def after(self, tokens: Sequence[int]) -> "Draft":
        """Returns what is left of the Draft after ``tokens`` are committed; empty if no path holds them."""
        if not tokens:
            return self
        path = self.path_of(tokens)
        if len(path) < len(tokens):
            return Draft()
        node = path[-1] if path else ROOT
        return self.part(node, self.below(node))

    def path_of(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Returns the longest path whose tokens are a prefix of ``tokens``, root first."""
        path: list[int] = []
        for token in tokens:
            node = self.child(path[-1] if path else ROOT, token)
            if node is None:
                break
            path.append(node)
        return tuple(path)

    def ancestor_mask(self) -> list[list[bool]]:
        """Returns a bool matrix [nodes, nodes]: row i is true at node i and at each of its ancestors."""
        mask = [[False] * len(self) for _ in self.tokens]
        for node, parent in enumerate(self.parents):
            if parent != ROOT:
                mask[node] = mask[parent].copy()
            mask[node][node] = True
        return mask


class Verdict(Struct, frozen=True):
    """Verdict on a Draft: its accepted nodes, and the tokens that are emitted."""

    accepted: tuple[int, ...]  # nodes along the accepted path, root first
    tokens: tuple[int, ...]  # emitted token ids: accepted nodes, forced tokens, the target's own token
