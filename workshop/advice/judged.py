"""Guesses of a candidate along an answer, and the rounds of any depth that follow from them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.drafters.mixed import Promises
from outrider.decoding.draft import Draft
from outrider.drafters.occurrences import Continuation

FIRST = 1  # index of the first drafted token of an answer; token 0 comes from the prefill
NO_TOKEN = -1  # replaces a wrong guess


@dataclass(frozen=True)
class DraftStart:
    """Draft that begins at one position of an answer."""

    drafted: int  # tokens in its chain
    correct: int  # leading tokens that equal the target's answer


@dataclass(frozen=True)
class JudgedAnswer:
    """Drafts of a candidate along one answer: ``starts[i]`` is the Draft that begins at ``tokens[i]``.

    A shallower Draft is a prefix of a deeper Draft.
    """

    tokens: tuple[int, ...]  # tokens of the answer
    starts: tuple[DraftStart, ...]  # [num_tokens]; entries before FIRST are empty
    guesses: tuple[Continuation, ...] = ()  # [num_tokens] scored guesses of an index


@dataclass
class Counts:
    """Counts of rounds of one depth."""

    depth: int
    rounds: int = 0
    tokens: int = 0  # tokens gained, the target's own included
    asked: int = 0  # rounds whose Draft did not come from the index
    drafted: int = 0
    reached: list[int] = field(default_factory=list)  # [depth] rounds that reached the position
    accepted: list[int] = field(default_factory=list)  # [depth] rounds that accepted the position

    def __post_init__(self) -> None:
        self.reached, self.accepted = [0] * self.depth, [0] * self.depth

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.rounds if self.rounds else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Acceptance rate over all positions: accepted / reached; 0 if nothing was drafted."""
        reached = sum(self.reached)
        return sum(self.accepted) / reached if reached else 0.0

    @property
    def rates(self) -> list[float | None]:
        """Acceptance rate by position [depth], given that the position was reached; None: never reached."""
        pairs = zip(self.accepted, self.reached, strict=True)
        return [accepted / reached if reached else None for accepted, reached in pairs]

    @property
    def asked_share(self) -> float:
        return self.asked / self.rounds if self.rounds else 0.0

    def add(self, start: DraftStart, left: int) -> int:
        """Adds a round and returns the number of tokens that it gained.

        left: remaining tokens of the answer. The last token counts as the target's own, even if it was
            drafted.
        """
        drafted = min(start.drafted, self.depth)
        correct = min(start.correct, drafted, left - 1)
        self.rounds += 1
        self.drafted += drafted
        for position in range(min(correct + 1, drafted, left - 1)):
            self.reached[position] += 1
            self.accepted[position] += position < correct
        self.tokens += correct + 1
        return correct + 1


def counted(judged: Sequence[JudgedAnswer], depth: int) -> Counts:
    """Counts rounds of this depth over all answers; each round begins where its predecessor ended."""
    counts = Counts(depth)
    for answer in judged:
        place = FIRST
        while place < len(answer.tokens):
            counts.asked += 1
            place += counts.add(answer.starts[place], len(answer.tokens) - place)
    return counts


def counted_mixed(others: Sequence[JudgedAnswer], indices: Sequence[JudgedAnswer], depth: int) -> Counts:
    """Counts rounds whose Draft comes from the drafter that is expected to gain more tokens.

    This is the gateway's own rule (gateway/drafters/mixed.py), over all answers of one task.

    indices: answers judged with an index; their guesses have probabilities.
    """
    counts, promises = Counts(depth), Promises()
    for other, index in zip(others, indices, strict=True):
        place = FIRST
        while place < len(other.tokens):
            rest = other.tokens[place:]
            guess = _up_to(index.guesses[place], depth)
            is_index = promises.of_index(guess) > promises.of_other(depth)
            counts.asked += not is_index
            start = index.starts[place] if is_index else other.starts[place]
            given = counts.add(start, len(rest))
            said = [*rest[:given]]
            promises.observe_index(guess, said)
            if not is_index:
                promises.observe_other(_draft(start, rest, depth), said)
            place += given
    return counts


def _up_to(guess: Continuation, depth: int) -> Continuation:
    return Continuation(guess.tokens[:depth], guess.probabilities[:depth])


def _draft(start: DraftStart, rest: tuple[int, ...], depth: int) -> Draft:
    """Returns the Draft with NO_TOKEN in place of wrong guesses."""
    wrong = (NO_TOKEN,) * (start.drafted - start.correct)
    return Draft.chain((*rest[: start.correct], *wrong)[:depth])
