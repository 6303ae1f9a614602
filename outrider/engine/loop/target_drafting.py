"""Target drafting: Drafts that are returned with the Verdicts of the target's steps."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TypeVar

from msgspec import structs
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.lease import Lease
from outrider.decoding.outcomes import rank_of
from outrider.drafters.registry import split_name
from outrider.engine.blame import says_broken
from outrider.engine.choosing.draft_request import DraftedSequence, DraftRequest
from outrider.engine.choosing.sampler import Choices, Choosing
from outrider.engine.choosing.step_result import StepResult
from outrider.engine.drafters.drafts_under_way import DraftForeseen, DraftRead, DraftsUnderWay
from outrider.engine.drafters.target_drafter import CommittedStates, Judging, TargetDrafter, rows_at
from outrider.engine.drafters.target_drafters import TargetDrafters
from outrider.engine.drafters.unions import DraftUnions
from outrider.engine.forward.batch import Item
from outrider.engine.loop.launched import Launched
from outrider.engine.scheduling.scheduler import Selected
from outrider.engine.sequence import EngineSequence
from outrider.engine.tasks.decode import DecodeTask
from outrider.engine.tasks.task import Task
from outrider.engine.work import Decoded, Result
from outrider.learning.agreement import agreement
from outrider.pace.step import Step, StepSize

logger = logging.getLogger(__name__)

T = TypeVar("T")
GivenT = TypeVar("GivenT", DraftRequest, Judging)

JUDGED_AFTER = 1000  # reached positions after which a drafter is judged
LEAST_ACCEPTANCE = 0.1  # accepted / reached; a drafter with less is disabled


@dataclass(frozen=True)
class _Newest:
    """Newest Draft of a sequence, which was returned with a Verdict."""

    drafter: str
    chain: tuple[int, ...]  # chain as the drafter made it
    top_tokens: Sequence[tuple[int, ...]]  # best tokens at the chain's positions, as far as known, best first
    sent: Draft  # Draft as returned: united with an index's guesses, if the lease asks for that


@dataclass(frozen=True)
class _Made:
    """A Draft, and how it was made."""

    drafter: str
    draft: Draft
    promises: Sequence[float]  # as in DraftRead
    step: Step
    is_of_host: bool  # as Decoded.is_draft_of_host


class DrafterInUse:
    """A target drafter and its acceptance; it is disabled if hardly any of its guesses are correct."""

    def __init__(self, drafter: TargetDrafter) -> None:
        self.drafter = drafter
        self._refused_because = ""
        self._reached = self._accepted = 0  # positions, counted until it is judged
        self._steps = 0

    @property
    def no_drafts_because(self) -> str:
        """Returns why the drafter is disabled; empty while it is in use."""
        return self.drafter.no_drafts_because or self._refused_because

    def step(self, drafts: Sequence[Draft], seconds: float) -> Step:
        """Returns the drafter's step in the units of the pace (see outrider/drafters/registry.py)."""
        self._steps += 1
        depth = max(draft.depth for draft in drafts)
        nodes = sum(map(len, drafts)) / max(depth, 1)  # nodes per position
        size = StepSize(sequences=len(drafts), tokens=max(round(nodes), len(drafts)))
        return Step(self._steps, size, seconds / self.drafter.steps(depth))

    def count(self, accepted: int, reached: int) -> None:
        """Counts positions until the acceptance rate is known; a low rate disables the drafter."""
        if self._reached >= JUDGED_AFTER:
            return
        self._accepted += accepted
        self._reached += reached
        if self._reached >= JUDGED_AFTER and self._accepted < LEAST_ACCEPTANCE * self._reached:
            self._refused_because = (
                f"of {self._reached} reached positions {self._accepted} were correct, less"
                f" than a part of {LEAST_ACCEPTANCE:g}"
            )
            logger.error(
                "%s is disabled until the worker restarts: %s. Was it made for this target?",
                self.drafter,
                self._refused_because,
            )


class TargetDrafting:
    """Makes Drafts by the target drafters; the lease of a sequence names its drafter."""

    def __init__(self, drafters: TargetDrafters, clock: Callable[[], float] = time.perf_counter) -> None:
        """clock: returns the time in seconds."""
        self._drafters = drafters
        self._in_use = {drafter.info.name: DrafterInUse(drafter) for drafter in drafters}
        self._clock = clock
        self._unions = DraftUnions()
        self._newest: dict[int, _Newest] = {}  # newest Drafts by number of the sequence
        self._under_way: dict[str, DraftsUnderWay] = {}  # Drafts after the current step, by drafter
        self._foresaw = set[EngineSequence]()  # sequences whose newest Draft was started before its Verdict

    def begin(self, selected: Selected, launched: Launched) -> DraftsUnderWay | None:
        """Starts the Drafts that a device can make before the host knows the Verdicts that precede them.

        A sequence is left out if its settings depend on the text or ask for more than tokens.

        Returns:
            the Drafts, if a single drafter makes all of them; else None.
        """
        self._under_way = {}
        if not any(drafter.makes_chains for drafter in self._drafters):
            return None
        hidden, choosing = launched.forward.output.hidden, launched.choosing
        if not isinstance(choosing, Choosing):
            return None
        judging: dict[str, list[Judging]] = {}
        row = token = 0
        items = dict(selected)  # some tasks of a step launched early may have ended
        for task, size, count in zip(launched.tasks, launched.counts, choosing.rows.counts, strict=True):
            rows, row = range(row, row + count), row + count
            fed, token = slice(token, token + size), token + size
            item = items.get(task)
            if not isinstance(task, DecodeTask) or item is None or not count:
                continue
            request = task.foreseen_draft()
            if request is not None:
                states = None if hidden is None else hidden[fed]
                part = Judging(task.tree(), request, item.sequence.cached, len(item.tokens), rows, states)
                judging.setdefault(split_name(task.lease.drafter)[0], []).append(part)
        for name, parts in judging.items():
            self._begin(name, parts, choosing.result)
        under_way = [*self._under_way.values()]
        return under_way[0] if len(under_way) == 1 else None

    def _begin(self, name: str, judging: Sequence[Judging], result: StepResult[Tensor]) -> None:
        """Starts the Drafts of a drafter."""
        in_use = self._in_use.get(name)
        if in_use is None or in_use.no_drafts_because:
            return
        drafter = in_use.drafter
        with_states = self._with_states_of(drafter, judging)
        begun = _guarded(lambda: drafter.begin_drafts(with_states, result))
        if begun is not None:
            self._under_way[name] = begun

    def stepped(self, chosen: list[tuple[Task, Item, Choices]], results: list[Result]) -> list[Result]:
        """Makes the wanted Drafts after a step; returns the results with them."""
        if not self._in_use:
            return results
        verdicts = {result.sequence: result for result in results if isinstance(result, Decoded)}
        started = self._clock()
        requests: dict[str, list[DraftRequest]] = {}
        foreseen = self._foreseen(verdicts)
        self._foresaw = {sequence for of_drafter in foreseen.values() for sequence in of_drafter}
        of_foreseen: dict[str, list[DraftRequest]] = {}  # requests whose Drafts were started
        to_unite: list[tuple[Lease, DraftRequest]] = []
        for task, _, _ in chosen:
            verdict = verdicts.get(task.sequence.number)
            if not isinstance(task, DecodeTask) or verdict is None:
                continue
            verdicts[task.sequence.number] = self._observed(task, verdict)
            if task.next_draft is not None and verdict.finish is None:
                name, index = split_name(task.lease.drafter)
                if index or task.next_draft.least_survival:
                    to_unite.append((task.lease, task.next_draft))
                of_kind = of_foreseen if task.sequence in foreseen.get(name, ()) else requests
                of_kind.setdefault(name, []).append(task.next_draft)
        taken_in = {
            name
            for name, in_use in self._in_use.items()
            if self._takes_in(in_use, chosen, requests.get(name, ()), foreseen.get(name, {}).keys())
        }
        made: dict[int, _Made] = {}  # Drafts by number of the sequence
        for name, of_drafter in of_foreseen.items():
            in_use = self._in_use[name]
            drafts = [
                in_use.drafter.read(foreseen[name][request.engine_sequence], request)
                for request in of_drafter
            ]
            made |= self._told(in_use, of_drafter, drafts, self._under_way[name].seconds)
        for name, of_drafter in requests.items():
            if name in taken_in:
                made |= self._made(self._in_use[name], of_drafter)
        self._unite(made, to_unite)
        seconds = self._clock() - started
        self._under_way = {}
        results = [verdicts[result.sequence] if isinstance(result, Decoded) else result for result in results]
        return [
            _with(result, made[result.sequence], seconds)
            if isinstance(result, Decoded) and result.sequence in made
            else result
            for result in results
        ]

    @property
    def no_drafts_because(self) -> Mapping[str, str]:
        """Returns why drafters are disabled, by name; drafters in use are missing."""
        return {name: reason for name, in_use in self._in_use.items() if (reason := in_use.no_drafts_because)}

    def foresaw(self, sequence: EngineSequence) -> bool:
        """Whether the newest Draft of the sequence was started before the host knew its Verdict."""
        return sequence in self._foresaw

    def forget(self, sequence: EngineSequence) -> None:
        """Forgets a closed sequence."""
        self._newest.pop(sequence.number, None)
        self._unions.forget(sequence)
        for drafter in self._drafters:
            drafter.forget(sequence)

    def _takes_in(
        self,
        in_use: DrafterInUse,
        chosen: list[tuple[Task, Item, Choices]],
        requests: Sequence[DraftRequest],
        foreseen: Set[EngineSequence],
    ) -> bool:
        """Lets a drafter learn from a step before it drafts. Returns whether it can draft.

        foreseen: sequences whose tokens the drafter already took in when it started their Drafts.
        """
        sequences = [task.sequence for task, _, _ in chosen if task.sequence.blocks]

        def learn() -> bool:
            left = [each for each in chosen if each[0].sequence not in foreseen]
            self._take_in(in_use.drafter, left, {request.sequence for request in requests})
            in_use.drafter.watch(sequences)
            return True

        return not in_use.no_drafts_because and _guarded(learn) is True

    def _take_in(
        self,
        drafter: TargetDrafter,
        chosen: list[tuple[Task, Item, Choices]],
        wanted: Set[DraftedSequence],
    ) -> None:
        """Passes the hidden states of newly cached tokens to a drafter with a cache.

        wanted: sequences for which the drafter drafts next.
        """
        committed = []
        for task, item, choices in chosen if drafter.cache_shapes else ():
            sequence = item.sequence
            if choices.hidden is None or not sequence.blocks:
                continue  # the sequence failed
            nodes = task.kept if item.num_logits else ()
            count, first = item.num_committed + len(nodes), item.num_committed
            hidden = choices.hidden[:count]
            if nodes != tuple(range(len(nodes))):
                hidden = rows_at(choices.hidden, [*range(first), *(first + node for node in nodes)])
            if count:
                states = self._drafters.states_of(drafter, hidden)
                start, is_wanted = sequence.cached - count, sequence in wanted
                committed.append(CommittedStates(sequence, start, states, is_wanted))
        if committed:
            drafter.take_in(committed)

    def _made(self, in_use: DrafterInUse, requests: Sequence[DraftRequest]) -> dict[int, _Made]:
        """Returns the Drafts of one drafter by number of the sequence; empty if the drafter fails."""
        drafter = in_use.drafter
        with_states = self._with_states_of(drafter, requests)
        started = self._clock()
        drafts = _guarded(lambda: drafter.propose(with_states))
        if not drafts:
            return {}
        top_tokens = drafter.top_tokens or [()] * len(drafts)
        promises = drafter.promises or [()] * len(drafts)
        read = [
            DraftRead(draft, best, promises=of_nodes)
            for draft, best, of_nodes in zip(drafts, top_tokens, promises, strict=True)
        ]
        return self._told(in_use, requests, read, self._clock() - started)

    def _with_states_of(self, drafter: TargetDrafter, given: Sequence[GivenT]) -> list[GivenT]:
        """Returns a drafter's inputs, reduced to the hidden states of the target that it reads."""
        return [
            each
            if each.hidden is None
            else replace(each, hidden=self._drafters.states_of(drafter, each.hidden))
            for each in given
        ]

    def _told(
        self,
        in_use: DrafterInUse,
        requests: Sequence[DraftRequest],
        drafts: Sequence[DraftRead],
        seconds: float,
    ) -> dict[int, _Made]:
        """Records Drafts of a drafter; returns them by number of the sequence.

        seconds: time that the Drafts took.
        """
        step = in_use.step([read.draft for read in drafts], seconds)
        name, made = in_use.drafter.info.name, dict[int, _Made]()
        for request, read in zip(requests, drafts, strict=True):
            number, draft = request.engine_sequence.number, read.draft
            made[number] = _Made(name, draft, read.promises, step, in_use.drafter.is_of_host(request))
            self._newest[number] = _Newest(name, draft.tokens[: draft.chain_length], read.top_tokens, draft)
        return made

    def _unite(self, made: dict[int, _Made], wanted: Sequence[tuple[Lease, DraftRequest]]) -> None:
        """Drops nodes of Drafts that do not pay, and adds guesses of the indices that the leases name."""
        of_drafters = [
            (lease, request, each.draft, each.promises)
            for lease, request in wanted
            if (each := made.get(request.engine_sequence.number)) is not None
        ]
        drafts = self._unions.united(of_drafters)
        for (lease, request, *_), draft in zip(of_drafters, drafts, strict=True):
            number = request.engine_sequence.number
            made[number] = replace(made[number], drafter=lease.drafter, draft=draft)
            self._newest[number] = replace(self._newest[number], sent=draft)

    def _foreseen(self, verdicts: Mapping[int, Decoded]) -> dict[str, dict[EngineSequence, DraftForeseen]]:
        """Returns, by drafter, the Drafts that were started before these Verdicts and that follow them."""
        foreseen: dict[str, dict[EngineSequence, DraftForeseen]] = {}
        for name, under_way in self._under_way.items():
            drafter, foreseen[name] = self._in_use[name].drafter, {}
            for sequence, draft in (_guarded(under_way.read) or {}).items():
                decoded = verdicts.get(sequence.number)
                follows = decoded is not None and draft.follows(decoded.verdict)
                if follows:
                    foreseen[name][sequence] = draft
                if not draft.is_valid:
                    drafter.clear(sequence)
                elif follows:
                    drafter.keep(sequence)
        return foreseen

    def _observed(self, task: DecodeTask, result: Decoded) -> Decoded:
        """Counts a Verdict on a target drafter's Draft; returns the result with the correct guess's rank."""
        newest, draft = self._newest.pop(task.sequence.number, None), task.tree()
        chain = draft.tokens[: draft.chain_length]
        if newest is None or not chain or newest.sent.tokens[: len(chain)] != chain:
            return result
        tokens = result.verdict.tokens
        found = agreement(newest.chain, tokens)
        self._in_use[newest.drafter].count(found.correct, found.reached)
        if found.correct == found.reached or found.correct >= len(newest.top_tokens):
            return result
        rank = rank_of(tokens[found.correct], newest.top_tokens[found.correct])
        return structs.replace(result, rank=rank)


def _guarded(work: Callable[[], T]) -> T | None:
    """Calls a drafter and returns its result; None if it fails, so that only its Drafts are missing."""
    try:
        return work()
    except Exception as error:
        if says_broken(error):
            raise
        logger.exception("a target drafter failed: its Drafts are missing")
        return None


def _with(result: Decoded, made: _Made, seconds: float) -> Decoded:
    """Returns the result with its Draft. seconds: time of all Drafts, for which the result had to wait."""
    timings = structs.replace(result.timings, total=result.timings.total + seconds)
    return structs.replace(
        result,
        draft=made.draft,
        drafter=made.drafter,
        draft_step=made.step,
        is_draft_of_host=made.is_of_host,
        timings=timings,
    )
