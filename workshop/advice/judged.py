"""What a candidate would have guessed along an answer, and what rounds of any depth would have come of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.drafters.mixed import Promises
from outrider.decoding.draft import Draft
from outrider.drafters.occurrences import Guess

FIRST = 1  # token of an answer that is drafted first: the one before it comes with the prompt's pass
NO_TOKEN = -1  # in the place of a wrong guess


@dataclass(frozen=True)
class DraftStart:
    """A Draft that follows a part of the answer."""

    drafted: int  # tokens of its chain
    right: int  # leading ones that are what the target said


@dataclass(frozen=True)
class JudgedAnswer:
    """A candidate along one answer: ``starts[i]`` is the Draft whose first token stands for ``tokens[i]``.

    A Draft of less depth is the beginning of one that is deeper.
    """

    tokens: tuple[int, ...]  # of the answer
    starts: tuple[DraftStart, ...]  # [num_tokens] those before FIRST say nothing
    guesses: tuple[Guess, ...] = ()  # [num_tokens] of an index that knows how good they are


@dataclass
class Counts:
    """Rounds, all of one depth."""

    depth: int
    rounds: int = 0
    tokens: int = 0  # that they gave, the target's own included
    asked: int = 0  # rounds for which the drafter with a model was asked
    drafted: int = 0
    verified: list[int] = field(default_factory=list)  # [depth] rounds that reached the position
    accepted: list[int] = field(default_factory=list)  # [depth] of these, where it was right

    def __post_init__(self) -> None:
        self.verified, self.accepted = [0] * self.depth, [0] * self.depth

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.rounds if self.rounds else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / verified over all positions; 0 where nothing was drafted."""
        verified = sum(self.verified)
        return sum(self.accepted) / verified if verified else 0.0

    @property
    def rates(self) -> list[float | None]:
        """[depth] by position, given that it was reached; None where none did."""
        pairs = zip(self.accepted, self.verified, strict=True)
        return [accepted / verified if verified else None for accepted, verified in pairs]

    @property
    def asked_share(self) -> float:
        return self.asked / self.rounds if self.rounds else 0.0

    def add(self, start: DraftStart, left: int) -> int:
        """A round. Returns the tokens that it gave.

        left: tokens of the answer from there on. The last one counts as the target's own, also where the
            Draft had it.
        """
        drafted = min(start.drafted, self.depth)
        right = min(start.right, drafted, left - 1)
        self.rounds += 1
        self.drafted += drafted
        for position in range(min(right + 1, drafted, left - 1)):
            self.verified[position] += 1
            self.accepted[position] += position < right
        self.tokens += right + 1
        return right + 1


def counted(judged: Sequence[JudgedAnswer], depth: int) -> Counts:
    """Rounds of this depth over all answers, each begun where the one before it ended."""
    counts = Counts(depth)
    for one in judged:
        place = FIRST
        while place < len(one.tokens):
            counts.asked += 1
            place += counts.add(one.starts[place], len(one.tokens) - place)
    return counts


def counted_mixed(others: Sequence[JudgedAnswer], indices: Sequence[JudgedAnswer], depth: int) -> Counts:
    """The same where each Draft comes from the one of the two that promises more tokens.

    The gateway's own rule (gateway/drafters/mixed.py), over all answers of one task.

    indices: of a drafter whose guesses have scores, along the same answers.
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


def _up_to(guess: Guess, depth: int) -> Guess:
    return Guess(guess.tokens[:depth], guess.probabilities[:depth])


def _draft(start: DraftStart, rest: tuple[int, ...], depth: int) -> Draft:
    """As it was, but for tokens that do not count."""
    wrong = (NO_TOKEN,) * (start.drafted - start.right)
    return Draft.chain((*rest[: start.right], *wrong)[:depth])
