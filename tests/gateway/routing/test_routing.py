"""Several drafters for one sequence: the text does not depend on which of them drafts."""

import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.loop import drafter_health
from gateway.loop.factory import LoopFactory
from gateway.loop.loop import SequenceLoop
from gateway.routing import route
from gateway.routing.paces import Paces
from gateway.routing.router import Router
from gateway.routing.tuning import TUNING
from gateway.sequence import GatewaySequence
from gateway.settings import GatewaySettings, Speculation
from gateway.workers.fleet import Fleet
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO
from outrider.learning.backoff import Backoff
from outrider.pace.settings import PaceSettings
from outrider.telemetry.reasons import RouteReason
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget, fleet_of
from tests.support.demo_pair import DRAFTERS, prompt_of
from tests.support.heads import write_medusa
from tests.support.pair import TOKENS, expected, worker_of
from tests.support.patience import LIMIT_S, later
from tests.support.trust import TRUST

DRAFTS = {"model": "model", "copy": "model"}
HEADS = ("medusa", "eagle3")
ALL = ("model", "suffix", "copy", *HEADS, "ngram", "model+suffix")
EAGER = PaceSettings(exploration=1.0, probe_tokens=4)
MAX_ANSWERS = 8  # answers of each kind and mode, until every drafter has drafted


@asynccontextmanager
async def deployment(folder: Path) -> AsyncIterator[Fleet]:
    """The demo pair with two heads at its target, and a second draft that agrees with the target."""
    async with AsyncExitStack() as stack:
        checkpoints = {"medusa": write_medusa(folder), "eagle3": DRAFTERS / "eagle3"}
        heads = {name: {"checkpoint": str(checkpoint)} for name, checkpoint in checkpoints.items()}
        workers = [
            await stack.enter_async_context(worker_of("target", 0.0, drafters=heads)),
            await stack.enter_async_context(worker_of("draft", 0.0, draft_ahead=8)),
        ]
        copy = await stack.enter_async_context(worker_of("draft", 0.0, model=str(DEMO / "target")))
        workers.append(replace(copy, draft="copy"))
        fleet = Fleet(lambda: workers, TRUST)
        stack.push_async_callback(fleet.close)
        yield fleet


def rounds_of(
    fleet: Fleet,
    kind: str,
    temperature: float,
    speculation: Speculation,
    drafters: tuple[str, ...] = ALL,
) -> SequenceLoop:
    prompt = prompt_of(kind)
    settings = GatewaySettings(
        model="m",
        tokenizer="t",
        drafters=drafters,
        drafts=DRAFTS,
        target_drafters=HEADS,
        propose_deadline_ms=1e3 * LIMIT_S,
    )
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True, temperature=temperature)
    sequence = GatewaySequence(prompt, sampling, noise_key(1, 0, prompt))
    resolved = speculation.resolved(settings.usual_drafter, EAGER)
    return LoopFactory(fleet, Paces(EAGER), settings).of(sequence, resolved, later(LIMIT_S))


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router changes its mind every few rounds."""
    names = itertools.cycle(name for name in ALL for _ in range(4))
    monkeypatch.setattr(Router, "choice", lambda *_: (next(names), "restless"))
    monkeypatch.setattr(route, "TUNING", replace(TUNING, least_left=4))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_health, "RECOVERY", Backoff(0.001, 30.0))


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_text_with_drafters_that_change_is_unchanged(
    temperature: float, tmp_path: Path, restless: None
) -> None:
    by, kinds = set[str](), ("json", "stories")
    texts = {kind: expected(kind, temperature) for kind in kinds}
    answers = itertools.product(range(MAX_ANSWERS), kinds, ("fixed", "auto"))
    async with deployment(tmp_path) as fleet:
        for answer, kind, mode in answers:
            if answer > 0 and by >= {"model", "copy", "suffix", *HEADS}:
                break  # a Draft by text depends on where the router changes its mind
            speculation = Speculation.model_validate({"mode": mode, "depth": 3})
            rounds = rounds_of(fleet, kind, temperature, speculation)
            text = [token.id async for step in rounds.steps() for token in step.tokens]
            assert text == texts[kind]
            assert rounds.stats.tokens == len(text)
            assert sum(times.total() for times in rounds.stats.routed.values()) > 2
            assert (rounds.stats.lost_drafts, rounds.stats.late_drafts) == (0, 0)
            by |= rounds.stats.drafted_by.keys()
    assert by >= {"model", "copy", "suffix", *HEADS}


async def test_drafter_named_by_a_request_drafts_alone(tmp_path: Path) -> None:
    right = expected("json", 0.7)
    async with deployment(tmp_path) as fleet:
        for name in ("copy", *HEADS, "eagle3+suffix", "model"):
            speculation = Speculation(mode="fixed", depth=3, drafter=name)
            rounds = rounds_of(fleet, "json", 0.7, speculation)
            text = [token.id async for step in rounds.steps() for token in step.tokens]
            assert text == right
            assert rounds.stats.drafted_by.keys() == {name}
            assert rounds.stats.routed == {name: {RouteReason.NAMED: 1}}
            assert not rounds.stats.judged


async def test_heads_that_do_not_draft_are_judged_by_unverified_drafts(tmp_path: Path) -> None:
    right = expected("json", 0.0)
    async with deployment(tmp_path) as fleet:
        rounds = rounds_of(fleet, "json", 0.0, Speculation(mode="fixed", depth=3))
        route = rounds._source._route
        route._judge.watch(map(route.candidate, HEADS))
        text = [token.id async for step in rounds.steps() for token in step.tokens]
    assert text == right
    for name in HEADS:
        assert 0 < rounds.stats.judged[name]["correct"] <= rounds.stats.judged[name]["reached"]
        assert name not in rounds.stats.drafted_by


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(
    ("drafts", "tried"), [HEADS, HEADS[::-1], ("eagle3", "eagle3+suffix"), ("eagle3+suffix", "eagle3")]
)
async def test_head_tried_while_another_head_drafts_makes_a_verified_draft(
    drafts: str, tried: str, tmp_path: Path
) -> None:
    """A Verdict brings the Draft of one target drafter, so a trial takes the place of a Draft."""
    right = expected("json", 0.7)
    async with deployment(tmp_path) as fleet:
        rounds = rounds_of(fleet, "json", 0.7, Speculation(mode="fixed", depth=3), (drafts, tried))
        route = rounds._source._route
        route._judge.watch([route.candidate(tried)])
        text = [token.id async for step in rounds.steps() for token in step.tokens]
        acceptance = route._router._own_acceptance(route._kind, tried)
    assert text == right
    assert rounds.stats.drafted_by.keys() == {drafts, tried}
    assert rounds.stats.drafted_by[tried]["reached"] > 0
    assert acceptance.samples > 0
    assert rounds.stats.routed.keys() == {drafts}


async def test_route_with_a_lost_draft_worker_changes_the_drafter() -> None:
    answer = [*range(1, 101)]
    lost = ScriptedDraft(answer, lost_at=range(4, 1000))
    other = ScriptedDraft(answer, name="copy")
    settings = GatewaySettings(model="m", tokenizer="t", drafters=("model", "copy"), drafts=DRAFTS)
    async with fleet_of(ScriptedTarget(answer, step_s=0.002), lost, other) as fleet:
        sequence = GatewaySequence((5, 6, 7), Sampling(max_tokens=len(answer)), noise_key=1)
        speculation = Speculation(mode="fixed", depth=2).resolved(settings.usual_drafter, PaceSettings())
        rounds = LoopFactory(fleet, Paces(PaceSettings()), settings).of(sequence, speculation, later(60))
        async for _ in rounds.steps():
            pass
    assert sequence.generated == answer
    assert rounds.stats.routed["copy"][RouteReason.LOST] == 1
    assert rounds.stats.drafted_by["copy"]["accepted"] > 40
