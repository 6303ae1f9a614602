"""Judges target drafters with the hidden states from one pass of the target over each answer.

A drafter receives the states as in serving: token by token, each before the Draft that follows it. So the
cache of a head has the same content as in serving.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor

from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.drafters.target_drafter import CommittedStates, TargetDrafter
from outrider.engine.drafters.target_drafters import TargetDrafters
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.forward_pass import ForwardPass
from outrider.engine.loop.launched import ONE_POSITION, Finished, Launched, Reach
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.loop.runner import ModelRunner
from outrider.engine.scheduling.scheduler import Selected
from outrider.engine.sequence import NO_DRAFT, EngineSequence
from outrider.engine.settings import EngineSettings
from outrider.engine.tasks.decode import DecodeTask
from outrider.engine.work import Decode
from outrider.learning.agreement import agreement
from workshop.advice.answers import TargetAnswer
from workshop.advice.judged import FIRST, DraftStart, JudgedAnswer
from workshop.advice.judging import NOTHING
from workshop.advice.progress import SILENT, Progress
from workshop.advice.steps import MeasuredSteps

AT_A_TIME = 8  # answers whose hidden states are in memory at a time


class _StateRecorder(ModelRunner):
    """Records the states of committed tokens by cache block, because sequences share blocks."""

    def __init__(self, forward: ForwardPass) -> None:
        super().__init__(forward, None)
        self._states: dict[tuple[int, int], Tensor] = {}  # [num_layers, hidden_size] by block and place

    def run(
        self,
        selected: Selected,
        launched: Launched | None = None,
        following: Sequence[DecodeTask] = (),
        reach: Reach = ONE_POSITION,
    ) -> Finished:
        finished = super().run(selected, launched, following, reach)
        for (_, item), choices in zip(selected, finished.choices, strict=True):
            if choices.hidden is None:
                continue  # this drafter reads no states
            for position, state in enumerate(choices.hidden[: item.num_committed], item.sequence.cached):
                self._states[self._slot(item.sequence, position)] = state
        return finished

    def states(self, sequence: EngineSequence) -> Tensor | None:
        """Returns states of the cached tokens [cached, num_layers, hidden_size], or None if none are read."""
        if not self._states:
            return None
        return torch.stack([self._states[self._slot(sequence, place)] for place in range(sequence.cached)])

    def forget(self) -> None:
        """Forgets the states of closed sequences."""
        self._states.clear()

    def _slot(self, sequence: EngineSequence, position: int) -> tuple[int, int]:
        block, place = divmod(position, self.settings.block_size)
        return sequence.blocks[block], place


class TargetDrafterJudge:
    """Judges one target drafter and measures its steps."""

    def __init__(self, settings: EngineSettings) -> None:
        """Loads the target and its drafter.

        Args:
            settings: settings of the target, which name a single drafter.

        Raises:
            UnsupportedModelError: the drafter does not suit the target.
        """
        drafters = TargetDrafters.of(settings)
        self._drafter: TargetDrafter
        (self._drafter,) = drafters
        self._runner = _StateRecorder(load_forward_pass(settings, drafters=drafters))
        self._engine = Engine(self._runner)
        self._taken: dict[int, list[float]] = {}  # seconds of the drafter's steps, by sequences

    @torch.inference_mode()
    def judge(
        self, answers: Sequence[TargetAnswer], depth: int, progress: Progress = SILENT
    ) -> list[JudgedAnswer]:
        """Judges a Draft before each token of each answer. Raises HopelessError."""
        judged: list[JudgedAnswer] = []
        for first in range(0, len(answers), AT_A_TIME):
            together = answers[first : first + AT_A_TIME]
            judged += self._judged_together(
                together, depth, partial(progress.at, len(judged), len(answers), "answers judged")
            )
        return judged

    def _judged_together(
        self, answers: Sequence[TargetAnswer], depth: int, go_on: Callable[[], None]
    ) -> list[JudgedAnswer]:
        """Judges answers in one batch.

        go_on: called before each step; may raise.
        """
        runs = [_JudgedSequence(answer, self._read(answer)) for answer in answers]
        while self._engine.has_work:
            self._engine.step()
        for run in runs:
            run.begin(self._runner.states(run.sequence))
        while active := [run for run in runs if not run.has_ended]:
            go_on()
            if self._drafter.cache_shapes:
                self._drafter.take_in([run.committed() for run in active])
            requests = [run.request(depth) for run in active]
            started = time.perf_counter()
            drafts = self._drafter.propose(requests)
            seconds = (time.perf_counter() - started) / self._drafter.steps(depth)
            self._taken.setdefault(len(active), []).append(seconds)
            for run, draft in zip(active, drafts, strict=True):
                run.take(draft.tokens)
        for run in runs:
            self._drafter.forget(run.sequence)
            self._engine.close(run.sequence)
        self._runner.forget()
        return [run.judged for run in runs]

    def _read(self, answer: TargetAnswer) -> EngineSequence:
        """Opens a sequence and submits all tokens but the last to the target."""
        request = answer.request
        sequence = self._engine.open(len(request.prompt), request.noise_key, request.sampling)
        self._engine.submit(Decode(sequence.number, 0, answer.text[:-1], NO_DRAFT, 0))
        return sequence

    @property
    def steps(self) -> MeasuredSteps:
        """Steps of the drafter, as the pace counts them (outrider/drafters/registry.py)."""
        return MeasuredSteps({count: {count: median(taken)} for count, taken in self._taken.items()})


class _JudgedSequence:
    """Answer of which the drafter knows the tokens before the current position."""

    def __init__(self, answer: TargetAnswer, sequence: EngineSequence) -> None:
        self._tokens = answer.tokens
        self._text = answer.text
        self._place = FIRST
        self._told = 0  # positions whose states the drafter has received
        self._starts = [NOTHING] * len(answer.tokens)
        self.sequence = sequence

    @property
    def has_ended(self) -> bool:
        return self._place >= len(self._tokens)

    @property
    def judged(self) -> JudgedAnswer:
        return JudgedAnswer(self._tokens, tuple(self._starts))

    def begin(self, states: Tensor | None) -> None:
        """Begins judging.

        states: [num_positions, num_layers, hidden_size]; None: the drafter reads none.
        """
        self._states = states
        self._set_back()

    def _set_back(self) -> None:
        """Rolls the sequence back, as if the target had just generated the token before the position."""
        length = self.sequence.prompt_length + self._place
        self.sequence.tokens = [*self._text[:length]]
        self.sequence.cached = length - 1

    def committed(self) -> CommittedStates:
        """Returns the states that the drafter has not received yet."""
        start, self._told = self._told, self.sequence.cached
        assert self._states is not None
        return CommittedStates(self.sequence, start, self._states[start : self._told], is_wanted=True)

    def request(self, depth: int) -> DraftRequest:
        room = self.sequence.limit - len(self.sequence.tokens) - 1
        hidden = None if self._states is None else self._states[self.sequence.cached - 1]
        return DraftRequest(self.sequence, min(depth, room), 0, self._place, hidden)

    def take(self, drafted: tuple[int, ...]) -> None:
        """Judges the Draft at the current position, then moves to the next token."""
        correct = agreement(drafted, self._tokens[self._place :]).correct
        self._starts[self._place] = DraftStart(len(drafted), correct)
        self._place += 1
        self._set_back()
