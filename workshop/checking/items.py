"""Items of an evaluation: prompts for the runs before and after a change, with expected texts."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workshop.checking.errors import CheckError
from workshop.checking.prompts import read_lines


class EvaluationItem(BaseModel):
    """One line of the file; unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    prompt: str
    expected: str | None = None  # text that the answer should equal or contain
    # Request fields at B that differ from the request at A: prompt, model, temperature and the like.
    changed: dict[str, Any] = Field(default_factory=dict)


def read_items(path: Path, *, needs_expected: bool) -> tuple[EvaluationItem, ...]:
    """Reads items from a file with a JSON object on each line. Raises CheckError that names a wrong line."""
    items = []
    for number, line in read_lines(path):
        try:
            item = EvaluationItem.model_validate_json(line)
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            field = ".".join(map(str, wrong["loc"])) or "line"
            raise CheckError(f"{path}, line {number}: {field}: {wrong['msg']}") from error
        if needs_expected and item.expected is None:
            raise CheckError(f'{path}, line {number}: "expected" is missing, which this score needs')
        items.append(item)
    if len(items) < 2:
        raise CheckError(f"{path} holds {len(items)} items: at least 2 are needed for an interval")
    return tuple(items)
