"""Target drafting: Drafts that come with the Verdicts of the target's steps."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from msgspec import structs

from outrider.decoding.draft import Draft
from outrider.decoding.outcomes import RANKS
from outrider.engine.blame import says_broken
from outrider.engine.choosing.asked import Asked
from outrider.engine.choosing.sampler import Choices
from outrider.engine.drafters.beside_target import BesideTarget, Fed, rows_at
from outrider.engine.forward.batch import Item
from outrider.engine.sequence import EngineSequence
from outrider.engine.tasks.decode import DecodeTask
from outrider.engine.tasks.task import Task
from outrider.engine.work import Decoded, Result
from outrider.learning.agreement import agreement
from outrider.pace.step import Step, StepSize

logger = logging.getLogger(__name__)

T = TypeVar("T")

JUDGED_AFTER = 1000  # positions that were verified
LEAST_ACCEPTANCE = 0.1  # over these, of a drafter that suits its target


@dataclass(frozen=True)
class _Newest:
    """A Draft that came with its sequence's Verdict."""

    chain: tuple[int, ...]
    guesses: Sequence[tuple[int, ...]]  # at its positions, as far as they are known, best first


class TargetDrafting:
    """Asks the drafter for Drafts, and disables it if nearly none of its guesses is correct."""

    def __init__(self, drafter: BesideTarget, clock: Callable[[], float] = time.perf_counter) -> None:
        """clock: in seconds."""
        self._drafter = drafter
        self._refused_because = ""
        self._clock = clock
        self._steps = 0
        self._newest: dict[int, _Newest] = {}  # newest Drafts by number of the sequence
        self._verified = self._accepted = 0  # positions, until it is judged

    def stepped(self, chosen: list[tuple[Task, Item, Choices]], results: list[Result]) -> list[Result]:
        """Returns the results with the wanted Drafts."""
        verdicts = {result.sequence: result for result in results if isinstance(result, Decoded)}
        if self.no_drafts_because or not self._guarded(lambda: self._take_in(chosen)):
            return results
        texts = [task.sequence for task, _, _ in chosen if task.sequence.blocks]
        self._guarded(lambda: self._drafter.watch(texts))
        asked: dict[int, Asked] = {}
        for task, _, _ in chosen:
            verdict = verdicts.get(task.sequence.number)
            if not isinstance(task, DecodeTask) or verdict is None:
                continue
            verdicts[task.sequence.number] = self._observed(task, verdict)
            if task.next_draft is not None and verdict.finish is None:
                asked[task.sequence.number] = task.next_draft
        results = [verdicts[one.sequence] if isinstance(one, Decoded) else one for one in results]
        begun = self._clock()
        proposed = self._guarded(lambda: self._drafter.propose([*asked.values()])) if asked else None
        if not proposed:
            return results
        drafts, seconds = dict(zip(asked, proposed, strict=True)), self._clock() - begun
        step = self._step(drafts, seconds)
        guesses = self._drafter.guesses or [()] * len(drafts)
        for (number, draft), of_draft in zip(drafts.items(), guesses, strict=True):
            self._newest[number] = _Newest(draft.tokens[: draft.chain_length], of_draft)
        return [
            _with(result, drafts[result.sequence], step, seconds)
            if isinstance(result, Decoded) and result.sequence in drafts
            else result
            for result in results
        ]

    @property
    def no_drafts_because(self) -> str:
        """Returns why the drafter is disabled; empty while it is in use."""
        return self._drafter.no_drafts_because or self._refused_because

    def forget(self, sequence: EngineSequence) -> None:
        """Forgets a closed sequence."""
        self._newest.pop(sequence.number, None)
        self._drafter.forget(sequence)

    def _take_in(self, chosen: list[tuple[Task, Item, Choices]]) -> bool:
        """Passes the hidden states of newly cached tokens to a drafter with a cache."""
        fed = []
        for task, item, choices in chosen if self._drafter.cache_shapes else ():
            sequence = item.sequence
            if choices.hidden is None or not sequence.blocks:
                continue  # it failed
            nodes = task.kept if item.num_logits else ()
            count, first = item.num_committed + len(nodes), item.num_committed
            hidden = choices.hidden[:count]
            if nodes != tuple(range(len(nodes))):
                hidden = rows_at(choices.hidden, [*range(first), *(first + node for node in nodes)])
            if count:
                fed.append(Fed(sequence, sequence.cached - count, hidden))
        if fed:
            self._drafter.take_in(fed)
        return True

    def _guarded(self, work: Callable[[], T]) -> T | None:
        """Calls the drafter and returns its result; None if it fails, which costs Drafts alone."""
        try:
            return work()
        except Exception as error:
            if says_broken(error):
                raise
            logger.exception("the drafter beside the target failed: its Drafts are missing")
            return None

    def _step(self, drafts: dict[int, Draft], seconds: float) -> Step:
        """One of the drafter's, as the pace counts them (see outrider/drafters/registry.py)."""
        self._steps += 1
        depth = max(draft.depth for draft in drafts.values())
        nodes = sum(map(len, drafts.values())) / max(depth, 1)  # nodes of a position
        size = StepSize(sequences=len(drafts), tokens=max(round(nodes), len(drafts)))
        return Step(self._steps, size, seconds / self._drafter.steps(depth))

    def _observed(self, task: DecodeTask, result: Decoded) -> Decoded:
        """Counts a Verdict on a Draft of this drafter. The result shows which guess was correct."""
        newest, draft = self._newest.pop(task.sequence.number, None), task.tree()
        chain = draft.tokens[: draft.chain_length]
        if newest is None or not chain or newest.chain[: len(chain)] != chain:
            return result
        tokens = result.verdict.tokens
        accepted = agreement(chain, tokens).correct
        self._count(accepted, min(accepted + 1, len(chain)))
        if not accepted < min(len(chain), len(newest.guesses), len(tokens)):
            return result
        guesses = newest.guesses[accepted]
        rank = guesses.index(tokens[accepted]) if tokens[accepted] in guesses else RANKS
        return structs.replace(result, rank=rank)

    def _count(self, accepted: int, verified: int) -> None:
        """Counts positions until the acceptance rate is known; a low rate disables the drafter."""
        if self._verified >= JUDGED_AFTER:
            return
        self._accepted += accepted
        self._verified += verified
        if self._verified >= JUDGED_AFTER and self._accepted < LEAST_ACCEPTANCE * self._verified:
            self._refused_because = (
                f"of {self._verified} positions that the target verified {self._accepted} were right, less"
                f" than a part of {LEAST_ACCEPTANCE:g}"
            )
            logger.error(
                "%s is out of use: %s. Decoding is plain from now on. Was it made for this target?",
                self._drafter,
                self._refused_because,
            )


def _with(result: Decoded, draft: Draft, step: Step, seconds: float) -> Decoded:
    """Returns the result with the time that its Draft took."""
    timings = result.timings
    return structs.replace(
        result, draft=draft, draft_step=step, timings=replace(timings, total=timings.total + seconds)
    )
