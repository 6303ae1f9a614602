"""Drafters of a deployment, by the names that settings and requests use."""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace

from outrider.drafters.registry import DrafterInfo, Place, drafters, mixed, row_of, split_name

INDICES = ("suffix", "ngram")  # indices that need no prediction; equal guesses count for the first index
BY_TASK = "auto"  # in place of a drafter's name: for each task the fastest drafter


class Roster:
    """Drafters by name: a draft has its own name, every other drafter has the name of its registry row.

    A mixed drafter has both names: ``code+suffix`` if a draft is named ``code``. Each target drafter can be
    united with suffixes, ``eagle3+suffix``, and with n-grams too: ``eagle3+suffix+ngram``.
    """

    def __init__(self, drafts: Mapping[str, str], target_drafters: Iterable[str] = ()) -> None:
        """
        Args:
            drafts: registry row of each draft, as a setting names it; key: name of the draft.
            target_drafters: registry rows of the target drafters, as a setting names them.
        """
        self._drafts = {name: row_of(setting).name for name, setting in drafts.items()}
        self._target_drafters = [row_of(setting).name for setting in target_drafters]
        self._there = {row.name: row for row in self._rows()}

    def __iter__(self) -> Iterator[DrafterInfo]:
        """Yields every drafter of the deployment. Worker drafters have the name of their draft."""
        return iter(self._there.values())

    @property
    def names(self) -> Set[str]:
        """Names of all drafters of the deployment."""
        return self._there.keys()

    def _rows(self) -> Iterator[DrafterInfo]:
        for row in drafters():
            if row.reads_prediction:
                continue  # only a request with a prediction has it
            if row.place is Place.DRAFT_WORKER:
                yield from (_renamed(row, name) for name, kind in self._drafts.items() if kind == row.asked)
            elif row.place is Place.GATEWAY:
                yield row
            elif row.name in self._target_drafters:
                yield from (row, mixed(row.name), mixed(row.name, *INDICES))

    def find(self, name: str) -> DrafterInfo:
        """Returns the row of a drafter. Raises ValueError, naming all drafters, if there is none."""
        if name in self._there:
            return self._there[name]
        reason = f"there is no drafter {name!r}"
        if any(row.name == split_name(name)[0] and row.place is Place.TARGET_WORKER for row in drafters()):
            there = ", ".join(map(repr, self._target_drafters)) or "none"
            reason = f"{name!r} would run in the target's process, and there runs {there}"
        raise ValueError(f"{reason}; there are: {', '.join(self._there)}")


def _renamed(row: DrafterInfo, name: str) -> DrafterInfo:
    if row.mixes is None:
        return replace(row, name=name)
    mixes = (name, *row.mixes[1:])
    return replace(row, name="+".join(mixes), mixes=mixes)
