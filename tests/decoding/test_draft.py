"""Drafts as trees: paths, positions, ancestors, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.draft import ROOT, Draft, SparseProbs


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Trees of up to 12 nodes over 3 tokens, parents before children, siblings different."""
    nodes: dict[tuple[int, int], None] = {}
    for node in range(draw(st.integers(0, 12))):
        nodes[draw(st.integers(ROOT, min(node, len(nodes)) - 1)), draw(st.integers(0, 2))] = None
    return Draft(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes))


@given(drafts())
def test_path_goes_from_the_root_down_by_parents(draft: Draft) -> None:
    for node in range(len(draft)):
        path = draft.path(node)
        assert path[-1] == node
        assert [draft.parents[step] for step in path] == [ROOT, *path[:-1]]


@given(drafts())
def test_position_is_one_after_that_of_the_parent(draft: Draft) -> None:
    for node, parent in enumerate(draft.parents):
        assert draft.depths[node] == (0 if parent == ROOT else draft.depths[parent] + 1)
        assert draft.depths[node] == len(draft.path(node)) - 1


@given(drafts())
def test_ancestor_mask_marks_the_path_and_nothing_else(draft: Draft) -> None:
    for node, row in enumerate(draft.ancestor_mask()):
        assert {other for other, seen in enumerate(row) if seen} == set(draft.path(node))


@given(drafts())
def test_children_are_found_by_their_token_and_only_those(draft: Draft) -> None:
    for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True)):
        assert draft.child(parent, token) == node
    assert sum(
        draft.child(parent, token) is not None for parent in range(ROOT, len(draft)) for token in range(3)
    ) == len(draft)


@given(drafts())
def test_tree_is_a_chain_exactly_if_every_node_follows_the_one_before(draft: Draft) -> None:
    assert draft.is_chain == (len(draft) == 0 or draft.path(len(draft) - 1) == tuple(range(len(draft))))


@given(st.lists(st.integers(0, 5), max_size=6))
def test_chain_has_one_branch(tokens: list[int]) -> None:
    draft = Draft.chain(tokens)
    assert draft.is_chain
    assert draft.depths == tuple(range(len(tokens)))


def test_empty_draft_has_no_nodes() -> None:
    assert len(Draft()) == 0
    assert Draft().path(ROOT) == ()
    assert Draft().child(ROOT, 0) is None


def words(draft: Draft) -> set[tuple[int, ...]]:
    """The tokens along each path."""
    return {tokens_to(draft, node) for node in range(len(draft))}


def tokens_to(draft: Draft, node: int) -> tuple[int, ...]:
    return tuple(draft.tokens[step] for step in draft.path(node))


@given(drafts())
def test_below_a_node_is_whatever_has_it_on_its_path(draft: Draft) -> None:
    assert draft.below(ROOT) == list(range(len(draft)))
    for node in range(len(draft)):
        assert draft.below(node) == [later for later in range(len(draft)) if node in draft.path(later)[:-1]]


@given(drafts())
def test_part_has_the_tokens_of_the_whole_along_each_path(draft: Draft) -> None:
    for node in range(ROOT, len(draft)):
        below = draft.below(node)
        part = draft.part(node, below)
        start = len(draft.path(node))
        assert [tokens_to(part, place) for place in range(len(part))] == [
            tokens_to(draft, later)[start:] for later in below
        ]


@given(drafts())
def test_draft_after_a_path_is_what_follows_it(draft: Draft) -> None:
    assert draft.after(()) == draft
    for node in range(len(draft)):
        tokens = tokens_to(draft, node)
        left = draft.after(tokens)
        assert left == draft.part(node, draft.below(node))
        assert words(left) == {
            word[len(tokens) :] for word in words(draft) if word[: len(tokens)] == tokens and word != tokens
        }


@given(drafts(), st.lists(st.integers(0, 2), max_size=5), st.lists(st.integers(0, 2), max_size=5))
def test_tokens_can_be_committed_at_once_or_in_turn(
    draft: Draft, first: list[int], second: list[int]
) -> None:
    if len(draft.path_of(first)) == len(first):
        assert draft.after(first).after(second) == draft.after([*first, *second])


@given(drafts(), st.lists(st.integers(0, 2), max_size=6))
def test_longest_beginning_on_a_path_is_found(draft: Draft, tokens: list[int]) -> None:
    path = draft.path_of(tokens)
    assert path == draft.path(path[-1] if path else ROOT)
    assert tuple(tokens[: len(path)]) == tokens_to(draft, path[-1] if path else ROOT)
    if len(path) < len(tokens):
        assert tuple(tokens[: len(path) + 1]) not in words(draft)


@given(drafts(), st.lists(st.integers(0, 2), max_size=6))
def test_draft_after_tokens_on_no_path_is_empty(draft: Draft, tokens: list[int]) -> None:
    if tokens and tuple(tokens) not in words(draft):
        assert draft.after(tokens) == Draft()


def test_draft_after_a_part_of_a_chain_keeps_its_distributions() -> None:
    drawn_from = [SparseProbs((token, 9), (0.5, 0.5)) for token in (4, 5, 6)]
    left = Draft.chain((4, 5, 6), drawn_from).after((4,))
    assert left == Draft.chain((5, 6), drawn_from[1:])


ONE = SparseProbs((0,), (1.0,))


@pytest.mark.parametrize(
    ("tokens", "parents", "draft_probs", "message"),
    [
        ((1, 2), (ROOT,), (), "parents has 1 entries, tokens has 2"),
        ((1,), (0,), (), r"parents\[0\]=0"),
        ((1, 2), (ROOT, 1), (), r"parents\[1\]=1"),
        ((1,), (-2,), (), r"parents\[0\]=-2"),
        ((1, 1), (ROOT, ROOT), (), "siblings"),
        ((1, 2), (ROOT, 0), (ONE,), "draft_probs"),
        ((1, 2), (ROOT, ROOT), (ONE, ONE), "draft_probs"),
    ],
)
def test_draft_that_is_no_tree_is_refused(
    tokens: tuple[int, ...], parents: tuple[int, ...], draft_probs: tuple[SparseProbs, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Draft(tokens, parents, draft_probs)
