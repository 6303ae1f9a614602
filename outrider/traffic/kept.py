"""Kept traffic: what a gateway writes down of answers, and what a draft is fitted to. Token ids, no text.

A line of JSON for each answer. Files have the suffix ``.jsonl``, in a folder and those below it; their names
begin with the time of their first line, in milliseconds since 1970.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

SUFFIX = ".jsonl"

TokenIds = tuple[Annotated[int, Field(ge=0)], ...]


class Kept(BaseModel):
    """An answer, and what it was an answer to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: TokenIds
    answer: TokenIds
    temperature: float
    task: str | None = None  # label of the request

    def line(self) -> str:
        """With its end."""
        return self.model_dump_json(exclude_none=True) + "\n"


def read_kept(folder: Path, most: int) -> list[Kept]:
    """The newest answers first.

    Raises:
        ValueError: there is none, or a line is something else; the message names its file.
    """
    files = sorted(folder.rglob(f"*{SUFFIX}"), key=lambda file: file.name, reverse=True)
    kept = list(islice((one for file in files for one in reversed(list(_lines(file)))), most))
    if not kept:
        raise ValueError(f"{str(folder)!r} holds no kept traffic: gateway.keep has gateways write some")
    return kept


def _lines(file: Path) -> Iterator[Kept]:
    """A file that was deleted meanwhile has none."""
    try:
        written = file.read_bytes()
    except FileNotFoundError:
        return
    for number, line in enumerate(whole_lines(written), 1):
        yield _read(line, f"{file}:{number}")


def _read(line: bytes, place: str) -> Kept:
    try:
        return Kept.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "line"
        raise ValueError(f"{place}: {name}: {first['msg']}") from None


def whole_lines(written: bytes) -> list[bytes]:
    """With their ends, without a last one that was cut off, or is being written."""
    return written[: written.rfind(b"\n") + 1].splitlines(keepends=True)


def read_answers(file: Path) -> list[Kept]:
    """Those of one file, in their order. Raises ValueError as ``read_kept``."""
    return list(_lines(file))
