"""Decoding freely: a token a step, and with it those that a grammar forces."""

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.draft import ROOT, Draft
from outrider.decoding.sampling import reads_text
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.choosing.asked_logprobs import comes_along
from outrider.engine.choosing.sampler import Choices
from outrider.engine.sequence import NO_DRAFT, EngineSequence
from outrider.engine.tasks.task import Task
from outrider.engine.work import Generated, Result

UNKNOWN = 0  # stands for a token of which only the place counts


class GenerateTask(Task):
    """Grows the sequence until it has ``length`` tokens or ends."""

    def __init__(self, sequence: EngineSequence, length: int, arrived: float) -> None:
        super().__init__(sequence, arrived)
        self.length = length
        self._forced: Draft | None = None  # what the grammar forces next; None: it was not asked yet
        # Whether a step depends on the token of the one before in nothing but that it is fed.
        self.is_foreseeable = not reads_text(sequence.sampling) and comes_along(sequence.sampling)

    @property
    def ends_now(self) -> bool:
        """Whether the token that the step under way chooses is the last one, whatever it is."""
        return len(self.sequence.tokens) + 1 >= min(self.length, self.sequence.limit)

    def next_row(self) -> ChoiceContext:
        """Of one that is foreseeable: what choosing the token after the one under way depends on."""
        sequence = self.sequence
        generated = () if sequence.needs_no_text else sequence.tokens[sequence.prompt_length :]
        return sequence.row(generated, (UNKNOWN,))

    def constrain(self) -> None:
        sequence = self.sequence
        if sequence.matcher is not None and self._forced is None:
            sequence.check_goes_on()
            room = min(sequence.limit, self.length) - len(sequence.tokens) - 1
            generated = sequence.tokens[sequence.prompt_length :]
            self._forced = sequence.matcher.constrained(generated, NO_DRAFT, room).draft

    def tree(self) -> Draft:
        return self._forced or NO_DRAFT

    def nodes(self) -> list[int]:
        return list(range(ROOT, len(self.tree())))

    @property
    def judged(self) -> Draft:
        return self.tree()

    def give_up_draft(self) -> bool:
        had_forced = bool(self._forced)
        self._forced = NO_DRAFT
        return had_forced

    def take(self, choices: Choices, cache: PagedCache) -> list[Result]:
        sequence = self.sequence
        sound = len(self.sound_part(choices)) if self._forced else 0
        verdict, finish = self.until_end(choices.verdict(sound))
        self._forced = None
        self.kept = verdict.accepted
        cache.keep_path(sequence, verdict.accepted)
        sequence.tokens += verdict.tokens
        self.done = finish is not None or len(sequence.tokens) >= self.length
        logprobs = choices.logprobs([0, *(1 + node for node in verdict.accepted)], verdict.tokens)
        position = len(sequence.tokens) - 1
        *forced, token = verdict.tokens
        return [Generated(sequence.number, position, token, logprobs, finish, self.timings(), tuple(forced))]
