"""The name of a drafter, as settings and requests give it."""

from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

from outrider.drafters.registry import drafter, drafters


def _known(name: str) -> str:
    return drafter(name).name


DrafterName = Annotated[
    str,
    AfterValidator(_known),
    WithJsonSchema({"type": "string", "enum": [row.name for row in drafters()]}),
]
