"""Prints an answer as it streams, and the effect of speculation on it."""

import sys

from outrider.client.client import Answer

COLOURS = {"accepted": "\033[32m", "forced": "\033[36m", "target": "\033[33m", "plain": ""}
RESET = "\033[0m"
ALWAYS, AUTO, NEVER = "always", "auto", "never"  # when colours are printed; auto: to a terminal


def is_coloured(when: str) -> bool:
    """Whether the standard output gets colours."""
    return when == ALWAYS or (when == AUTO and sys.stdout.isatty())


def print_legend() -> None:
    legend = ", ".join(f"{code}{origin}{RESET if code else ''}" for origin, code in COLOURS.items())
    print(f"tokens: {legend}", file=sys.stderr)


def print_answer(answer: Answer, *, coloured: bool) -> None:
    """Prints the pieces and a newline, even if the answer breaks off. Raises OutriderError."""
    try:
        for piece in answer:
            code = COLOURS[piece.origin] if coloured else ""
            print(f"{code}{piece.text}{RESET if code else ''}", end="", flush=True)
    finally:
        if answer.pieces or answer.finish_reason is not None:
            print(flush=True)


def print_record(answer: Answer) -> None:
    """Prints a summary of a finished answer to stderr."""
    assert answer.usage is not None
    record = answer.usage.speculation
    print(
        f"{answer.usage.completion_tokens} tokens in {record.target_passes} passes of the target, "
        f"{record.accepted} of {record.drafted} drafted accepted, "
        f"{f'{record.forced} forced, ' if record.forced else ''}seed {answer.seed}, {answer.finish_reason}",
        file=sys.stderr,
    )
