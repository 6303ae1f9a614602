"""The kernel accepts the nodes that verify_coupled accepts; without a GPU it runs in the interpreter."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.draft import ROOT, Draft
from outrider.decoding.settings import Sampling
from outrider.decoding.verify import verify_coupled
from outrider.engine.choosing import sampler
from outrider.engine.choosing.choosing_rows import ChoosingRows
from outrider.engine.inputs.choice_input import INTEGERS, ChoiceInput, DraftRows
from outrider.engine.inputs.paged_input import FEW_QUERIES
from outrider.engine.inputs.told_tokens import told_tokens

verdict = pytest.importorskip("outrider.engine.kernels.verdict", reason="needs triton: pip install triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NOTHING = Draft()
VOCAB_SIZE = 4  # so small that many drafted tokens are accepted


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    nodes = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, VOCAB_SIZE - 1)), max_size=12))
    pairs: list[tuple[int, int]] = []
    for place, token in nodes:
        pair = place % (len(pairs) + 1) - 1, token
        if pair not in pairs:
            pairs.append(pair)
    return Draft(tuple(token for _, token in pairs), tuple(parent for parent, _ in pairs))


def paths(given_drafts: Sequence[Draft], others: int, chosen: list[list[int]]) -> list[tuple[int, ...]]:
    """Accepted nodes of each Draft. others: rows of a piece of work without a Draft, which comes first."""
    counts = [others, *(1 + len(draft) for draft in given_drafts)]
    rows = DraftRows.of([NOTHING, *given_drafts], counts)
    assert rows is not None
    top_tokens = torch.tensor(chosen, dtype=torch.int32, device=DEVICE)
    are_accepted = torch.zeros(len(chosen), dtype=torch.bool, device=DEVICE)
    numbers = torch.from_numpy(rows.numbers).to(DEVICE)
    in_rows = (top_tokens, top_tokens.shape[1], numbers, len(chosen), rows.depth, are_accepted)
    verdict.find_path[(-(-len(chosen) // 8),)](*in_rows, BLOCK=8)
    found, start = [], others
    for draft in given_drafts:
        of_draft = are_accepted[start : start + 1 + len(draft)].tolist()
        assert of_draft[0], "a root is always accepted"
        found.append(tuple(node for node in range(len(draft)) if of_draft[1 + node]))
        start += 1 + len(draft)
    return found


FORK = Draft((1, 2, 3, 3), (ROOT, 0, 0, 1))


@settings(max_examples=40)
@given(st.lists(drafts(), min_size=1, max_size=4), st.integers(0, 3), st.integers(1, 3), st.randoms())
@example([FORK, NOTHING, Draft.chain((1,) * 40)], 2, 2, None)
def test_find_path_accepts_what_verify_coupled_accepts(
    given_drafts: list[Draft], others: int, ranks: int, random: object
) -> None:
    if not any(given_drafts):
        assert DraftRows.of([NOTHING, *given_drafts], [others, *[1] * len(given_drafts)]) is None
        return
    count = others + sum(1 + len(draft) for draft in given_drafts)
    seed = 1 if random is None else random.getrandbits(30)  # type: ignore[attr-defined]
    tokens = torch.randint(0, VOCAB_SIZE, (count, ranks), generator=torch.Generator().manual_seed(seed))
    chosen = (tokens if seed > 1 else torch.ones(count, ranks, dtype=torch.int64)).tolist()
    expected, start = [], others
    for draft in given_drafts:
        of_draft = [best[0] for best in chosen[start : start + 1 + len(draft)]]
        expected.append(verify_coupled(draft, of_draft).accepted)
        start += 1 + len(draft)
    assert paths(given_drafts, others, chosen) == expected


def test_begin_choosing_finds_the_same_path_on_host_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain, a piece of work that verifies nothing, and a tree get the same path on CPU and device."""
    tokens = [1, 2, 0, 7, 1, 3, 3, 5, 2]  # tokens that the rows choose
    logits = torch.nn.functional.one_hot(torch.tensor(tokens), 9).float() * 9
    all_drafts = [Draft.chain((1, 4)), NOTHING, FORK]
    rows = [[ChoiceContext(Sampling(temperature=0.0), 0, 0, (), ())] * count for count in (3, 1, 5)]
    found = []
    for has_kernels in (False, True):
        monkeypatch.setattr(sampler, "_has_kernels", lambda logits, value=has_kernels: value)
        asked = logits.to(DEVICE), ChoosingRows.of(rows), torch.ones(2, dtype=torch.bool, device=DEVICE)
        choices, are_finite = sampler.begin_choosing(*asked, ranks=2, drafts=all_drafts).wait()
        assert are_finite == [True, True]
        assert all(all(choice.are_valid) for choice in choices)
        found.append([choice.path for choice in choices])
    assert found == [[(0,), (), (0, 2)]] * 2
    whole, leading = choices[2].verdict(4), choices[2].verdict(2)
    assert (whole.accepted, whole.tokens) == ((0, 2), (1, 3, 5))
    assert (leading.accepted, leading.tokens) == ((0,), (1, 3)), "a part of the Draft"


@dataclass(frozen=True)
class Judged:
    """Draft of a chain and alternatives, of which some nodes are accepted, after tokens that are known."""

    known: int
    nodes: int  # nodes of the chain
    accepted: int  # nodes of the chain
    alternatives: int
    taken: int | None  # accepted alternative; None: no alternative is accepted


@st.composite
def judged(draw: st.DrawFn) -> Judged:
    known = draw(st.integers(0, 5) | st.just(FEW_QUERIES + 9))  # more than a program reads, as of a prompt
    nodes, alternatives = (draw(st.integers(0, most)) for most in (4, 3))
    accepted = draw(st.integers(0, nodes))
    may_be_taken = alternatives and accepted < nodes
    taken = draw(st.none() | st.integers(0, alternatives - 1)) if may_be_taken else None
    return Judged(known, nodes, accepted, alternatives if nodes else 0, taken)


@settings(max_examples=30)
@given(st.lists(judged(), min_size=1, max_size=4), st.booleans())
@example([Judged(1, 3, 1, 2, 1), Judged(0, 2, 2, 1, None)], True)
@example([Judged(0, 2, 1, 0, None), Judged(FEW_QUERIES + 9, 0, 0, 0, None)], True)
def test_read_verdicts_puts_the_targets_tokens_behind_those_that_are_known(
    drafts: list[Judged], drafted: bool
) -> None:
    """The token after an accepted alternative follows it, wherever their rows are."""
    token_ids, expected, last_rows, ends = list[int](), list[int](), list[int](), list[int]()
    flags, told = list[bool](), list[list[int]]()
    for draft in drafts:
        draft = draft if drafted else Judged(draft.known, 0, 0, 0, None)
        flags += [False, True]  # rows of another sequence
        own = range(len(flags), len(flags) + 1 + draft.nodes + draft.alternatives)
        flags += [True, *(node < draft.accepted for node in range(draft.nodes))]
        flags += [place == draft.taken for place in range(draft.alternatives)]
        token_ids += [7] * draft.known + told_tokens(own, draft.nodes)
        expected += [7] * draft.known + [100 + row for row in own[: 1 + draft.nodes]]
        last_rows.append(len(token_ids) - 1)
        accepted, node = draft.accepted, draft.accepted - 1
        if draft.taken is not None:
            accepted, node = accepted + 1, draft.nodes + draft.taken
        last = own[1 + node]
        ends.append(len(token_ids) - 1 - draft.nodes + accepted)
        expected[ends[-1]] = 100 + last
        told.append([100 + last, accepted, node])
    given_ids = torch.tensor(token_ids, device=DEVICE)
    top_tokens = torch.tensor([[100 + row, 0] for row in range(len(flags))], dtype=torch.int32, device=DEVICE)
    are_accepted = torch.tensor(flags if drafted else [], dtype=torch.bool, device=DEVICE)
    choosing = ChoiceInput.without_choice([3] * len(drafts)).copied(torch.device(DEVICE))
    last_of = torch.tensor(last_rows, device=DEVICE)
    found = verdict.read_verdicts(given_ids, last_of, top_tokens, are_accepted, choosing)
    assert [part.tolist() for part in found] == [ends, told]
    assert given_ids.tolist() == expected
    positions = choosing.integers[INTEGERS.index("position")].tolist()
    assert positions == [accepted for _, accepted, _ in told]
