"""Prompts from a file, and the target's answers to them, on which every candidate is judged."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, generate

EXAMPLE = '{"prompt": "...", "task": "..."}'
UNLABELLED = "all"  # task of prompts without a label


class PromptLine(BaseModel):
    """Line of the prompts file, a JSON object."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None  # chat, rendered by the chat template
    task: Annotated[str, Field(min_length=1)] = UNLABELLED

    @model_validator(mode="after")
    def _one_of_both(self) -> "PromptLine":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("a line has either prompt or messages")
        return self


@dataclass(frozen=True)
class Prompt:
    """Prompt of a request: its label and its tokens."""

    task: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class TargetAnswer:
    """Answer of the target to a prompt. ``tokens`` are the generated tokens alone."""

    task: str
    request: OfflineRequest
    tokens: tuple[int, ...]

    @property
    def text(self) -> tuple[int, ...]:
        """Tokens of prompt and answer."""
        return (*self.request.prompt, *self.tokens)


def read_prompts(file: Path, tokenizer: Any) -> list[Prompt]:
    """Reads prompts from a file.

    Args:
        file: a JSON object on each line, with ``prompt`` or ``messages``, and optionally ``task``, its label.
        tokenizer: tokenizer of the target, from transformers.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is invalid; the message names the line.
    """
    lines = [(number, line) for number, line in enumerate(file.read_text().splitlines(), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{str(file)!r} holds no prompt: give a JSON object a line")
    return [_read(f"{file}:{number}", line, tokenizer) for number, line in lines]


def _read(place: str, line: str, tokenizer: Any) -> Prompt:
    try:
        given = PromptLine.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "line"
        raise ValueError(f"{place}: {name}: {first['msg']}; {EXAMPLE} is accepted") from None
    if given.messages is not None:
        tokens = tokenizer.apply_chat_template(
            given.messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    else:
        tokens = tokenizer(given.prompt).input_ids
    if not tokens:
        raise ValueError(f"{place}: the prompt has no tokens")
    return Prompt(given.task, tuple(tokens))


def answered(
    target: Engine, prompts: Sequence[Prompt], temperature: float, max_tokens: int, seed: int
) -> list[TargetAnswer]:
    """Answers all prompts by plain decoding, but skips prompts without room for two tokens."""
    fitting = [prompt for prompt in prompts if len(prompt.tokens) + 2 <= target.max_length]
    requests = [
        OfflineRequest(
            prompt.tokens,
            Sampling(
                temperature=temperature,
                max_tokens=min(max_tokens, target.max_length - len(prompt.tokens)),
                seed=seed,
            ),
            noise_key(seed, 0, prompt.tokens),
        )
        for prompt in fitting
    ]
    outputs = generate(target, None, requests, 0)
    return [
        TargetAnswer(prompt.task, request, output.tokens)
        for prompt, request, output in zip(fitting, requests, outputs, strict=True)
    ]


def by_task(answers: Sequence[TargetAnswer]) -> Iterator[tuple[str, list[TargetAnswer]]]:
    """Groups answers by task, in the order of their first prompts."""
    for task in dict.fromkeys(answer.task for answer in answers):
        yield task, [answer for answer in answers if answer.task == task]
