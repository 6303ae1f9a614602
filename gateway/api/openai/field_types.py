"""Types and base classes of fields in the bodies of requests."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

MAX_FIELDS = 128  # fields of one object


def checked_text(value: str) -> str:
    """Returns the text. Raises ValueError for a lone surrogate: JSON can contain it, UTF-8 cannot."""
    value.encode()
    return value


NOT_READ = "accepted, changes nothing"
Ignored = Annotated[Any, Field(description=NOT_READ)]
Text = Annotated[str, AfterValidator(checked_text)]
Label = Annotated[Text, Field(max_length=64)]


class Strict(BaseModel):
    """Base of objects in a request, which refuse fields that they do not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class NullIsLeftOut(Strict):
    """Base of objects in which null means that a field is left out, as in OpenAI's API."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        if isinstance(fields, dict):
            if len(fields) > MAX_FIELDS:  # an error for each of a hundred thousand would take long
                raise ValueError(f"at most {MAX_FIELDS} fields are accepted")
            return {name: value for name, value in fields.items() if value is not None}
        return fields
