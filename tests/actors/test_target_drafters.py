"""Target drafters: their Drafts come with verdicts, over real gRPC, from a real engine."""

from pathlib import Path
from typing import Any, Literal

import pytest
from opentelemetry.trace import get_tracer

from gateway.loop import lease
from gateway.routing.paces import PaceObserver
from gateway.settings import Speculation
from gateway.workers.streams import WorkerStream
from outrider.decoding.draft import Draft
from outrider.demo.prompts import DEMO
from outrider.drafters import registry
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.loop import target_drafting
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from outrider.pace.acceptance import TaskAcceptance
from outrider.pace.controller import Pace
from outrider.pace.sequence import Decision
from protos import rounds_pb2
from protos.trace_context import context_of
from tests.fakes.scripted import kinds_of
from tests.fakes.spans import TRACEPARENT
from tests.fakes.target_drafter import ROW, NgramHead
from tests.support.checkpoints import write_checkpoint
from tests.support.demo_pair import prompt_of
from tests.support.eagle3 import write_eagle3
from tests.support.heads import write_medusa
from tests.support.pair import TOKENS, answer, expected, pair, rounds_of
from tests.support.patience import eventually
from tests.support.target_drafters import drafters_with

KINDS = ("json", "stories")
START = len(prompt_of("json"))


def of_medusa(folder: Path) -> dict[str, Any]:
    return drafters_with("medusa", write_medusa(folder))


def of_eagle3(folder: Path) -> dict[str, Any]:
    return drafters_with("eagle3", write_eagle3(folder))


def of_early_exit(folder: Path) -> dict[str, Any]:
    return drafters_with("early_exit", layers=4)


def of_colocated(folder: Path) -> dict[str, Any]:
    return drafters_with("colocated", DEMO / "draft")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ROWS", dict(registry._ROWS))
    registry.register(ROW)
    NgramHead.asked = NgramHead.agreed = 0


def with_head(mode: Literal["auto", "fixed"]) -> Speculation:
    return Speculation(mode=mode, depth=4, drafter=ROW.name)


async def spans_of_worker(spans, name: str, count: int) -> list[Any]:
    """They are made a little after their answers."""
    await eventually(lambda: len(spans.named(name)) >= count)
    return spans.named(name)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.7])
async def test_target_drafter_changes_no_text_and_its_drafts_are_counted(temperature):
    async with pair(0, **drafters_with(ROW.name)) as fleet:
        answers = [await answer(fleet, kind, temperature, speculation=with_head("fixed")) for kind in KINDS]
    assert [text for text, _ in answers] == [expected(kind, temperature) for kind in KINDS]
    for text, stats in answers:
        assert stats.tokens == len(text)
        assert stats.rounds > 0
        assert stats.accepted > 0
        assert stats.accepted <= stats.reached <= stats.drafted
        assert (stats.lost_drafts, stats.late_drafts) == (0, 0)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What targets were asked, in order."""
    requests: list[Any] = []
    send = WorkerStream.send

    def sending(self: Any, request: Any) -> None:
        if isinstance(request, rounds_pb2.TargetWorkerRequest):
            requests.append(request)
        send(self, request)

    monkeypatch.setattr(WorkerStream, "send", sending)
    return requests


@pytest.fixture
def often_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Drafts of the target drafter are what the answer to "json" says, but for every seventh token."""
    text = expected("json", 0.7)

    def propose(self: NgramHead, requests: list[DraftRequest]) -> list[Draft]:
        generated = [len(request.sequence.tokens) - START for request in requests]
        places = [
            range(at, min(at + request.depth, TOKENS))
            for at, request in zip(generated, requests, strict=True)
        ]
        return [Draft.chain([text[place] ^ (place % 7 == 6) for place in of_one]) for of_one in places]

    monkeypatch.setattr(NgramHead, "propose", propose)


async def test_target_with_a_lease_drafts_and_verifies_to_the_end(sent, often_right):
    """One message lets it verify its own Drafts."""
    async with pair(0, **drafters_with(ROW.name)) as fleet:
        text, stats = await answer(fleet, "json", 0.7, speculation=with_head("fixed"))
    assert text == expected("json", 0.7)
    assert stats.continued == stats.rounds > 8
    assert kinds_of(sent) == ["verify"]


async def test_lease_is_renewed_before_it_is_used_up(sent, often_right, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_TOKENS", 16)
    async with pair(0, **drafters_with(ROW.name)) as fleet:
        text, stats = await answer(fleet, "json", 0.7, speculation=with_head("fixed"))
    assert text == expected("json", 0.7)
    assert stats.continued > stats.rounds // 2
    assert set(kinds_of(sent)) >= {"verify", "renew"}
    assert {request.decode.lease.until for request in sent} <= {*range(START + 16, START + TOKENS + 1)}


async def test_changed_depth_reaches_a_target_with_a_lease(sent, often_right, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_TOKENS", 8)
    depths = []
    async with pair(0, **drafters_with(ROW.name)) as fleet:
        written = rounds_of(fleet, "json", 0.7, with_head("fixed"))
        text = []
        async for step in written.steps():
            text += [token.id for token in step.tokens]
            if step.round is not None:
                depths.append(step.round.proposal.draft.chain_length)
                written._source._policy.paced.max_depth = 2
    assert text == expected("json", 0.7)
    assert depths[0] == 4
    assert set(depths[-4:]) <= {1, 2}
    renewal = sent[kinds_of(sent).index("renew")]
    assert renewal.decode.lease.depth == 2


async def test_target_with_united_drafts_goes_on_without_the_gateway(sent, often_right):
    """The target unites the Drafts itself, so the next Draft is known with the Verdict."""
    name = f"{ROW.name}+suffix"
    async with pair(0, **drafters_with(ROW.name)) as fleet:
        speculation = Speculation(mode="fixed", depth=4, drafter=name)
        text, stats = await answer(fleet, "json", 0.7, speculation=speculation)
    assert text == expected("json", 0.7)
    assert stats.accepted > 0 < stats.continued
    assert stats.drafted_by.keys() == {name}
    assert {request.decode.lease.drafter for request in sent if request.HasField("decode")} == {name}


async def test_trial_has_a_draft_though_plain_decoding_is_faster(sent, often_right, monkeypatch):
    """Else nothing would tell that rounds pay again."""
    monkeypatch.setattr(Pace, "_decide", lambda self: None)
    async with pair(0, **drafters_with(ROW.name)) as fleet:
        written = rounds_of(fleet, "json", 0.7, with_head("auto"))
        paced = written._source._policy.paced
        paced.decision, paced.turns.left = Decision(0, "measured"), 3
        text = [token.id async for step in written.steps() for token in step.tokens]
    assert text == expected("json", 0.7)
    assert written.stats.rounds >= 3
    assert "plain" in kinds_of(sent)


async def test_target_drafter_gets_the_states_that_chose_the_newest_token():
    async with pair(0, **drafters_with(ROW.name)) as fleet:
        await answer(fleet, "json", 0.0, speculation=with_head("fixed"))
    assert NgramHead.asked > 0
    assert NgramHead.agreed == NgramHead.asked  # at temperature 0


async def test_round_of_a_target_drafter_has_a_span_without_a_wait_for_its_draft(spans):
    generation = get_tracer("test").start_span("a generation", context_of(TRACEPARENT))
    async with pair(0, **drafters_with(ROW.name)) as fleet:
        _, stats = await answer(fleet, "json", 0.0, speculation=with_head("fixed"), generation=generation)
        verified = await spans_of_worker(spans, "verify", stats.rounds)
    generation.end()
    rounds = spans.named("round")
    assert len(rounds) == stats.rounds
    for name in ("drafted", "accepted"):
        assert sum(span.attributes[f"outrider.{name}"] for span in rounds) == getattr(stats, name)
    assert all(span.attributes["outrider.draft_ms"] == 0.0 for span in rounds)
    assert stats.continued > 0
    started = {span.context.span_id for span in spans if span.name in ("round", "plain")}
    assert {span.parent.span_id for span in verified} <= started


async def test_pace_learns_from_rounds_and_decides_the_depth(monkeypatch):
    learned = []
    observe = Pace.observe_round

    def observing(self, sequence, accepted, *observed):
        learned.append((sequence.drafter.name, accepted))
        observe(self, sequence, accepted, *observed)

    monkeypatch.setattr(Pace, "observe_round", observing)
    async with pair(0, **drafters_with(ROW.name)) as fleet:
        text, stats = await answer(fleet, "json", 0.0, speculation=with_head("auto"))
    assert text == expected("json", 0.0)
    assert len(learned) == stats.rounds > 0
    assert {drafter for drafter, _ in learned} == {ROW.name}
    assert sum(accepted for _, accepted in learned) == stats.accepted


async def test_where_the_target_has_no_such_drafter_it_is_plain_decoding():
    async with pair(0) as fleet:
        text, stats = await answer(fleet, "json", 0.0, speculation=with_head("fixed"))
    assert text == expected("json", 0.0)
    assert stats.rounds == 0


async def test_failing_target_drafter_costs_its_drafts_alone(monkeypatch):
    def failing(self, requests):
        raise IndexError("a defect of the drafter")

    monkeypatch.setattr(NgramHead, "propose", failing)
    async with pair(0, **drafters_with(ROW.name)) as fleet:
        text, stats = await answer(fleet, "json", 0.0, speculation=with_head("fixed"))
    assert text == expected("json", 0.0)
    assert stats.rounds == 0


def test_drafter_of_another_place_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path, "llama")
    with pytest.raises(ValueError, match="'ngram' is not loaded by target workers"):
        Engine.from_settings(
            EngineSettings.model_validate(
                {"model": str(folder), "cache_memory": 2**22, **drafters_with("ngram")}
            )
        )


def test_tree_is_cut_to_a_depth():
    assert Draft((1, 2, 3, 4), (-1, 0, 1, 0)).up_to(2) == Draft((1, 2, 4), (-1, 0, 0))


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("settings", [of_medusa, of_eagle3, of_early_exit, of_colocated])
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.7])
async def test_target_drafter_behind_a_real_worker_gives_the_expected_text(settings, temperature, tmp_path):
    given = settings(tmp_path)
    speculation = Speculation(mode="fixed", depth=4, drafter=next(iter(given["drafters"])))
    async with pair(0, **given) as fleet:
        answers = [await answer(fleet, text, temperature, speculation=speculation) for text in KINDS]
    assert [text for text, _ in answers] == [expected(text, temperature) for text in KINDS]
    assert sum(stats.accepted for _, stats in answers) > 0
    for _, stats in answers:
        assert (stats.rounds > 0, stats.lost_drafts, stats.late_drafts) == (True, 0, 0)


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("settings", [of_medusa, of_eagle3, of_early_exit])
async def test_heads_draft_trees_as_wide_as_the_pace_says_and_tell_it_of_their_guesses(
    settings, tmp_path, monkeypatch
):
    ranks, sizes = [], []
    observe = PaceObserver._observe_round

    def observing(self, pace, event):
        sizes.append((event.proposal.draft.chain_length, len(event.proposal.draft)))
        observe(self, pace, event)

    monkeypatch.setattr(PaceObserver, "_observe_round", observing)
    monkeypatch.setattr(TaskAcceptance, "observe_rank", lambda self, rank: ranks.append(rank))
    given = settings(tmp_path)
    speculation = Speculation(mode="fixed", depth=4, drafter=next(iter(given["drafters"])))
    async with pair(0, **given) as fleet:
        answers = [await answer(fleet, text, 0.7, alternatives=3, speculation=speculation) for text in KINDS]
    assert [text for text, _ in answers] == [expected(text, 0.7) for text in KINDS]
    assert {length - chain for chain, length in sizes} == {3}
    assert {chain for chain, _ in sizes} >= {4}
    assert 1 in ranks


async def test_colocated_model_under_a_lease_takes_one_turn_for_all_rounds(sent, tmp_path):
    """One message asks for all rounds of the answer, so no round waits for the gateway."""
    speculation = Speculation(mode="fixed", depth=4, drafter="colocated")
    async with pair(0, **of_colocated(tmp_path)) as fleet:
        text, stats = await answer(fleet, "json", 0.7, speculation=speculation)
    assert text == expected("json", 0.7)
    assert stats.continued == stats.rounds > 4
    assert kinds_of(sent) == ["verify"]


async def test_pace_learns_the_cost_of_a_step_of_the_heads(monkeypatch, tmp_path):
    steps = []
    monkeypatch.setattr(
        Pace, "observe_drafting", lambda self, paced, step: steps.append((paced.drafter.name, step))
    )
    speculation = Speculation(mode="fixed", depth=4, drafter="medusa")
    async with pair(0, **of_medusa(tmp_path)) as fleet:
        _, stats = await answer(fleet, "json", 0.0, speculation=speculation)
    assert {drafter for drafter, _ in steps} == {"medusa"}
    assert len({step.number for _, step in steps}) == len(steps) >= stats.rounds - 1
    assert all(step.seconds > 0 and step.size.sequences == 1 for _, step in steps)


async def test_heads_that_are_nearly_never_right_are_disabled(monkeypatch, caplog):
    """The next thousand positions would be no better: decoding is plain, and the log says so."""
    monkeypatch.setattr(target_drafting, "JUDGED_AFTER", 20)
    monkeypatch.setattr(NgramHead, "propose", lambda self, requests: [Draft.chain([7, 7]) for _ in requests])
    async with pair(0, **drafters_with(ROW.name)) as fleet:
        text, stats = await answer(fleet, "json", 0.0, speculation=with_head("fixed"))
        again, after = await answer(fleet, "json", 0.0, speculation=with_head("fixed"))
    assert text == again == expected("json", 0.0)
    assert stats.reached >= 20 > 0 == after.reached
    (record,) = [record for record in caplog.records if "disabled" in record.message]
    assert (record.levelname, "drafters.ngram_head" in record.message) == ("ERROR", True)
