"""The name of a drafter, as settings and requests give it."""

from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

from outrider.drafters.registry import Place, drafter, drafters, row_of


def _known(name: str) -> str:
    return drafter(name).name


def _of_draft_worker(setting: str) -> str:
    row = row_of(setting)
    if row.place is not Place.DRAFT_WORKER or row.mixes:
        there = [row.name for row in drafters() if row.place is Place.DRAFT_WORKER and not row.mixes]
        raise ValueError(
            f"{setting!r} is not loaded by draft workers; give {', '.join(there)},"
            " or module:NAME of such a row"
        )
    return setting


DrafterName = Annotated[
    str,
    AfterValidator(_known),
    WithJsonSchema({"type": "string", "enum": [row.name for row in drafters()]}),
]
WorkerDrafterName = Annotated[str, AfterValidator(_of_draft_worker)]  # name of a row, or module:NAME
