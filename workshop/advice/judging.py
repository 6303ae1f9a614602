"""Lets a drafter draft along given answers, as it does in serving."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from outrider.drafters.index import Index
from outrider.drafters.occurrences import Continuation
from outrider.drafters.past_answers import PastAnswers, Scope
from outrider.drafters.suffix import SuffixIndex
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.drafters.drafter import Drafter
from outrider.engine.offline.speculate import OfflineGeneration
from outrider.learning.agreement import agreement
from workshop.advice.answers import TargetAnswer
from workshop.advice.judged import FIRST, DraftStart, JudgedAnswer
from workshop.advice.progress import SILENT, Progress

NOTHING = DraftStart(0, 0)
CALLER = "advise"  # caller under whose name past answers are kept


def judge_index(make: Callable[[], Index], answers: Sequence[TargetAnswer], depth: int) -> list[JudgedAnswer]:
    """Judges an index over each answer: one guess before each token."""
    judged = []
    for answer in answers:
        index = make()
        judged.append(_along(index, partial(_unscored, index), answer, depth))
    return judged


def judge_suffix(answers: Sequence[TargetAnswer], depth: int, past_tokens: int) -> list[JudgedAnswer]:
    """Judges a suffix index over the answer's own text and all earlier answers of its task.

    past_tokens: most tokens of past answers that are kept, as in the gateway's ``past_answer_tokens``.
    """
    past = PastAnswers(past_tokens)
    judged = []
    for answer in answers:
        scope = Scope(CALLER, answer.task)
        index = SuffixIndex(past, scope)
        judged.append(_along(index, index.guess, answer, depth))
        past.add(scope, answer.tokens)
    return judged


def judge_text(
    drafter: Drafter, answers: Sequence[TargetAnswer], depth: int, progress: Progress = SILENT
) -> list[JudgedAnswer]:
    """Judges a drafter whose guess depends only on the text before it, not on where the Draft began.

    So one Draft judges several positions, up to its first wrong token. The next Draft begins after that
    token, and no position is drafted twice.
    """
    runs = [_JudgedRun(answer) for answer in answers]
    while active := _active(runs, progress):
        for run, drafted in zip(active, _proposed(drafter, active, depth), strict=True):
            found = agreement(drafted, run.rest)
            for offset in range(found.reached):
                run.starts[run.place + offset] = DraftStart(1, int(offset < found.correct))
            run.go_on(max(found.correct + (found.correct < len(drafted)), 1))
    for run in runs:
        drafter.forget(run.generation)
    return [_of_single_tokens(run.judged, depth) for run in runs]


def judge_starts(
    drafter: Drafter, answers: Sequence[TargetAnswer], depth: int, progress: Progress = SILENT
) -> list[JudgedAnswer]:
    """Judges any drafter: one Draft before each token."""
    runs = [_JudgedRun(answer) for answer in answers]
    while active := _active(runs, progress):
        for run, drafted in zip(active, _proposed(drafter, active, depth), strict=True):
            run.starts[run.place] = DraftStart(len(drafted), agreement(drafted, run.rest).correct)
            run.go_on(1)
    for run in runs:
        drafter.forget(run.generation)
    return [run.judged for run in runs]


class _JudgedRun:
    """Answer of which the drafter knows the tokens before ``place``."""

    def __init__(self, answer: TargetAnswer) -> None:
        self._answer = answer
        self.place = FIRST
        prompt = answer.request.prompt
        known = [*prompt, *answer.tokens[:FIRST]]
        self.generation = OfflineGeneration(
            len(prompt), answer.request.noise_key, answer.request.sampling, known
        )
        self.starts = [NOTHING] * len(answer.tokens)

    @property
    def has_ended(self) -> bool:
        return self.place >= len(self._answer.tokens)

    @property
    def rest(self) -> tuple[int, ...]:
        """Tokens that the drafter does not know yet."""
        return self._answer.tokens[self.place :]

    @property
    def judged(self) -> JudgedAnswer:
        return JudgedAnswer(self._answer.tokens, tuple(self.starts))

    def go_on(self, count: int) -> None:
        self.generation.tokens += self.rest[:count]
        self.generation.round += 1
        self.place += count


def _active(runs: Sequence[_JudgedRun], progress: Progress) -> list[_JudgedRun]:
    """Returns the runs that have not ended, and reports progress. Raises HopelessError."""
    places, lengths = zip(*((run.place, len(run.starts)) for run in runs), strict=True)
    progress.at(sum(places), sum(lengths), "tokens judged")
    return [run for run in runs if not run.has_ended]


def _proposed(drafter: Drafter, runs: Sequence[_JudgedRun], depth: int) -> list[tuple[int, ...]]:
    """Returns a chain of drafted tokens for each run."""
    requests = [DraftRequest(run.generation, depth, 0, run.generation.round) for run in runs]
    return [draft.tokens for draft in drafter.propose(requests)]


def _of_single_tokens(judged: JudgedAnswer, depth: int) -> JudgedAnswer:
    """Joins single judged guesses to Drafts; a Draft is correct up to its first wrong token."""
    starts: list[DraftStart] = []
    drafted = correct = 0
    for start in reversed(judged.starts):
        drafted = drafted + 1 if start.drafted else 0
        correct = correct + 1 if start.correct else 0
        starts.append(DraftStart(min(drafted, depth), min(correct, depth)))
    return replace(judged, starts=tuple(reversed(starts)))


def _unscored(index: Index, depth: int) -> Continuation:
    return Continuation(index.propose(depth).tokens)


def _along(
    index: Index, guess: Callable[[int], Continuation], answer: TargetAnswer, depth: int
) -> JudgedAnswer:
    index.append([*answer.request.prompt, *answer.tokens[:FIRST]])
    starts, guesses = [NOTHING] * FIRST, [Continuation()] * FIRST
    for place in range(FIRST, len(answer.tokens)):
        guesses.append(guess(depth))
        tokens = guesses[-1].tokens
        starts.append(DraftStart(len(tokens), agreement(tokens, answer.tokens[place:]).correct))
        index.append([answer.tokens[place]])
    return JudgedAnswer(answer.tokens, tuple(starts), tuple(guesses))
