"""Draft trees: depths, paths and the ancestor mask agree with each other, whatever the tree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.draft import ROOT, Draft, SparseProbs
from decoding.verify import verify_coupled


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    """Any tree of up to 12 nodes over a small vocabulary, siblings different."""
    nodes: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(0, 12))):
        node = draw(st.integers(ROOT, len(nodes) - 1)), draw(st.integers(0, 5))
        if node not in nodes:
            nodes.append(node)
    return Draft(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes))


@given(trees())
def test_a_path_leads_from_the_root_to_its_node(draft: Draft) -> None:
    for node in range(len(draft)):
        path = draft.path(node)
        assert path[-1] == node
        assert [draft.parents[step] for step in path] == [ROOT, *path[:-1]]
        assert len(path) == draft.depths[node] + 1
    assert draft.path(ROOT) == ()


@given(trees())
def test_the_ancestor_mask_shows_each_node_its_path(draft: Draft) -> None:
    for node, row in enumerate(draft.ancestor_mask()):
        assert [other for other, visible in enumerate(row) if visible] == sorted(draft.path(node))


@given(trees())
def test_every_node_is_the_child_of_its_parent(draft: Draft) -> None:
    for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True)):
        assert draft.child(parent, token) == node
        assert draft.child(parent, 99) is None


@given(trees(), st.data())
def test_a_coupled_verdict_is_the_longest_path_that_the_target_says(
    draft: Draft, data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.integers(0, 5), min_size=len(draft) + 1, max_size=len(draft) + 1))
    verdict = verify_coupled(draft, chosen)
    assert len(verdict.tokens) == len(verdict.accepted) + 1
    before = ROOT
    for node, token in zip(verdict.accepted, verdict.tokens[:-1], strict=True):
        assert (draft.parents[node], draft.tokens[node]) == (before, token)
        assert token == chosen[1 + before]
        before = node
    assert verdict.tokens[-1] == chosen[1 + before]
    assert draft.child(before, verdict.tokens[-1]) is None


@given(st.lists(st.integers(0, 5)))
def test_a_chain_is_a_tree_with_one_branch(tokens: list[int]) -> None:
    draft = Draft.chain(tokens)
    assert draft.is_chain
    assert draft.depths == tuple(range(len(tokens)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": (1, 2), "parents": (ROOT,)}, "parents has 1 entries"),
        ({"tokens": (1,), "parents": (0,)}, r"parents\[0\]=0"),
        ({"tokens": (1,), "parents": (-2,)}, r"parents\[0\]=-2"),
        ({"tokens": (3, 3), "parents": (ROOT, ROOT)}, "siblings"),
        (
            {
                "tokens": (1, 2),
                "parents": (ROOT, ROOT),
                "draft_probs": (SparseProbs((1,), (1.0,)), SparseProbs((2,), (1.0,))),
            },
            "chain",
        ),
    ],
)
def test_what_is_no_tree_is_refused(fields, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Draft(**fields)
