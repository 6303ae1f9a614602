"""Verifying a Draft."""

from outrider.decoding.draft import ROOT, Draft, Verdict
from outrider.decoding.verify import verify_block, verify_coupled, verify_rejection
from outrider.engine.asked import Asked
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.sampler import Choices
from outrider.engine.sequence import NO_DRAFT, Sequence
from outrider.engine.tasks.task import Task
from outrider.engine.work import Result, Verified


class VerifyTask(Task):
    """One forward pass over what is not cached yet and every node of the Draft."""

    def __init__(
        self,
        sequence: Sequence,
        draft: Draft,
        round: int,
        room: int,
        vocab_size: int,
        arrived: float,
        following: tuple[int, int] = (0, 0),
    ) -> None:
        """
        Args:
            room: tokens that the sequence may still grow by.
            following: depth and leaves of the Draft that is to come with the Verdict.
        """
        super().__init__(sequence, arrived)
        self._round = round
        self._following = following
        self._draft = _fitting(draft, room - 1, vocab_size)  # the target adds one token of its own
        self.next_draft: Asked | None = None  # that is wanted with the Verdict, once that has fallen

    def tree(self) -> Draft:
        return self._draft

    def give_up_draft(self) -> bool:
        had_draft = bool(self._draft)
        self._draft = NO_DRAFT
        return had_draft

    def nodes(self) -> list[int]:
        return list(range(ROOT, len(self._draft)))

    def take(self, choices: Choices, cache: PagedCache) -> list[Result]:
        sequence = self.sequence
        verdict, finish = self._until_end(self._judge(self._sound_part(choices), choices))
        logprobs = choices.logprobs([0, *(1 + node for node in verdict.accepted)], verdict.tokens)
        cache.keep_path(sequence, verdict.accepted)
        sequence.tokens += verdict.tokens
        self.done = True
        self.next_draft = self._asked(verdict, choices)
        return [Verified(sequence.number, self._round, verdict, logprobs, finish, self.timings())]

    def _asked(self, verdict: Verdict, choices: Choices) -> Asked | None:
        """The next Draft: what a drafter beside the target knows of the token that it is to follow."""
        depth, leaves = self._following
        room = self.sequence.limit - len(self.sequence.tokens) - 1
        if min(depth, room) <= 0:
            return None
        row = 1 + verdict.accepted[-1] if verdict.accepted else 0
        hidden = None if choices.hidden is None else choices.hidden[row]
        return Asked(self.sequence, min(depth, room), leaves, self._round, hidden)

    def _sound_part(self, choices: Choices) -> Draft:
        """The leading nodes, up to one after which no token may be chosen: as if it had not been drafted."""
        return self._draft.leading((*choices.are_sound, False).index(False) - 1)

    def _judge(self, draft: Draft, choices: Choices) -> Verdict:
        rule, rows = self.sequence.sampling.verification, slice(1 + len(draft))
        if rule == "coupled":
            return verify_coupled(draft, choices.chosen[rows])
        verify = verify_rejection if rule == "rejection" else verify_block
        position = len(self.sequence.tokens)
        return verify(draft, choices.target_probs()[rows], self.sequence.noise_key, position, self._round)

    def _until_end(self, verdict: Verdict) -> tuple[Verdict, str | None]:
        """The Verdict up to the token that ends the generation, if one does."""
        for index, token in enumerate(verdict.tokens):
            finish = self.sequence.finish_of(token, len(self.sequence.tokens) + index + 1)
            if finish is not None:
                return Verdict(verdict.accepted[:index], verdict.tokens[: index + 1]), finish
        return verdict, None


def _fitting(draft: Draft, depth: int, vocab_size: int) -> Draft:
    """The leading nodes no deeper than ``depth`` tokens, up to one that the target cannot say."""
    nodes = zip(draft.tokens, draft.depths, strict=True)
    count = next(
        (i for i, (token, above) in enumerate(nodes) if above >= depth or token >= vocab_size), len(draft)
    )
    return draft.leading(count)
