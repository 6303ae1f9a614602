"""What the fields of all bodies have in common."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, model_validator

MAX_FIELDS = 128  # fields of one object


def checked_text(value: str) -> str:
    """JSON can spell half of a surrogate pair, which no tokenizer takes. Raises ValueError."""
    value.encode()
    return value


Text = Annotated[str, AfterValidator(checked_text)]
Label = Annotated[Text, Field(max_length=64)]


class NullIsLeftOut(BaseModel):
    """Base of bodies in which null means that a field is left out, as in OpenAI's API."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        if isinstance(fields, dict):
            if len(fields) > MAX_FIELDS:  # to name each of a hundred thousand would take long
                raise ValueError(f"at most {MAX_FIELDS} fields are accepted")
            return {name: value for name, value in fields.items() if value is not None}
        return fields
