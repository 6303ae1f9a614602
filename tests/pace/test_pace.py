"""The pace in a simulated service: loads and acceptance that jump, noise, bad hours."""

import random
from itertools import pairwise

import pytest

from outrider.drafters import registry
from outrider.drafters.registry import Place
from outrider.pace.acceptance import SequenceAcceptance, TaskAcceptance
from outrider.pace.controller import Pace
from outrider.pace.costs import RoundTimes
from outrider.pace.sequence import PacedSequence
from outrider.pace.settings import PaceSettings
from outrider.pace.step import Step, StepSize
from outrider.pace.tuning import TUNING


class Service:
    """One target, one draft and ``streams`` sequences of one task, in rounds that all take part in."""

    def __init__(
        self, streams: int = 1, settings: PaceSettings | None = None, drafter: str = "model"
    ) -> None:
        self.pace = Pace(settings or PaceSettings())
        self.drafter = registry.drafter(drafter)
        self.task = TaskAcceptance()
        self.drawn = random.Random(0)
        self.rate = 0.8  # acceptance
        self.noise = 0.0
        self.foreseen = 0.0  # share of the verdicts
        self.draft_step = 2e-3
        self.token = 0.3e-3  # seconds per token beyond 32
        self.deep_waiting = 0.0  # waiting of a Draft with more than 2 tokens
        self.waiting = 0.0  # waiting of a Draft at the target, as a share of its step; not part of its costs
        self.beside = 0.0  # share of the target's step by which a draft beside it slows it down
        self.steps = 0
        self.sequences: list[PacedSequence] = []
        self.since_probe: dict[PacedSequence, int] = {}
        self.resize(streams)

    def resize(self, streams: int) -> None:
        while len(self.sequences) > streams:
            self.pace.leave(self.sequences.pop())
        while len(self.sequences) < streams:
            sequence = PacedSequence(self.drafter, SequenceAcceptance(self.task), max_depth=16)
            self.sequences.append(sequence)
            self.since_probe[sequence] = 0
            self.pace.join(sequence)

    def _about(self, seconds: float) -> float:
        return seconds * self.drawn.uniform(1 - self.noise, 1 + self.noise)

    def _judged(self, depth: int) -> tuple[int, int]:
        accepted = next((i for i in range(depth) if self.drawn.random() >= self.rate), depth)
        return accepted, min(accepted + 1, depth)

    def run(self, rounds: int) -> list[float]:
        """The mean depth of each round."""
        return [self._round() for _ in range(rounds)]

    def _round(self) -> float:
        streams = len(self.sequences)
        depths = {sequence: self.pace.depth(sequence) for sequence in self.sequences}
        self.pace.refresh()  # as soon as the drafter works: the verdict on its Draft is still to come
        tokens = streams + sum(depths.values())
        self.steps += 1
        seconds = self._about(15e-3 + self.token * max(0, tokens - 32))
        seconds *= 1.0 + self.beside * any(depths.values())
        step = Step(self.steps, StepSize(streams, tokens), seconds)
        for sequence, depth in depths.items():
            sequence.length += 1
            self.pace.observe_target(step, running=streams)
            if depth:
                self.pace.observe_drafting(
                    sequence, Step(self.steps, StepSize(1, 1), self._about(self.draft_step))
                )
                passes = 1 if self.drafter.is_parallel else depth
                seconds = 1e-3 + (passes + 0.5) * self.draft_step
                could_hide = min(seconds, 15e-3)
                foreseen = self.drawn.random() < self.foreseen if self.foreseen else None
                self.pace.observe_round(
                    sequence,
                    *self._judged(depth),
                    RoundTimes(
                        depth,
                        seconds - (could_hide if foreseen else 0.0),
                        1e-3,
                        step.seconds * (1 + self.waiting + (self.deep_waiting if depth > 2 else 0.0)),
                        foreseen,
                    ),
                )
                continue
            self.pace.observe_plain(sequence, step.seconds)
            self.since_probe[sequence] += 1
            if self.since_probe[sequence] >= self.pace.probe_tokens(sequence):
                self.since_probe[sequence] = 0
                if self.drafter.place is Place.TARGET_WORKER:
                    sequence.try_round()
                    continue
                self.pace.observe_drafting(
                    sequence, Step(self.steps, StepSize(1, 1), self._about(self.draft_step))
                )
                self.pace.observe_probe(sequence, *self._judged(4))
        return sum(depths.values()) / streams


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def test_pace_after_one_bad_round_goes_on_drafting():
    service = Service()
    service.rate = 0.0
    service.run(1)
    service.rate = 0.8
    assert min(service.run(10)) > 0


def test_plain_rate_is_computed_from_costs():
    service = Service(streams=4)
    assert service.pace.plain_rate(4) is None
    service.run(60)
    assert service.pace.plain_rate(0) == 0
    assert service.pace.plain_rate(4) == pytest.approx(4 / 15e-3, rel=0.1)


def test_plain_rate_before_any_step_has_decoded_is_unknown():
    """Prompts alone fit to a cost that says nothing of decoding."""
    service = Service()
    for number in range(1, 40):
        prompt = 2 ** (number % 10)
        service.pace.observe_target(Step(number, StepSize(1, 0, prompt), 1e-5 * prompt**1.5), running=1)
        service.pace.refresh()
        assert service.pace.plain_rate(1) is None
    service.steps = 40
    for _ in range(1000):
        service.run(1)
        assert service.pace.plain_rate(1) is None or service.pace.plain_rate(1) < 3 / 15e-3
    assert service.pace.plain_rate(1) == pytest.approx(1 / 15e-3, rel=0.25)


def test_plain_rate_of_a_restless_machine_swings_less_than_its_steps():
    """One fit follows the latest fifty steps; ten seconds of them are published."""
    service, drawn = Service(), random.Random(0)
    told, fits = [], []
    for number in range(1, 3000):
        seconds = 7e-3 * drawn.lognormvariate(0.0, 0.7)
        service.pace.observe_target(Step(number, StepSize(1, 1, 0, 50), seconds), running=1)
        service.pace.refresh()
        if number > 1500:
            told.append(service.pace.plain_rate(1))
            fits.append(1 / service.pace._costs._target.measured(1, 50))
    assert max(told) / min(told) < 1.3 < 1.8 < max(fits) / min(fits)


def test_bad_drafts_are_given_up():
    service = Service()
    service.rate = 0.05
    service.run(100)
    assert mean(service.run(300)) < 0.1


def test_good_drafts_go_deep_and_stay_on():
    service = Service()
    service.rate = 0.95
    service.run(100)
    assert mean(service.run(300)) > 5


@pytest.mark.parametrize(("drafter", "pays"), [("model", False), ("parallel", True)])
def test_pace_uses_a_slow_draft_only_if_it_drafts_in_one_pass(drafter, pays):
    """Its pass takes two thirds of the target's step, as that of 1B in bfloat16 on an L4 beside 70B."""
    service = Service(drafter=drafter)
    service.draft_step = 10e-3
    service.run(200)
    assert (mean(service.run(300)) > 4) is pays


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_load_takes_drafts_away_and_gives_them_back(noise):
    service = Service()
    service.noise, service.rate = noise, 0.7
    service.run(200)
    assert mean(service.run(50)) > 1
    for streams in (2, 4, 8, 16, 32, 64, 128, 256):
        service.resize(streams)
        service.run(20)
    assert mean(service.run(50)) < 0.3
    service.resize(1)
    assert mean(service.run(40)[-20:]) > 1


def test_pace_of_a_new_crowd_is_decided_anew():
    """Decided when it comes, before any of it has told something, by what an earlier crowd has cost."""
    service = Service(streams=256)
    service.rate = 0.6
    service.run(200)
    service.resize(1)
    service.run(200)
    assert service.sequences[0].depth > 1
    service.resize(256)
    assert mean([sequence.depth for sequence in service.sequences]) < 0.3


@pytest.mark.parametrize("rounds", [500, pytest.param(2000, marks=pytest.mark.slow)])
def test_after_a_bad_hour_drafts_are_back_within_200_tokens(rounds):
    service = Service()
    service.rate = 0.02
    service.run(rounds)
    service.rate = 0.9
    assert max(service.run(200)) > 1
    assert mean(service.run(rounds // 2)[-200:]) > 2


def test_pace_uses_a_draft_again_that_was_slow():
    service = Service()
    service.run(100)
    service.draft_step = 60e-3
    service.run(600)
    assert mean(service.run(200)) < 0.2
    service.draft_step = 2e-3
    service.run(400)
    assert mean(service.run(100)) > 2


def test_pace_tries_rounds_again_after_costly_steps():
    """While all is plain nothing tells what drafts would cost now, but for the trials."""
    service = Service(streams=32)
    service.token = 1e-3
    service.run(300)
    assert mean(service.run(100)) < 0.2
    service.token = 0.02e-3
    trials = 6 * PaceSettings().trial_steps
    assert mean(service.run(trials)[-50:]) > 1


def test_rounds_that_take_longer_than_their_costs_say_are_given_up_and_tried_again():
    service = Service(streams=8)
    service.rate, service.waiting = 0.5, 0.8
    service.run(200)
    given_up = service.run(1000)
    assert mean(given_up) < 0.2
    assert max(given_up) > 1
    service.waiting = 0.0
    service.run(1000)
    assert mean(service.run(200)) > 1


def test_pace_in_rounds_finds_out_that_the_draft_slows_the_target():
    """Nothing but a trial of plain decoding tells: each step was taken beside the draft."""
    service = Service(streams=8)
    service.rate, service.beside = 0.7, 1.0
    service.run(1000)
    assert mean(service.run(600)) < 0.3
    service.beside = 0.0
    service.run(1000)
    assert mean(service.run(300)) > 1


def test_plain_decoding_is_believed_where_those_in_rounds_have_just_left():
    """They still count as in rounds until the next decision."""
    service = Service(streams=6)
    for sequence in service.sequences[:2]:
        sequence.max_depth = 0
    service.run(100)
    service.resize(2)
    pace, drafter = service.pace, service.drafter
    before = pace.rate(drafter, [0.8] * 4, 4)
    for _ in range(20):
        pace.observe_plain(service.sequences[0], 0.1)  # many times as long as its step
    assert pace.rate(drafter, [0.8] * 4, 4) >= before


@pytest.mark.parametrize("draft_step", [2.5e-3, 8e-3])
def test_patience_in_plain_decoding_covers_a_guess(draft_step):
    service = Service()
    service.rate, service.draft_step = 0.0, draft_step
    service.run(400)
    (sequence,) = service.sequences
    assert (sequence.depth, sequence.decision.decided_by) == (0, "measured")
    assert sequence.patience_s > 1e-3 + 2 * TUNING.probe_depth * draft_step


def test_each_worker_of_a_draft_is_charged_with_its_own_sequences():
    """A token of a sequence takes the draft half a millisecond, so two workers draft faster than one."""

    def rate(*workers: str) -> float:
        service = Service(streams=16)
        for number, sequence in enumerate(service.sequences):
            sequence.worker = workers[number % len(workers)]
        drawn = random.Random(0)
        for number in range(1, 200):
            size = drawn.choice([1, 2, 4, 8, 16])
            for sequence in service.sequences[: len(workers)]:
                step = Step(number, StepSize(size, size), 2e-3 + 0.5e-3 * size)
                service.pace.observe_drafting(sequence, step)
        service.run(100)
        return service.pace.rate(service.drafter, [0.8] * 8, 8)

    assert rate("first", "second") > 1.1 * rate("only")


def test_rate_of_a_sequence_without_worker_counts_at_a_known_worker():
    """Or a crowd would look like two workers with half of it each."""

    def rate(known: int) -> float:
        service = Service(streams=16)
        for sequence in service.sequences[:known]:
            sequence.worker = "only"
        drawn = random.Random(0)
        for number in range(1, 200):
            size = drawn.choice([1, 2, 4, 8, 16])
            step = Step(number, StepSize(size, size), 2e-3 + 0.5e-3 * size)
            service.pace.observe_drafting(service.sequences[0], step)
        for number in range(1, 60):
            service.pace.observe_target(Step(number, StepSize(16, 16), 15e-3), running=16)
        return service.pace.rate(service.drafter, [0.8] * 8, 8)

    assert rate(8) == rate(16)


def test_rate_ignores_slow_workers_of_other_sequences():
    service = Service(streams=2)
    fast, slow = service.sequences
    fast.worker, slow.worker = "fast", "slow"
    service.run(100)
    service.resize(1)
    before = service.pace.rate(service.drafter, [0.8] * 4, 4)
    for number in range(1, 100):
        service.pace.observe_drafting(slow, Step(number, StepSize(1, 1), 50e-3))
    assert service.pace.rate(service.drafter, [0.8] * 4, 4) == before


@pytest.mark.slow
def test_where_only_deep_rounds_take_longer_than_their_costs_say_they_get_shallower():
    service = Service(streams=8)
    service.rate, service.deep_waiting = 0.7, 2.0
    service.run(1500)
    depths = service.run(300)
    assert sum(1 <= depth <= 2 for depth in depths) > 200


def test_guesses_that_change_nothing_get_rare_for_new_sequences_too():
    service = Service()
    service.rate = 0.05
    service.run(300)
    first = service.sequences[0]
    usual = PaceSettings().probe_tokens
    assert service.pace.probe_tokens(first) > usual
    service.resize(0)
    service.resize(1)
    assert service.pace.probe_tokens(service.sequences[0]) > usual
    service.rate = 0.95
    service.run(200)
    assert service.pace.probe_tokens(service.sequences[0]) == usual


def test_rounds_that_probe_a_drafter_beside_the_target_get_rare_since_all_wait_for_them():
    service = Service(streams=8, drafter="medusa")
    service.rate = 0.05
    service.run(600)
    alone = service.pace.probe_tokens(service.sequences[0]) // 8
    assert alone > PaceSettings().probe_tokens
    assert mean(service.run(600)) < 0.06
    service.rate = 0.95
    service.run(1000)
    assert mean(service.run(200)) > 1
    assert service.pace.probe_tokens(service.sequences[0]) == 8 * PaceSettings().probe_tokens


def test_pace_gives_up_few_slow_rounds_as_soon_as_many():
    """Whoever decodes freely tells nothing of rounds."""
    service = Service(streams=64)
    for sequence in service.sequences[8:]:
        sequence.max_depth = 0
    service.token, service.draft_step = 0.03e-3, 0.5e-3
    assert mean(service.run(200)[100:]) * 64 / 8 > 4
    service.waiting = 2.0
    assert mean(service.run(200)[100:]) * 64 / 8 < 1


def test_noise_does_not_make_it_flap():
    service = Service(streams=8)
    service.noise, service.rate = 0.2, 0.7
    service.run(200)
    depths = service.run(400)
    switched = sum((before > 0) != (after > 0) for before, after in pairwise(depths))
    trials = 1 + 400 // PaceSettings().trial_steps
    assert switched <= 2 * trials  # there and back


def test_drafts_that_are_right_less_than_half_the_time_are_not_given_up_before_costs_are_known():
    first = []
    for seed in range(10):
        service = Service()
        service.drawn = random.Random(seed)
        service.rate, service.draft_step = 0.45, 0.2e-3
        first += service.run(100)[20:]
    assert mean(depth > 0 for depth in first) > 0.9


def test_pace_soon_retries_drafting_that_noise_ended():
    """A first misjudgement does not last until the next trial of one who has long been plain."""
    drafted = []
    for seed in range(10):
        service = Service()
        service.drawn = random.Random(seed)
        service.rate = 0.6
        drafted += [depth > 0 for depth in service.run(150)]
    assert mean(drafted) > 0.7


def test_depth_keeps_the_caps_of_request_and_settings():
    service = Service(streams=2, settings=PaceSettings(max_depth=5))
    service.rate = 0.99
    service.sequences[0].max_depth = 2
    service.run(300)
    assert [service.pace.depth(sequence) for sequence in service.sequences] == [2, 5]


def test_thresholds_decide_where_they_are_asked_for():
    service = Service(streams=32, settings=PaceSettings(policy="thresholds"))
    service.rate = 0.95
    assert set(service.run(100)[-50:]) == {2}
    service.pace.use(PaceSettings(policy="thresholds", half_depth_from=64))
    service.run(2)
    assert set(service.run(10)) == {4}
    service.pace.use(PaceSettings(policy="thresholds", off_from=32))
    service.run(2)
    assert set(service.run(10)) == {0}


def test_depth_is_larger_if_draft_ahead_hides_drafting():
    """A draft that is not worth its time otherwise is, where most of its time is hidden."""
    service = Service()
    service.rate, service.draft_step = 0.7, 12e-3
    service.run(300)
    assert mean(service.run(300)) < 0.3
    ahead = Service()
    ahead.rate, ahead.draft_step, ahead.foreseen = 0.7, 12e-3, 0.9
    ahead.run(300)
    assert mean(ahead.run(1000)) > 0.7


@pytest.mark.parametrize(("rank", "has_leaves"), [(1, True), (4, False)])
def test_runners_up_go_along_once_second_guesses_are_known_to_be_right(rank, has_leaves):
    """Whether a draft worker makes them or heads beside the target; those of heads go on."""
    leaves = {}
    for drafter in ("model", "eagle3"):
        service = Service(drafter=drafter)
        service.rate = 0.6
        service.run(60)
        assert service.sequences[0].alternatives == 0
        for _ in range(20):
            service.pace.observe_rank(service.sequences[0], rank)
        service.run(60)
        leaves[drafter] = service.sequences[0].alternatives
    assert (leaves["model"] > 0) is has_leaves
    assert (leaves["eagle3"] > leaves["model"]) is has_leaves


def test_patience_is_no_longer_than_a_draft_is_worth():
    service = Service()
    service.rate = 0.9
    service.run(200)
    (sequence,) = service.sequences
    usual = 1e-3 + (sequence.depth + 0.5) * service.draft_step
    assert usual < sequence.patience_s < 10 * 15e-3
