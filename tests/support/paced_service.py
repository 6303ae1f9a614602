"""Simulated service with a pace, under changes of load and acceptance, noise and failures."""

import random
from collections.abc import Iterable

from outrider.drafters import registry
from outrider.drafters.registry import Place
from outrider.pace.acceptance import SequenceAcceptance, TaskAcceptance
from outrider.pace.controller import Pace
from outrider.pace.costs import RoundTimes
from outrider.pace.experts import NO_EXPERTS
from outrider.pace.sequence import PacedSequence
from outrider.pace.settings import PaceSettings
from outrider.pace.step import Step, StepSize


class Service:
    """One target, one draft and ``streams`` sequences of one task, which all take part in every round."""

    def __init__(
        self, streams: int = 1, settings: PaceSettings | None = None, drafter: str = "model"
    ) -> None:
        self.pace = Pace(settings or PaceSettings())
        self.drafter = registry.drafter(drafter)
        self.task = TaskAcceptance()
        self.drawn = random.Random(0)
        self.rate = 0.8  # acceptance rate
        self.further = 0  # accepted tokens per round in addition to the requested chain
        self.noise = 0.0
        self.foreseen = 0.0  # share of Verdicts for which draft-ahead has prepared
        self.draft_step = 2e-3
        self.token = 0.3e-3  # seconds per token beyond 32
        self.experts = NO_EXPERTS  # experts that steps read
        self.reading = 0.0  # seconds to read all experts
        self.deep_waiting = 0.0  # waiting of Drafts with more than 2 tokens, as a share of the target's step
        self.waiting = 0.0  # waiting of a Draft at the target, as a share of its step; not in the costs
        self.late = 0.0  # share of Drafts that are late, after a wait of one step
        self.slowed = 0.0  # slowdown of the target's step by a draft on its device, as a share of the step
        self.steps = 0
        self.seconds, self.tokens = 0.0, 0  # time of all steps, and decoded tokens
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

    @property
    def plain_step(self) -> float:
        """Seconds of a step if no sequence has a Draft."""
        return self._step(len(self.sequences))

    def _step(self, tokens: int) -> float:
        reading = self.reading * float(self.experts.share(len(self.sequences), tokens))
        return 15e-3 + self.token * max(0, tokens - 32) + reading

    def _about(self, seconds: float) -> float:
        return seconds * self.drawn.uniform(1 - self.noise, 1 + self.noise)

    def _judged(self, depth: int) -> tuple[int, int]:
        accepted = next((i for i in range(depth) if self.drawn.random() >= self.rate), depth)
        return accepted, min(accepted + 1, depth)

    def run(self, rounds: int) -> list[float]:
        """Runs rounds and returns the mean depth of each round."""
        return [self._round() for _ in range(rounds)]

    def _round(self) -> float:
        streams = len(self.sequences)
        depths = {sequence: self.pace.depth(sequence) for sequence in self.sequences}
        self.pace.refresh()  # refreshed while the drafter works, before the Verdict on its Draft
        tokens = streams + sum(depths.values())
        self.steps += 1
        seconds = self._about(self._step(tokens))
        seconds *= 1.0 + self.slowed * any(depths.values())
        read = float(self.experts.share(streams, tokens))
        step = Step(self.steps, StepSize(streams, tokens), seconds, read)
        # No sequence decodes while a target drafter drafts between two steps.
        between = 1e-3 + (max(depths.values()) + 0.5) * self.draft_step if any(depths.values()) else 0.0
        between *= self.drafter.waits_in_step
        self.seconds += seconds + between
        self.tokens += streams
        for sequence, depth in depths.items():
            sequence.length += 1
            self.pace.observe_target(step, running=streams)
            if depth and self.late and self.drawn.random() < self.late:
                self.pace.observe_late(sequence, step.seconds)
                self.pace.observe_plain(sequence, step.seconds)
            elif depth:
                self.pace.observe_drafting(
                    sequence, Step(self.steps, StepSize(1, 1), self._about(self.draft_step))
                )
                passes = 1 if self.drafter.is_parallel else depth
                seconds = 1e-3 + (passes + 0.5) * self.draft_step
                could_hide = min(seconds, 15e-3)
                foreseen = self.drawn.random() < self.foreseen if self.foreseen else None
                accepted, reached = self._judged(depth)
                self.tokens += accepted + self.further
                self.pace.observe_round(
                    sequence,
                    accepted,
                    reached,
                    RoundTimes(
                        depth,
                        seconds - (could_hide if foreseen else 0.0),
                        1e-3,
                        step.seconds * (1 + self.waiting + (self.deep_waiting if depth > 2 else 0.0)),
                        foreseen,
                    ),
                    self.further,
                )
            if depth:
                continue
            self.pace.observe_plain(sequence, step.seconds + between)
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


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)
