"""Order in which a pass computes recurrent states: each token of a sequence after its parent."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.engine.held_state import RECORDS, HeldState, StateUse
from outrider.engine.inputs.step_input import Feed, StepInput


@dataclass(frozen=True)
class Recurrence:
    """Tokens of a sequence in a pass: first replayed tokens, which have records, then fed tokens.

    All these tokens are numbered together, as steps.
    """

    held: HeldState | None  # None at ranks other than 0, which receive only ``use``
    use: StateUse
    rows: slice  # rows of fed tokens in the batch
    replayed: int  # number of replayed tokens
    parents: Sequence[int]  # parent of each step; -1: the initial state of the pass
    chain: int  # leading steps that follow each other; the other steps are nodes of a tree

    @property
    def stored_after(self) -> int | None:
        """Step after which the state is stored; None: no state is stored."""
        return None if self.use.write is None else self.use.written - self.use.first - 1

    @property
    def kept_after(self) -> dict[int, int]:
        """Places in KeptStates by the step after which the state is stored."""
        return {length - self.use.first - 1: kept for length, kept in self.use.ends.items()}

    def ring(self, first: int, count: int) -> Iterator[slice]:
        """Yields the parts of the ring of records that hold tokens ``first``, ``first`` + 1 and so on."""
        while count > 0:
            place = first % RECORDS
            stop = min(place + count, RECORDS)
            yield slice(place, stop)
            first, count = first + stop - place, count - (stop - place)

    def finish(self) -> None:
        """Ends the pass for this sequence."""
        if self.held is not None:
            self.held.finish(self.use)


def begun_uses(feeds: Sequence[Feed]) -> list[StateUse]:
    """Begins a pass over the feeds at rank 0; returns the states that each feed uses.

    Raises:
        ValueError: a state is missing.
    """
    uses = []
    for feed in feeds:
        assert feed.state is not None
        uses.append(feed.state.begin(feed.start, len(feed.tokens), feed.committed))
    return uses


def recurrences(step: StepInput) -> list[Recurrence]:
    """Returns the Recurrence of each feed of a step."""
    made, row = [], 0
    for feed, use in zip(step.feeds, step.uses, strict=True):
        count = len(feed.tokens)
        chain = length = feed.start + count - use.first
        parents: Sequence[int] = range(-1, length - 1)
        if feed.tree is not None:
            chain = length - len(feed.tree)
            parents = [*parents[:chain], *(chain + parent for parent in feed.tree.parents)]
        rows = slice(row, row + count)
        replayed = feed.start - use.first
        made.append(Recurrence(feed.state, use, rows, replayed, parents, chain))
        row += count
    return made
