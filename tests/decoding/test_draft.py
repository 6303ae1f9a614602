"""Drafts as trees: paths, positions, ancestors, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.draft import ROOT, Draft, SparseProbs


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Trees of up to 12 nodes over 3 tokens, parents before children, siblings different."""
    nodes: dict[tuple[int, int], None] = {}
    for node in range(draw(st.integers(0, 12))):
        nodes[draw(st.integers(ROOT, min(node, len(nodes)) - 1)), draw(st.integers(0, 2))] = None
    return Draft(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes))


@given(drafts())
def test_a_path_goes_from_the_root_down_by_parents(draft: Draft) -> None:
    for node in range(len(draft)):
        path = draft.path(node)
        assert path[-1] == node
        assert [draft.parents[step] for step in path] == [ROOT, *path[:-1]]


@given(drafts())
def test_a_position_is_one_after_that_of_the_parent(draft: Draft) -> None:
    for node, parent in enumerate(draft.parents):
        assert draft.depths[node] == (0 if parent == ROOT else draft.depths[parent] + 1)
        assert draft.depths[node] == len(draft.path(node)) - 1


@given(drafts())
def test_the_ancestor_mask_marks_the_path_and_nothing_else(draft: Draft) -> None:
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
def test_a_tree_is_a_chain_exactly_if_every_node_follows_the_one_before(draft: Draft) -> None:
    assert draft.is_chain == (len(draft) == 0 or draft.path(len(draft) - 1) == tuple(range(len(draft))))


@given(st.lists(st.integers(0, 5), max_size=6))
def test_a_chain_has_one_branch(tokens: list[int]) -> None:
    draft = Draft.chain(tokens)
    assert draft.is_chain
    assert draft.depths == tuple(range(len(tokens)))


def test_an_empty_draft_has_no_nodes() -> None:
    assert len(Draft()) == 0
    assert Draft().path(ROOT) == ()
    assert Draft().child(ROOT, 0) is None


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
def test_what_is_no_draft_is_refused(
    tokens: tuple[int, ...], parents: tuple[int, ...], draft_probs: tuple[SparseProbs, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Draft(tokens, parents, draft_probs)
