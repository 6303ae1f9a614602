"""Prompts of a check: from a file, or texts of several kinds, some longer than one cache block."""

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from workshop.checking.errors import CheckError

PROMPTS = (
    'Fill in the record.\n{"name": "',
    "The old lighthouse keeper climbed the stairs every evening, and",
    "def mean(values):\n    ",
    "Question: What is the capital of France?\nAnswer:",
    "12 + 30 = 42\n17 + 25 = 42\n9 + 14 =",
    "Dear Sir or Madam,\n\nI am writing to you because",
    "Once upon a time there was a fox who lived at the edge of a forest. Every morning it went down to the"
    " river to drink, and every morning it met the same heron. One day the heron said:",
    "Shopping list:\n- bread\n- milk\n-",
    "The three most important things to know about the sea are",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        ",
    "Report of the meeting. Present were the treasurer, the secretary and four members. The first point was"
    " the roof of the hall, which has been leaking since the autumn. The treasurer said that",
    "SELECT name, age FROM people WHERE",
    "The train to Rome leaves at",
    "for i in range(10):\n    print(",
    "Monday: rain. Tuesday: sun. Wednesday:",
    "She opened the letter, read it twice, and",
)


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    prompt: str


def read_prompts(path: Path | None) -> tuple[str, ...]:
    """Reads prompts from a file. Raises CheckError that names an invalid line."""
    if path is None:
        return PROMPTS
    prompts = []
    for number, line in read_lines(path):
        try:
            told = json.loads(line)
            prompts.append(told if isinstance(told, str) else _Line.model_validate(told).prompt)
        except (ValueError, ValidationError) as error:
            accepted = 'a JSON text, or an object with one as "prompt", is accepted'
            raise CheckError(f"{path}, line {number}: {accepted}") from error
    if not prompts:
        raise CheckError(f"{path} holds no prompt: at least one is needed")
    return tuple(prompts)


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines of a file that are not blank, each with its number from 1. Raises CheckError."""
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if line.strip():
            yield number, line


def read_text(path: Path) -> str:
    """Reads a text from a file. Raises CheckError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckError(f"{path} cannot be read: {error}") from error
