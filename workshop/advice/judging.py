"""Lets a drafter guess along answers that are there. It drafts as it does when serving."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from outrider.decoding.draft import agreed
from outrider.drafters.index import Index
from outrider.drafters.occurrences import Guess
from outrider.drafters.past_answers import PastAnswers, Scope
from outrider.drafters.suffix import SuffixIndex
from outrider.engine.choosing.asked import Asked
from outrider.engine.drafters.drafter import Drafter
from outrider.engine.offline.speculate import Generation
from workshop.advice.answers import TargetAnswer
from workshop.advice.judged import FIRST, DraftStart, JudgedAnswer
from workshop.advice.progress import SILENT, Progress

NOTHING = DraftStart(0, 0)
CALLER = "advise"  # whose past answers they are


def judge_index(make: Callable[[], Index], answers: Sequence[TargetAnswer], depth: int) -> list[JudgedAnswer]:
    """An index over each answer, asked before each of its tokens."""
    judged = []
    for answer in answers:
        index = make()
        judged.append(_along(index, partial(_unscored, index), answer, depth))
    return judged


def judge_suffix(answers: Sequence[TargetAnswer], depth: int, past_tokens: int) -> list[JudgedAnswer]:
    """Suffixes of the answer's own text, and of all answers of its task before it.

    past_tokens: that are kept, as the gateway's setting ``past_answer_tokens``.
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
    """A drafter whose guess depends on the text before it alone, wherever its Draft began.

    So a Draft tells whether each of its tokens up to the first wrong one is right, and the next one goes on
    behind that: no token is guessed twice.
    """
    runs = [_JudgedRun(answer) for answer in answers]
    while active := _active(runs, progress):
        for run, drafted in zip(active, _proposed(drafter, active, depth), strict=True):
            right = agreed(drafted, run.rest)
            for offset in range(min(right + 1, len(drafted), len(run.rest))):
                run.starts[run.place + offset] = DraftStart(1, int(offset < right))
            run.go_on(max(right + (right < len(drafted)), 1))
    for run in runs:
        drafter.forget(run.generation)
    return [_of_single_tokens(run.judged, depth) for run in runs]


def judge_starts(
    drafter: Drafter, answers: Sequence[TargetAnswer], depth: int, progress: Progress = SILENT
) -> list[JudgedAnswer]:
    """Any drafter: a Draft before each token."""
    runs = [_JudgedRun(answer) for answer in answers]
    while active := _active(runs, progress):
        for run, drafted in zip(active, _proposed(drafter, active, depth), strict=True):
            run.starts[run.place] = DraftStart(len(drafted), agreed(drafted, run.rest))
            run.go_on(1)
    for run in runs:
        drafter.forget(run.generation)
    return [run.judged for run in runs]


class _JudgedRun:
    """An answer as far as the drafter has been told of it."""

    def __init__(self, answer: TargetAnswer) -> None:
        self._answer = answer
        self.place = FIRST
        prompt = answer.request.prompt
        known = [*prompt, *answer.tokens[:FIRST]]
        self.generation = Generation(len(prompt), answer.request.noise_key, answer.request.sampling, known)
        self.starts = [NOTHING] * len(answer.tokens)

    @property
    def has_ended(self) -> bool:
        return self.place >= len(self._answer.tokens)

    @property
    def rest(self) -> tuple[int, ...]:
        """What the drafter is to guess."""
        return self._answer.tokens[self.place :]

    @property
    def judged(self) -> JudgedAnswer:
        return JudgedAnswer(self._answer.tokens, tuple(self.starts))

    def go_on(self, count: int) -> None:
        self.generation.tokens += self.rest[:count]
        self.generation.round += 1
        self.place += count


def _active(runs: Sequence[_JudgedRun], progress: Progress) -> list[_JudgedRun]:
    """Those that have not ended. Raises HopelessError."""
    places, lengths = zip(*((run.place, len(run.starts)) for run in runs), strict=True)
    progress.at(sum(places), sum(lengths), "tokens judged")
    return [run for run in runs if not run.has_ended]


def _proposed(drafter: Drafter, runs: Sequence[_JudgedRun], depth: int) -> list[tuple[int, ...]]:
    """The chain for each."""
    asked = [Asked(run.generation, depth, 0, run.generation.round) for run in runs]
    return [draft.tokens for draft in drafter.propose(asked)]


def _of_single_tokens(judged: JudgedAnswer, depth: int) -> JudgedAnswer:
    """Drafts out of guesses that were told one by one: a chain is right as far as its tokens are."""
    starts: list[DraftStart] = []
    drafted = right = 0
    for one in reversed(judged.starts):
        drafted = drafted + 1 if one.drafted else 0
        right = right + 1 if one.right else 0
        starts.append(DraftStart(min(drafted, depth), min(right, depth)))
    return replace(judged, starts=tuple(reversed(starts)))


def _unscored(index: Index, depth: int) -> Guess:
    return Guess(index.propose(depth).tokens)


def _along(index: Index, guess: Callable[[int], Guess], answer: TargetAnswer, depth: int) -> JudgedAnswer:
    index.append([*answer.request.prompt, *answer.tokens[:FIRST]])
    starts, guesses = [NOTHING] * FIRST, [Guess()] * FIRST
    for place in range(FIRST, len(answer.tokens)):
        guesses.append(guess(depth))
        tokens = guesses[-1].tokens
        starts.append(DraftStart(len(tokens), agreed(tokens, answer.tokens[place:])))
        index.append([answer.tokens[place]])
    return JudgedAnswer(answer.tokens, tuple(starts), tuple(guesses))
