"""Recorded answers, to which a draft can be fitted: token ids, no text.

A file has a line of JSON for each answer. Files have the suffix ``.jsonl`` and lie in a folder or its
subfolders. Their names begin with the time of their first line, in milliseconds since 1970.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

SUFFIX = ".jsonl"

TokenIds = tuple[Annotated[int, Field(ge=0)], ...]


class RecordedAnswer(BaseModel):
    """An answer and its prompt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: TokenIds
    answer: TokenIds
    temperature: float
    task: str | None = None  # label of the request

    def line(self) -> str:
        """Returns the answer as a line of JSON, with its line end."""
        return self.model_dump_json(exclude_none=True) + "\n"


def read_folder(folder: Path, most: int) -> list[RecordedAnswer]:
    """Returns at most ``most`` answers of all files in a folder, the newest first.

    Raises:
        ValueError: the folder has no answer, or a line is not an answer; the message names its file.
    """
    files = sorted(folder.rglob(f"*{SUFFIX}"), key=lambda file: file.name, reverse=True)
    recorded = (answer for file in files for answer in reversed(list(_answers(file))))
    newest = list(islice(recorded, most))
    if not newest:
        raise ValueError(
            f"{str(folder)!r} holds no recorded traffic: the setting gateway.record has gateways write it"
        )
    return newest


def read_file(file: Path) -> list[RecordedAnswer]:
    """Returns the answers of a file in their order. Raises ValueError as ``read_folder`` does."""
    return list(_answers(file))


def _answers(file: Path) -> Iterator[RecordedAnswer]:
    """Yields the answers of a file; none if the file was deleted meanwhile."""
    try:
        written = file.read_bytes()
    except FileNotFoundError:
        return
    for number, line in enumerate(whole_lines(written), 1):
        yield _read(line, f"{file}:{number}")


def _read(line: bytes, place: str) -> RecordedAnswer:
    try:
        return RecordedAnswer.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "line"
        raise ValueError(f"{place}: {name}: {first['msg']}") from None


def whole_lines(written: bytes) -> list[bytes]:
    """Returns the complete lines with their line ends; an incomplete last line is left out."""
    return written[: written.rfind(b"\n") + 1].splitlines(keepends=True)
