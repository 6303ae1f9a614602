"""Verifying a Draft."""

from dataclasses import dataclass

from outrider.decoding.draft import ROOT, Draft, Verdict
from outrider.decoding.grammar import Constrained
from outrider.decoding.settings import TokenLogprobs
from outrider.decoding.verify import verify_block, verify_rejection
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.choosing.asked import Asked
from outrider.engine.choosing.sampler import Choices
from outrider.engine.sequence import NO_DRAFT, EngineSequence
from outrider.engine.tasks.task import Task
from outrider.engine.work import Forced, Result, Verified

NOTHING_CONSTRAINED = Constrained(NO_DRAFT, (), ())


@dataclass(frozen=True)
class Following:
    """The Drafts that are to come with verdicts, from a drafter beside the target."""

    depth: int = 0  # 0: none
    leaves: int = 0
    until: int = 0  # length of the sequence, up to which they are verified at once


NOTHING_FOLLOWS = Following()


class VerifyTask(Task):
    """One forward pass over what is not cached yet and every node of the Draft."""

    def __init__(
        self,
        sequence: EngineSequence,
        draft: Draft,
        round: int,
        room: int,
        vocab_size: int,
        arrived: float,
        following: Following = NOTHING_FOLLOWS,
    ) -> None:
        """
        Args:
            room: tokens that the sequence may still grow by.
        """
        super().__init__(sequence, arrived)
        self.round = round
        self.following = following
        self._room = room
        self._draft = _fitting(draft, room - 1, vocab_size)  # the target adds one token of its own
        self._constrained: Constrained | None = None  # the Draft, once the sequence's grammar has seen it
        self.next_draft: Asked | None = None  # that is wanted with the Verdict, once that has fallen

    def tree(self) -> Draft:
        return self._draft

    def constrain(self) -> None:
        sequence = self.sequence
        if sequence.matcher is None or self._constrained is not None:
            return
        sequence.check_goes_on()
        generated = sequence.tokens[sequence.prompt_length :]
        has_probs = sequence.sampling.verification != "coupled"
        self._constrained = sequence.matcher.constrained(generated, self._draft, self._room - 1, has_probs)
        self._draft = self._constrained.draft

    def give_up_draft(self) -> bool:
        had_draft = bool(self._draft)
        self._draft, self._constrained = NO_DRAFT, NOTHING_CONSTRAINED
        return had_draft

    def nodes(self) -> list[int]:
        return list(range(ROOT, len(self._draft)))

    @property
    def judged(self) -> Draft:
        return self._draft if self.sequence.sampling.verification == "coupled" else NO_DRAFT

    def take(self, choices: Choices, cache: PagedCache) -> list[Result]:
        sequence = self.sequence
        verdict, finish = self.until_end(self._judge(self.sound_part(choices), choices))
        logprobs = choices.logprobs([0, *(1 + node for node in verdict.accepted)], verdict.tokens)
        self.kept = verdict.accepted
        cache.keep_path(sequence, verdict.accepted)
        sequence.tokens += verdict.tokens
        self.done = True
        self.next_draft = self._asked(verdict, choices)
        return [self._verified(verdict, logprobs, finish)]

    def _verified(
        self, verdict: Verdict, logprobs: tuple[TokenLogprobs, ...], finish: str | None
    ) -> Verified:
        """As the Draft's sender sees it: nodes by their place in that, forced tokens apart."""
        number, timings = self.sequence.number, self.timings()
        if self._constrained is None:
            return Verified(number, self.round, verdict, logprobs, finish, timings)
        kept = self._constrained.kept
        accepted = tuple(kept[node] for node in verdict.accepted if node < len(kept))
        forced = Forced(len(verdict.accepted) - len(accepted), self._constrained.forced)
        of_draft = Verdict(accepted, verdict.tokens)
        return Verified(number, self.round, of_draft, logprobs, finish, timings, forced=forced)

    def _asked(self, verdict: Verdict, choices: Choices) -> Asked | None:
        """The next Draft: what a drafter beside the target knows of the token that it is to follow."""
        room = self.sequence.limit - len(self.sequence.tokens) - 1
        depth = min(self.following.depth, room)
        if depth <= 0:
            return None
        row = 1 + verdict.accepted[-1] if verdict.accepted else 0
        hidden = None if choices.hidden is None else choices.hidden[row - len(choices.rows)]
        return Asked(self.sequence, depth, self.following.leaves, self.round, hidden)

    def _judge(self, draft: Draft, choices: Choices) -> Verdict:
        rule, rows = self.sequence.sampling.verification, slice(1 + len(draft))
        if rule == "coupled":
            return choices.verdict(len(draft))
        verify = verify_rejection if rule == "rejection" else verify_block
        position = len(self.sequence.tokens)
        return verify(draft, choices.target_probs()[rows], self.sequence.noise_key, position, self.round)


def _fitting(draft: Draft, depth: int, vocab_size: int) -> Draft:
    """The leading nodes no deeper than ``depth`` tokens, up to one that the target cannot say."""
    nodes = zip(draft.tokens, draft.depths, strict=True)
    count = next(
        (i for i, (token, above) in enumerate(nodes) if above >= depth or token >= vocab_size), len(draft)
    )
    return draft.leading(count)
