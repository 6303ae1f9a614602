"""A target that verifies its own drafter's Drafts by itself: how far, how deep, and what stops it."""

from collections.abc import Iterator, Sequence

import pytest

from outrider.decoding.draft import Draft, SparseProbs
from outrider.decoding.lease import Lease
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.drafters import registry
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.loop.engine import Engine
from outrider.engine.sequence import EngineSequence
from outrider.engine.work import Decode, Decoded, plain_decoding
from tests.fakes.target_drafter import ROW, NgramHead
from tests.support.demo_pair import prompt_of
from tests.support.target_drafters import TOKENS, engine_with, plain_texts

PROMPT = prompt_of("json")
START = len(PROMPT)
END = START + TOKENS
DEPTH = 4


@pytest.fixture(scope="module")
def target() -> Iterator[Engine]:
    rows = dict(registry._ROWS)
    registry.register(ROW)
    yield engine_with(ROW.name)
    registry._ROWS.clear()
    registry._ROWS.update(rows)


@pytest.fixture(autouse=True)
def often_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Drafts are what plain decoding says, but for every seventh token."""

    def propose(self: NgramHead, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [
            Draft.chain(guesses(len(request.sequence.tokens) - START, request.depth)) for request in requests
        ]

    monkeypatch.setattr(NgramHead, "propose", propose)


def guesses(start: int, count: int) -> list[int]:
    places = range(start, min(start + count, TOKENS))
    return [text()[place] ^ (place % 7 == 6) for place in places]


@pytest.fixture
def sequence(target: Engine) -> Iterator[EngineSequence]:
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True, temperature=0.7)
    opened = target.open(START, noise_key(1, 0, PROMPT), sampling)
    yield opened
    target.close(opened)
    assert not target.has_work


def text(count: int = TOKENS) -> tuple[int, ...]:
    """The beginning of what plain decoding says."""
    return plain_texts(0.7)[0][:count]


def begin(target: Engine, sequence: EngineSequence, until: int, depth: int = DEPTH) -> None:
    target.submit(Decode(sequence.number, 0, PROMPT, Draft(), 1, Lease(until, depth, drafter=ROW.name)))


def step(target: Engine) -> Decoded:
    (result,) = target.step()
    assert isinstance(result, Decoded)
    return result


def run(target: Engine) -> list[Decoded]:
    found = []
    while target.has_work:
        found.append(step(target))
    return found


def said(verdicts: list[Decoded]) -> tuple[int, ...]:
    return tuple(token for verdict in verdicts for token in verdict.verdict.tokens)


def test_each_draft_is_verified_at_once_and_the_text_is_that_of_plain_decoding(
    target: Engine, sequence: EngineSequence
) -> None:
    begin(target, sequence, END)
    *found, last = run(target)
    assert said([*found, last]) == text()
    assert last.finish == "length"
    assert all(result.continues and result.draft for result in found)
    assert not last.continues
    assert {len(result.verdict.accepted) for result in found} > {0, DEPTH}
    assert {result.round for result in found} == {1}


def test_lease_ends_and_target_waits_with_its_draft(target: Engine, sequence: EngineSequence) -> None:
    until = START + TOKENS // 2
    begin(target, sequence, until)
    found = run(target)
    length, draft = len(sequence.tokens), found[-1].draft
    assert until <= length <= until + DEPTH
    assert draft
    assert not found[-1].continues
    target.submit(Decode(sequence.number, length, (), draft, 2))
    assert said([*found, *run(target)]) == text(len(sequence.tokens) - START)


def test_without_leave_it_waits_after_each_verdict(target: Engine, sequence: EngineSequence) -> None:
    begin(target, sequence, 0)
    (first,) = run(target)
    assert first.draft
    assert not first.continues


def test_top_up_moves_the_end_and_what_comes_with_verdicts(target: Engine, sequence: EngineSequence) -> None:
    begin(target, sequence, START + 1)  # in force once the first token is there: no further
    target.submit(Decode(sequence.number, START, (), Draft(), 1, Lease(END, 2, drafter=ROW.name)))
    found = [step(target)]
    assert found[-1].draft is not None
    assert found[-1].draft.depth == 2
    target.submit(Decode(sequence.number, START, (), Draft(), 1, Lease(END, 0)))
    last = step(target)
    assert (last.draft, last.continues) == (None, False)
    assert said([*found, last]) == text(len(sequence.tokens) - START)


def test_top_up_that_crosses_the_verdict_after_which_it_waits_changes_nothing(
    target: Engine, sequence: EngineSequence
) -> None:
    begin(target, sequence, START + 1)
    found = run(target)
    target.submit(Decode(sequence.number, START, (), Draft(), 1, Lease(END, DEPTH, drafter=ROW.name)))
    assert not target.has_work
    target.submit(Decode(sequence.number, START + len(said(found)), (), Draft(), 2))
    assert said([*found, *run(target)]) == text(len(sequence.tokens) - START)


def test_next_request_ends_what_the_target_did_by_itself(target: Engine, sequence: EngineSequence) -> None:
    """The sender has not seen the last Verdict: its tokens are said once more."""
    begin(target, sequence, END)
    found = [step(target), step(target)]
    seen = said(found)
    unseen = step(target)
    assert unseen.verdict.tokens
    target.submit(plain_decoding(sequence.number, START, seen, TOKENS - len(seen)))
    plain: tuple[int, ...] = ()
    while target.has_work:
        for token in target.step():
            assert isinstance(token, Decoded)
            plain += (token.verdict.tokens[-1],)
    assert seen + plain == text()


def test_draft_sent_ahead_is_verified_instead_of_the_targets_own(
    target: Engine, sequence: EngineSequence
) -> None:
    begin(target, sequence, END)
    found = [step(target), step(target)]
    known = len(sequence.tokens)
    right = Draft.chain(text()[known - START : known - START + DEPTH + 4])
    target.submit(Decode(sequence.number, START, text(known - START), right, 1))
    first = step(target)
    assert first.draft
    assert not first.continues
    second = step(target)
    foreseen = right.after(first.verdict.tokens)
    assert second.verdict.tokens[: len(foreseen)] == foreseen.tokens
    assert said([*found, first, second]) == text(len(said([*found, first, second])))


def test_closing_ends_it(target: Engine, sequence: EngineSequence) -> None:
    begin(target, sequence, END)
    step(target)
    target.close(sequence)
    assert not target.has_work


def test_by_blocks_it_waits_since_a_verdict_has_read_the_noise_of_the_next(
    target: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    certain = [SparseProbs((7,), (1.0,))] * DEPTH
    monkeypatch.setattr(NgramHead, "propose", lambda self, requests: [Draft.chain([7] * DEPTH, certain)])
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True, verification="block")
    opened = target.open(START, noise_key(1, 0, PROMPT), sampling)
    begin(target, opened, END)
    (first,) = run(target)
    assert first.draft
    assert not first.continues
    target.close(opened)
