"""Base of the models that mirror Ray's: each field says what it means here."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

NO_MEANING = "no meaning here"


class Mirror(BaseModel):
    """Base of a mirror of Ray's or vLLM's models. A field that it lacks is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def without_meaning(why: str) -> Any:
    """Returns a field that takes anything and changes nothing, and why."""
    return Field(default=None, description=f"{NO_MEANING}: {why}", json_schema_extra={NO_MEANING: True})
