"""Worker drafters: a row of a user's, which the setting names, drafts in a worker's own process."""

from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from msgspec import structs
from opentelemetry.trace import get_tracer

from gateway.workers.fleet import Fleet
from outrider.demo.prompts import DEMO
from outrider.drafters import registry
from outrider.drafters.registry import DrafterInfo, Place
from outrider.engine.draft_ahead.task_drafter import TokenByToken
from outrider.engine.settings import EngineSettings
from outrider.engine.tasks.propose import Assignment, ProposeTask
from protos.trace_context import context_of
from tests.fakes.spans import TRACEPARENT, Spans
from tests.support.pair import answer, expected, worker_of
from tests.support.process_worker import process_worker
from tests.support.trust import TRUST


class Cautious(TokenByToken):
    """Drafts one token, whatever depth it is asked for."""

    def coupled(self, given: Assignment) -> ProposeTask:
        return super().coupled(replace(given, work=structs.replace(given.work, depth=1)))


ROW = DrafterInfo("cautious", "one token", Place.DRAFT_WORKER, f"{__name__}:Cautious", steps_per_draft=1.5)


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets the row after each test: other tests of this process list all drafters."""
    monkeypatch.setattr(registry, "_ROWS", dict(registry._ROWS))


async def test_worker_drafter_of_a_users_row_drafts_and_changes_no_text(spans: Spans) -> None:
    """Its Drafts are counted under the draft's name, in the answer and in the spans of its rounds."""
    settings = EngineSettings(
        model=str(DEMO / "draft"),
        dtype="float32",
        threads=1,
        cache_memory=2**26,
        worker_drafter=f"{__name__}:ROW",
    )
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(worker_of("target", 0.0))
        draft = await stack.enter_async_context(process_worker("draft", settings))
        fleet = Fleet(lambda: [target, draft], TRUST)
        stack.push_async_callback(fleet.close)
        generation = get_tracer("test").start_span("a generation", context_of(TRACEPARENT))
        text, stats = await answer(fleet, "code", 0.7, generation=generation)
    assert text == expected("code", 0.7)
    rounds = [span.attributes or {} for span in spans.named("round")]
    assert {told["outrider.drafted_by"] for told in rounds} == {"model"} == {*stats.drafted_by}
    assert stats.drafted_by["model"] == {
        "rounds": len(rounds),
        **{name: spans.total(name) for name in ("drafted", "reached", "accepted")},
    }
    assert {told["outrider.depth"] for told in rounds} == {1}
    assert 0 < stats.accepted <= stats.drafted <= stats.rounds
