"""The simulated service: the same code, steps from a table, time that costs nothing."""

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from bench import virtual
from bench.simulate import (
    BRANCHES,
    ENGINES,
    FAR_AHEAD_S,
    MODES,
    NO_AHEAD,
    SETTINGS,
    Pair,
    SimulatedLoad,
    closed_loop,
    measure,
    pairs,
)
from bench.simulated import (
    Ahead,
    SimulatedDraft,
    rank_at,
    simulated_fleet,
)
from bench.simulated_runner import RIGHT
from bench.simulated_worker import Hop
from bench.tables.reading import AHEAD
from gateway.loop.factory import LoopFactory
from gateway.loop.stats import Stats
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence
from gateway.settings import Speculation
from outrider.decoding.settings import Sampling
from outrider.pace.settings import PaceSettings
from outrider.pace.step import StepSize
from tests.support.patience import LIMIT_S

TARGET_S = 15e-3
ACCEPTANCE_RATE = 0.7
ACCEPTANCE = {"code": 0.8, "prose": 0.6, "extraction": 0.9, "creative": 0.3}  # rates per position
FAST_DRAFT = Pair(
    target=lambda size, is_early: TARGET_S + 50e-6 * size.tokens,
    draft=lambda size, is_early: 2e-3 if is_early else 3e-3,
    hop_s=0.3e-3,
)
LOAD = SimulatedLoad(streams=2, prompt_tokens=64, answer_tokens=64, warm_s=2.0, counted_s=4.0)


def hit_rate_for(foreseen_rate: float, acceptance_rate: float, depth: int) -> float:
    """Returns the rate of second guesses at which this share of verdicts is foreseen with all branches.

    A verdict is foreseen if all guesses of the draft are correct, including the guess after its Draft. It is
    also foreseen if the second guess is correct at the first wrong position.
    """
    stands = acceptance_rate ** (depth + 1)
    return min(max((foreseen_rate - stands) / (1.0 - stands), 0.0), 1.0) if stands < 1.0 else 0.0


SLOW = [pytest.mark.slow]
IN_TARGET_BY_4 = Speculation(mode="fixed", depth=4)
ON_ONE_DEVICE = replace(FAST_DRAFT, is_beside=True)


@pytest.mark.parametrize(("streams", "least"), [(1, 1.8), (8, 0.85), pytest.param(32, 0.85, marks=SLOW)])
def test_pace_with_two_workers_on_one_device_notices_that_each_slows_the_other_down(streams, least):
    """Plain decoding keeps the device from the draft, so that many Drafts are late."""
    load = SimulatedLoad(streams, prompt_tokens=64, answer_tokens=256, warm_s=3.0, counted_s=6.0)

    def tokens_per_second(mode: str) -> float:
        return virtual.run(closed_loop(ON_ONE_DEVICE, {"code": 0.8}, MODES[mode], load)).rate(load)

    assert tokens_per_second("pace") >= least * tokens_per_second("plain")


def rate(mode: str, load: SimulatedLoad = LOAD) -> float:
    return virtual.run(closed_loop(FAST_DRAFT, ACCEPTANCE, MODES[mode], load)).rate(load)


def answered(mode: str, lengths: list[int], ahead: Ahead) -> Stats:
    """What was done for answers of these lengths, all at once; each is complete."""

    async def answers() -> Stats:
        stats, paces = Stats(), Paces(PaceSettings())
        speculation = MODES[mode].resolved("model", paces.settings)
        rank_of = partial(rank_at, ACCEPTANCE_RATE, ahead.hit_rate)
        drafts = {"model": SimulatedDraft(FAST_DRAFT.draft, rank_of, ahead)}
        async with simulated_fleet(FAST_DRAFT.target, drafts, FAST_DRAFT.hop_s) as fleet:

            async def answer(number: int, length: int) -> None:
                sequence = GatewaySequence((0,) * 100, Sampling(max_tokens=length), noise_key=number)
                rounds = LoopFactory(fleet, paces, SETTINGS).of(sequence, speculation, FAR_AHEAD_S)
                async for _ in rounds.steps():
                    pass
                assert sequence.generated == [RIGHT] * length
                assert sequence.finish_reason == "length"
                stats.add(rounds.stats)

            await asyncio.gather(*(answer(number, length) for number, length in enumerate(lengths)))
        return stats

    return virtual.run(answers())


def test_virtual_time_of_an_hour_ends_at_once():
    started = time.monotonic()
    virtual.run(asyncio.sleep(3600))
    assert time.monotonic() - started < LIMIT_S


def test_virtual_time_if_nothing_can_happen_raises():
    with pytest.raises(RuntimeError, match="all tasks wait"):
        virtual.run(asyncio.Event().wait())


def test_messages_that_are_sent_at_once_arrive_in_their_order():
    async def arrived() -> list[int]:
        messages: list[int] = []
        hop = Hop(1.0, messages.append)
        for number in range(20):
            hop.send(number)
        await asyncio.sleep(2.0)
        return messages

    assert virtual.run(arrived()) == [*range(20)]


def test_plain_decoding_takes_a_step_a_token():
    step = FAST_DRAFT.target(StepSize(2, 2, context_tokens=200), True)
    assert rate("plain") == pytest.approx(2 / step, rel=0.05)


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=SLOW * (mode != "fixed 4")) for mode in MODES])
@pytest.mark.parametrize("hit_rate", [pytest.param(0.0, marks=SLOW), pytest.param(0.5, marks=SLOW), 1.0])
def test_answers_are_complete(mode: str, hit_rate: float):
    for ahead in (Ahead(), Ahead(12, hit_rate)):
        answered(mode, [300], ahead)
        answered(mode, [1, 2, 3, 5, 40, 41, 42, 150], ahead)


@pytest.mark.slow
def test_verdicts_are_foreseen_as_often_as_is_said():
    rate = hit_rate_for(foreseen_rate=0.7, acceptance_rate=ACCEPTANCE_RATE, depth=2)
    stats = answered("fixed 2", [2000], Ahead(12, rate))
    assert stats.prepared_for > 0.99 * stats.rounds - 1
    assert stats.ahead_hits.total() / stats.prepared_for == pytest.approx(0.7, abs=0.03)
    assert stats.continued > 0.6 * stats.rounds
    assert answered("fixed 2", [300], Ahead()).prepared_for == 0


def rate_of_one(
    target_step_s: Callable[[float], float] = lambda tokens: TARGET_S,
    draft_step_s: float = 2e-3,
    acceptance: float = 1.0,
    foreseen_rate: float = 1.0,
    depth: int = 4,
    ahead: bool = True,
    tokens: int = 400,
) -> float:
    """Tokens per second of one stream from its first Verdict on. Messages take a millisecond one way.

    foreseen_rate: share of verdicts, if there is draft-ahead.
    """
    hit_rate = hit_rate_for(foreseen_rate, acceptance, depth)
    draft = SimulatedDraft(
        lambda size, is_early: draft_step_s,
        partial(rank_at, acceptance, hit_rate),
        Ahead(BRANCHES, hit_rate) if ahead else NO_AHEAD,
    )

    speculation = Speculation(mode="off", drafter="model")
    if depth:
        speculation = Speculation(mode="fixed", depth=depth, drafter="model")

    async def answered() -> list[tuple[float, int]]:
        sequence, loop = GatewaySequence((0,), Sampling(max_tokens=tokens), 0), asyncio.get_running_loop()
        target = lambda size, is_early: target_step_s(size.tokens + size.prompt_tokens)  # noqa: E731
        async with simulated_fleet(target, {"model": draft}, 1e-3) as fleet:
            factory = LoopFactory(fleet, Paces(PaceSettings()), SETTINGS)
            rounds = factory.of(sequence, speculation, FAR_AHEAD_S)
            return [(loop.time(), len(sequence)) async for _ in rounds.steps()]

    (started, first), *_, (ended, last) = virtual.run(answered())
    return (last - first) / (ended - started)


def test_simulated_round_without_draft_ahead_takes_the_steps_of_both_models_and_four_hops():
    assert rate_of_one(depth=0) == pytest.approx(1 / TARGET_S, rel=0.01)
    assert rate_of_one(ahead=False) == pytest.approx(5 / (TARGET_S + 4 * 2e-3 + 4 * 1e-3), rel=0.01)


def test_hops_and_drafts_are_hidden_where_every_verdict_is_foreseen():
    """Five steps of the draft and four hops fit into one step of the target."""
    assert rate_of_one() == pytest.approx(5 / TARGET_S, rel=0.02)


def test_foreseen_draft_when_unfinished_is_kept_as_far_as_it_has_come():
    """The Verdict reaches the draft after 19 ms, in the fourth of five steps: another one and it is there."""
    assert rate_of_one(draft_step_s=5e-3) == pytest.approx(5 / 25e-3, rel=0.02)


def test_slow_draft_bounds_the_rate_by_a_token_per_step():
    rates = [rate_of_one(draft_step_s=12e-3, depth=depth) for depth in (1, 2, 4, 8)]
    assert max(rates) == pytest.approx(1 / 12e-3, rel=0.02)


@pytest.mark.slow
def test_preparing_in_vain_takes_half_a_step_of_the_draft():
    """What is left of the one under way when the Verdict comes, in the mean over targets."""
    draft_s, delays = 4e-3, []
    for number in range(8):
        settings = {"target_step_s": lambda tokens, n=number: 7e-3 + n * draft_s / 8, "draft_step_s": draft_s}
        rate = partial(rate_of_one, acceptance=0.0, foreseen_rate=0.0, tokens=100, **settings)
        delays.append(1 / rate() - 1 / rate(ahead=False))
    assert max(delays) < 1.01 * draft_s
    assert statistics.mean(delays) == pytest.approx(draft_s / 2, rel=0.2)


@pytest.mark.slow
def test_measure_of_a_draft_worker_tells_the_pace_with_draft_ahead_too():
    row = measure(FAST_DRAFT, {"code": 0.7}, replace(LOAD, streams=1), Ahead(12, 1.0))
    assert row["plain"] < row["pace"]
    assert row[AHEAD] > 1.2 * row["pace"]
    assert row["to plain"] == row[AHEAD] / row["plain"]


def test_simulation_repeated_is_the_same():
    assert rate("pace") == rate("pace")


@pytest.mark.slow
@pytest.mark.parametrize(("streams", "acceptance"), [pytest.param(1, 0.5, marks=SLOW), (8, 0.5), (64, 0.8)])
def test_pace_of_a_new_service_is_hardly_slower_than_plain_decoding_in_its_first_second(streams, acceptance):
    """The workers have surveyed their steps. Before they did, the pace gave 0.43, 0.60 and 0.77."""
    load = SimulatedLoad(streams, prompt_tokens=200, answer_tokens=256, warm_s=0.0, counted_s=1.0)

    def tokens_per_second(mode: str) -> float:
        pair = pairs("today")["1B on an L4"]
        return virtual.run(closed_loop(pair, {"code": acceptance}, MODES[mode], load)).rate(load)

    assert tokens_per_second("pace") >= 0.9 * tokens_per_second("plain")


@pytest.mark.slow
def test_drafts_pay_where_the_target_reads_its_weights_for_one_token_as_for_five():
    load = replace(LOAD, streams=1, counted_s=10.0)
    assert rate("fixed 2", load) > 1.1 * rate("plain", load)
    assert rate("pace", load) > 1.1 * rate("plain", load)


@pytest.mark.parametrize("is_beside", [False, True])
def test_positions_after_the_first_are_launched_early(is_beside: bool) -> None:
    steps: list[tuple[float, bool]] = []

    def draft(size: StepSize, is_early: bool) -> float:
        steps.append((size.sequences, is_early))
        return 1e-3

    pair = replace(FAST_DRAFT, draft=draft, is_beside=is_beside)
    load = replace(LOAD, streams=1, prompt_tokens=2, answer_tokens=10_000)
    virtual.run(closed_loop(pair, {"code": 1.0}, MODES["fixed 4"], load))
    surveyed = 1 + max(index for index, (sequences, _) in enumerate(steps) if sequences > 1)
    rounds = steps[surveyed + 1 :][: 4 * 20]  # the first step reads the prompt
    assert [is_early for _, is_early in rounds] == [False, True, True, True] * 20


@pytest.mark.slow
def test_draft_beside_the_target_waits_for_its_steps() -> None:
    load = replace(LOAD, streams=8, counted_s=10.0)
    apart, beside = (replace(FAST_DRAFT, hop_s=0.0, is_beside=beside) for beside in (False, True))
    rates = [
        virtual.run(closed_loop(pair, {"code": 0.8}, MODES["fixed 4"], load)).rate(load)
        for pair in (beside, apart)
    ]
    assert rates[0] < rates[1]


def test_rounds_of_a_draft_in_the_targets_process_wait_for_no_host() -> None:
    steps: list[tuple[float, bool]] = []

    def target(size: StepSize, is_early: bool) -> float:
        steps.append((size.tokens, is_early))
        return TARGET_S

    pair = replace(FAST_DRAFT, target=target, in_target="colocated")
    load = replace(LOAD, streams=1, prompt_tokens=2, answer_tokens=10_000, warm_s=0.0)
    virtual.run(closed_loop(pair, {"code": 1.0}, IN_TARGET_BY_4, load))
    rounds = [is_early for tokens, is_early in steps if tokens == 5][-40:]
    assert len(rounds) == 40
    assert all(rounds)


def test_block_draft_of_any_depth_takes_one_step() -> None:
    drafted: list[float] = []

    def draft(size: StepSize, is_early: bool) -> float:
        drafted.append(size.tokens)
        return 1e-3

    pair = replace(FAST_DRAFT, draft=draft, in_target="dflash")
    load = replace(LOAD, streams=1, prompt_tokens=2, answer_tokens=10_000, warm_s=0.0)
    counter = virtual.run(closed_loop(pair, {"code": 1.0}, IN_TARGET_BY_4, load))
    assert drafted[-40:] == [4] * 40  # steps before these are the survey's
    assert [tokens for _, tokens in counter.commits[-40:]] == [5] * 40


@pytest.mark.slow
def test_pairs_with_each_stage_of_repairs_take_less_time() -> None:
    size = StepSize(8, 8, context_tokens=8 * 4096)
    before, today, repaired = map(pairs, ENGINES)
    assert {*today} - {*before} == {"block draft beside the target"}  # none could be read before
    for name, first in before.items():
        assert first.target(size, False) > today[name].target(size, False)
        assert first.draft(size, False) > today[name].draft(size, False)
        assert repaired[name].hop_s < today[name].hop_s
    on_four = "1B on an H100"
    assert repaired[on_four].target(size, False) < today[on_four].target(size, False)


def test_prompts_are_in_the_cache() -> None:
    pair = pairs("today")["1B on an L4"]
    assert pair.draft(StepSize(1, 0, prompt_tokens=512, context_tokens=512), False) == 0.0
    both = StepSize(2, 1, prompt_tokens=512, context_tokens=712)
    assert pair.draft(both, False) == pair.draft(replace(both, prompt_tokens=0.0), False)
