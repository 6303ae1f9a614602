"""Every way to draft, beside plain decoding: `python -m bench drafters`.

Three parts; rows are kept as they come, so that a run that was cut goes on where it was. counts: acceptance
by position and tokens per pass on the demo target, at a fixed depth on held-out prompts. They are the same
on that target inflated, which computes the same function. engine: on the demo target inflated to 190 M, in
this process: what a Draft costs, and speed to plain decoding, so many streams asking for one answer after
the other. service: the same by running services, each drafter under the pace. A head of the inflated target
is inflated alike; draft models are as they are.

Suffixes have past answers to other prompts of the same kind in the first two parts, and those of their own
run in a service.
"""

import argparse
import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import cycle, product
from statistics import median
from typing import Any

from bench.checkpoints import INFLATED
from bench.drafters_served import Windows, rows_of, running, served
from bench.drafting import DRAFTED_BY, PLAIN, SCOPE, Pairs, asked_of
from bench.report import RESULTS, command, save, table
from outrider.demo.prompts import KINDS, prompts
from outrider.drafters.past_answers import PastAnswers
from outrider.engine.offline.speculate import Request, generate

NAME = "drafters"
PARTS = ("counts", "engine", "service")
TEXTS = ("code", "prose", "json", "arithmetic")
EXIT_AFTER = 1  # of the demo target's layers, in a service
TEMPERATURES = (0.7, 1.0)
ALL, PAST = 48, 16  # prompts that there are of each kind; the last ones are those of past answers
PAST_TOKENS = 96  # of each such answer
SPEED_PROMPTS = 8  # of each kind
LEAST_TOKENS, EACH_TOKENS = 128, 24  # that speed is measured on: with one stream, and for each further one
Rows = list[dict[str, Any]]


class Kept:
    """Rows of all parts, written whenever there are more."""

    def __init__(self) -> None:
        path = RESULTS / f"{NAME}.json"
        self._parts: dict[str, dict[str, Any]] = (
            json.loads(path.read_text())["parts"] if path.exists() else {}
        )

    def begin(self, part: str, **told: Any) -> Rows:
        """Rows that are there. Those that were measured in another way go."""
        there = self._parts.get(part, {})
        if any(there.get(name) != value for name, value in told.items()):
            self._parts[part] = {**told, "rows": []}
        rows: Rows = self._parts[part]["rows"]
        return rows

    def add(self, part: str, rows: Rows) -> None:
        print(table(rows), flush=True)
        self._parts[part]["rows"] += rows
        self._parts[part]["command"] = command()
        commands = {name: part["command"] for name, part in self._parts.items() if part["rows"]}
        save(NAME, (), commands=commands, parts=self._parts)


class Past:
    """Answers of the demo target to the last prompts of each kind, which nothing else is asked."""

    def __init__(self, pairs: Pairs) -> None:
        self._target = pairs.of("plain").target
        self._made: dict[tuple[str, float], PastAnswers] = {}

    def of(self, kind: str, temperature: float) -> PastAnswers:
        if (kind, temperature) not in self._made:
            past = self._made[kind, temperature] = PastAnswers(2**18)
            asked = asked_of(prompts(kind, ALL)[-PAST:], temperature, PAST_TOKENS)
            for output in generate(self._target, None, asked, 0):
                past.add(SCOPE, output.tokens)
        return self._made[kind, temperature]


def counts(kept: Kept, options: argparse.Namespace) -> None:
    """Of every drafter on the demo target."""
    told = {"prompts": options.prompts, "tokens": options.tokens, "depth": options.depth}
    rows, pairs = kept.begin("counts", **told), Pairs(None, options.threads)
    past = Past(pairs)
    for name in without(rows, options.drafters):
        new = []
        for kind, temperature in product(options.kinds, TEMPERATURES):
            asked = asked_of(prompts(kind, options.prompts), temperature, options.tokens)
            tally = pairs.of(name, past.of(kind, temperature)).tally(asked, options.depth)
            row = {"drafter": name, "kind": kind, "temperature": temperature, "rounds": tally.rounds}
            row |= {"drafts": tally.drafts, "tokens per pass": tally.tokens_per_pass}
            new.append({**row, "reached": tally.reached, "accepted": tally.accepted})
        kept.add("counts", new)


def engine(kept: Kept, options: argparse.Namespace) -> None:
    """Speed of every drafter, and between its runs that of plain decoding."""
    told = {"depth": options.depth, "answer": options.answer, "target": options.target}
    rows, pairs = kept.begin("engine", **told), Pairs(options.target, options.threads)
    past = Past(Pairs(None, options.threads))
    for name in without(rows, options.drafters):
        for way, depth in ((PLAIN, 0), (name, options.depth)):  # takes the prompts in
            asked = [one for kind in options.kinds for one in asked_at(kind, TEMPERATURES[0], tokens=2)]
            pairs.of(way).tally(asked, depth, streams=8)
        new = [row for streams in options.streams for row in engine_rows(pairs, past, name, streams, options)]
        kept.add("engine", new)


def engine_rows(
    pairs: Pairs, past: Past, name: str, streams: int, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Of one drafter at one number of streams."""
    tokens = LEAST_TOKENS + EACH_TOKENS * (streams - 1)
    plain, drafted = [], {}
    for kind in options.kinds:
        for temperature in TEMPERATURES:
            pair = pairs.of(name, past.of(kind, temperature))
            asked = cycle(asked_at(kind, temperature, options.answer))
            drafted[kind, temperature] = pair.tally(asked, options.depth, streams, tokens)
        asked = cycle(asked_at(kind, TEMPERATURES[0], options.answer))
        plain.append(pairs.of(PLAIN).tally(asked, 0, streams, tokens // len(options.kinds)))
    plain_rate = median(tally.rate for tally in plain)
    step_s = median(tally.seconds / tally.passes for tally in plain)
    for (kind, temperature), tally in drafted.items():
        yield {
            "drafter": name,
            "kind": kind,
            "temperature": temperature,
            "streams": streams,
            "plain, tokens/s": plain_rate,
            "tokens/s": tally.rate,
            "to plain": tally.rate / plain_rate,
            "Draft / target step": tally.drafting_s / tally.passes / step_s,
            "pass / target step": tally.seconds / tally.passes / step_s,
        }


def service(kept: Kept, options: argparse.Namespace) -> None:
    """Speed of every drafter by the services that have it."""
    windows = Windows(options.learning_s, options.warm_s, options.counted_s)
    rows = kept.begin("service", target=options.target, **asdict(windows))
    for one in served(options.target, EXIT_AFTER):
        if wanted := without(rows, [name for name in one.named if name in options.drafters]):
            with running(one, options.target) as address:
                for name in wanted:
                    measured = rows_of(
                        address, name, one.named[name], options.kinds, TEMPERATURES, options.streams, windows
                    )
                    kept.add("service", asyncio.run(measured))


def asked_at(kind: str, temperature: float, tokens: int) -> list[Request]:
    """For speed: answers do not end before their time."""
    return asked_of(prompts(kind, SPEED_PROMPTS), temperature, tokens, ignore_eos=True)


def without(rows: Rows, drafters: Sequence[str]) -> list[str]:
    """Those that no row is of."""
    there = {row["drafter"] for row in rows}
    return [name for name in drafters if name not in there]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench drafters", description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=PARTS)
    parser.add_argument("--drafters", nargs="+", default=[*DRAFTED_BY], choices=DRAFTED_BY)
    parser.add_argument("--kinds", nargs="+", default=[*TEXTS], choices=KINDS)
    parser.add_argument("--depth", type=int, default=4, help="of every Draft, but in a service")
    parser.add_argument("--threads", type=int, default=2, help="in this process; a service's models have 1")
    parser.add_argument("--prompts", type=int, default=ALL - PAST, help="of each kind, for counts")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer at most, for counts")
    parser.add_argument("--target", choices=INFLATED, default="190M", help="for speed")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], help="for speed")
    parser.add_argument("--answer", type=int, default=32, help="tokens of each answer, for speed")
    parser.add_argument("--learning-s", type=float, default=4.0, help="of a service's pace, per kind")
    parser.add_argument("--warm-s", type=float, default=3.0, help="before a service's tokens count")
    parser.add_argument("--counted-s", type=float, default=6.0, help="while they do")
    options = parser.parse_args(arguments)
    kept = Kept()
    for part in options.parts:
        {"counts": counts, "engine": engine, "service": service}[part](kept, options)
