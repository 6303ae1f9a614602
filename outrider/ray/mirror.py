"""Base of the models that mirror Ray's models: each field says what it means in Outrider."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

NO_MEANING = "no meaning here"


class Mirror(BaseModel):
    """Base of a mirror of Ray's or vLLM's models. Unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def without_meaning(why: str) -> Any:
    """Returns a field that accepts any value and has no effect. why: reason, for its description."""
    return Field(default=None, description=f"{NO_MEANING}: {why}", json_schema_extra={NO_MEANING: True})
