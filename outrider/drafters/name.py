"""Name of a drafter, as settings and requests give it."""

from functools import partial
from typing import Annotated

from pydantic import AfterValidator

from outrider.drafters.registry import Place, drafters, row_of


def _loaded_in(place: Place, setting: str) -> str:
    row = row_of(setting)
    if row.place is not place or row.mixes:
        there = [row.name for row in drafters() if row.place is place and not row.mixes]
        raise ValueError(
            f"{setting!r} is not loaded by {place.value}s; give {', '.join(there)},"
            " or module:NAME of such a row"
        )
    return setting


# A drafter is given by the name of its row, or as module:NAME.
WorkerDrafterName = Annotated[str, AfterValidator(partial(_loaded_in, Place.DRAFT_WORKER))]
TargetDrafterName = Annotated[str, AfterValidator(partial(_loaded_in, Place.TARGET_WORKER))]
