"""``outrider race``: the same prompts and seeds, answered by plain decoding and with speculation."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any, Final, Literal

from outrider.cli.json_output import STDOUT, add_json, print_or_write
from outrider.cli.processor import processor_name
from outrider.cli.service import API_KEY, add_address, exit_code
from outrider.client.answer import AnswerPiece
from outrider.client.client import Client
from outrider.client.fields import SamplingFields
from outrider.demo.prompts import KINDS, prompts

RACED = ("code", "prose", "json", "arithmetic")
Side = Literal["plain", "speculation"]
PLAIN: Final = "plain"
SPECULATION: Final = "speculation"
MODES: dict[Side, Literal["off", "auto"]] = {PLAIN: "off", SPECULATION: "auto"}
WARM_UP_TOKENS = 4
ROW = "{:16}{:>16}{:>24}{:>8}   {}"


@dataclass(frozen=True)
class RacedAnswer:
    """Tokens of one answer, and their times of arrival."""

    pieces: list[AnswerPiece]
    times: list[float]  # seconds since the request
    finish_reason: str | None
    counters: dict[str, int]  # counters of speculation

    @property
    def tokens_per_second(self) -> float | None:
        """Returns the speed from the first token to the last; None for fewer than two tokens."""
        if len(self.times) < 2:
            return None
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])

    def figures(self) -> dict[str, Any]:
        return {
            "tokens": len(self.pieces),
            "first_token_s": self.times[0] if self.times else None,
            "last_token_s": self.times[-1] if self.times else None,
            "tokens_per_second": self.tokens_per_second,
            "finish_reason": self.finish_reason,
            **self.counters,
        }


@dataclass(frozen=True)
class RaceRun:
    """Both answers to one prompt and seed."""

    prompt: str
    seed: int
    answers: dict[Side, RacedAnswer]

    @property
    def ratio(self) -> float | None:
        """Returns how many times as fast speculation was; None if a speed is not known."""
        plain, speculation = (self.answers[side].tokens_per_second for side in (PLAIN, SPECULATION))
        return speculation / plain if plain and speculation else None

    @property
    def parts_at(self) -> int | None:
        """Returns the number of tokens before the texts differ; None for equal texts."""
        plain, speculation = (
            [piece.token_id for piece in self.answers[side].pieces] for side in (PLAIN, SPECULATION)
        )
        pairs = zip(plain, speculation, strict=False)
        differing = next((index for index, (left, right) in enumerate(pairs) if left != right), None)
        if differing is None and len(plain) != len(speculation):
            return min(len(plain), len(speculation))
        return differing

    def figures(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "seed": self.seed,
            "ratio": self.ratio,
            "parts_at": self.parts_at,
            **{side: answer.figures() for side, answer in self.answers.items()},
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_address(parser)
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=RACED,
        metavar="KIND",
        help=f"kinds of held-out prompts: {', '.join(KINDS)} [{' '.join(RACED)}]",
    )
    parser.add_argument("--prompt", help="one prompt for every run, in place of the kinds")
    parser.add_argument("--runs", type=int, default=1, help="runs of each kind [%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of an answer [%(default)s]")
    parser.add_argument("--temperature", type=float, default=0.7, help="temperature [%(default)s]")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first run, then one more [%(default)s]"
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    if options.runs < 1:
        raise ValueError(f"--runs {options.runs}: at least 1")
    asked = (
        {kind: prompts(kind, options.runs) for kind in options.kinds}
        if options.prompt is None
        else {"prompt": [options.prompt] * options.runs}
    )
    if options.json not in (None, STDOUT):
        options.json.touch()  # fails before the race if the record cannot be written
    with Client(options.address, os.environ.get(API_KEY)) as client:
        raced = {kind: _race(client, kind, of_kind, options) for kind, of_kind in asked.items()}
    print_or_write("\n" + table(raced), _record(raced, options), options.json)
    return int(any(run.parts_at is not None for runs in raced.values() for run in runs))


def _race(client: Client, kind: str, of_kind: Sequence[str], options: argparse.Namespace) -> list[RaceRun]:
    runs = []
    for number, prompt in enumerate(of_kind):
        sampling: SamplingFields = {"temperature": options.temperature, "seed": options.seed + number}
        # Fills the prefix cache with the prompt, so that the second answer has no advantage.
        _answer(client, prompt, SPECULATION, {**sampling, "max_tokens": WARM_UP_TOKENS})
        order: tuple[Side, Side] = (PLAIN, SPECULATION) if number % 2 == 0 else (SPECULATION, PLAIN)
        whole: SamplingFields = {**sampling, "max_tokens": options.max_tokens}
        answers = {side: _answer(client, prompt, side, whole) for side in order}
        runs.append(RaceRun(prompt, options.seed + number, answers))
        speeds = ", ".join(
            f"{side} {_number(answer.tokens_per_second)} tokens/s" for side, answer in answers.items()
        )
        print(f"{kind}, run {number + 1} of {len(of_kind)}: {speeds}", file=sys.stderr, flush=True)
    return runs


def _answer(client: Client, prompt: str, side: Side, sampling: SamplingFields) -> RacedAnswer:
    began = time.perf_counter()
    answer = client.generate(prompt, speculation={"mode": MODES[side]}, **sampling)
    pieces, times = [], []
    for piece in answer:
        pieces.append(piece)
        times.append(time.perf_counter() - began)
    assert answer.usage is not None
    record = answer.usage.speculation
    counters = {name: getattr(record, name) for name in ("target_passes", "rounds", "drafted", "accepted")}
    return RacedAnswer(pieces, times, answer.finish_reason, counters)


def table(raced: dict[str, list[RaceRun]]) -> str:
    """Returns a row for each kind, with medians over its runs."""
    lines = [ROW.format("kind", "plain tokens/s", "speculation tokens/s", "ratio", "same text")]
    for kind, runs in raced.items():
        figures = _medians(runs)
        parted = [
            f"run {number} differs from token {run.parts_at + 1} on"
            for number, run in enumerate(runs, 1)
            if run.parts_at is not None
        ]
        lines.append(
            ROW.format(
                kind,
                _number(figures["plain_tokens_per_second"]),
                _number(figures["speculation_tokens_per_second"]),
                _number(figures["ratio"], ".2f"),
                f"NO: {', '.join(parted)}" if parted else "yes",
            )
        )
    return "\n".join(lines)


def _medians(runs: Sequence[RaceRun]) -> dict[str, float | None]:
    values = {
        f"{side}_tokens_per_second": [run.answers[side].tokens_per_second for run in runs] for side in MODES
    }
    values["ratio"] = [run.ratio for run in runs]
    known = {name: [value for value in of_runs if value is not None] for name, of_runs in values.items()}
    return {name: median(of_runs) if of_runs else None for name, of_runs in known.items()}


def _number(value: float | None, form: str = ".1f") -> str:
    return "-" if value is None else format(value, form)


def _record(raced: dict[str, list[RaceRun]], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "command": options.command,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"processor": processor_name(), "cores": os.cpu_count()},
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "kinds": {
            kind: {
                **_medians(runs),
                "same_text": all(run.parts_at is None for run in runs),
                "runs": [run.figures() for run in runs],
                "first_texts": {
                    side: [[piece.text, piece.origin] for piece in runs[0].answers[side].pieces]
                    for side in MODES
                },
            }
            for kind, runs in raced.items()
        },
    }
