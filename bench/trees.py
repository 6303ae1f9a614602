"""What heads bring that draft trees: `python -m bench trees`.

Those that ship for the demo target, by nodes beside each chain, on held-out prompts. Counts: tokens per pass,
by kind of text and temperature. Times: speed to plain decoding of the demo target inflated, whose head is
inflated alike, one stream asking for answers of all kinds by turns.
"""

import argparse
from collections.abc import Iterator
from itertools import cycle, product
from statistics import median
from typing import Any

from bench.checkpoints import INFLATED
from bench.drafting import PLAIN, Pairs, asked_of
from bench.report import save, table
from outrider.demo.prompts import KINDS, prompts
from outrider.engine.offline.speculate import Request

HEADS = ("eagle3", "medusa")
TEXTS = ("code", "prose", "json", "arithmetic")
TIMED_TEMPERATURE = 0.7


def counted(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    pairs = Pairs(None, options.threads)
    cells = product(options.drafters, options.kinds, options.temperatures, options.leaves)
    for name, kind, temperature, leaves in cells:
        asked = asked_of(prompts(kind, options.prompts), temperature, options.tokens)
        tally = pairs.of(name).tally(asked, options.depth, leaves=leaves)
        row = {"drafter": name, "kind": kind, "temperature": temperature, "leaves": leaves}
        yield {**row, "rounds": tally.rounds, "tokens per pass": tally.tokens_per_pass}


def timed(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Widths take turns, and plain decoding with them."""
    pairs, asked = Pairs(options.target, options.timed_threads), by_turns(options)
    tokens = len(options.kinds) * options.answer
    for name in options.drafters:
        ways = [(PLAIN, 0, 0), *((name, options.depth, leaves) for leaves in options.leaves)]
        tallies = [
            [pairs.of(way).tally(cycle(asked), depth, 1, tokens, leaves) for way, depth, leaves in ways]
            for _ in range(options.repetitions)
        ]
        for place, leaves in enumerate(options.leaves, start=1):
            of_width = [(turn[place], turn[0]) for turn in tallies]
            yield {
                "drafter": name,
                "leaves": leaves,
                "to plain": median(drafted.rate / plain.rate for drafted, plain in of_width),
                "pass / target step": median(
                    drafted.seconds / drafted.passes / (plain.seconds / plain.passes)
                    for drafted, plain in of_width
                ),
            }


def by_turns(options: argparse.Namespace) -> list[Request]:
    """Of every kind one after the other; answers do not end before their time."""
    of_kinds = [
        asked_of(prompts(kind, options.prompts), TIMED_TEMPERATURE, options.answer, ignore_eos=True)
        for kind in options.kinds
    ]
    return [request for together in zip(*of_kinds, strict=True) for request in together]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench trees", description=__doc__.partition("\n")[0])
    parser.add_argument("--drafters", nargs="+", default=list(HEADS), choices=HEADS)
    parser.add_argument("--kinds", nargs="+", default=list(TEXTS), choices=KINDS)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7], help="of counts")
    parser.add_argument("--leaves", type=int, nargs="+", default=[0, 2, 4, 8], help="nodes beside each chain")
    parser.add_argument("--prompts", type=int, default=32, help="of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer at most, for counts")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="for counts")
    parser.add_argument("--target", choices=INFLATED, default="190M", help="for times")
    parser.add_argument("--timed-threads", type=int, default=2, help="for times")
    parser.add_argument("--answer", type=int, default=32, help="tokens of each answer, for times")
    parser.add_argument("--repetitions", type=int, default=5, help="for times")
    options = parser.parse_args(arguments)
    found: dict[str, list[dict[str, Any]]] = {}
    for title, rows in (("times", timed(options)), ("rows", counted(options))):
        found[title] = []
        for row in rows:
            found[title].append(row)
            print(table([row]), flush=True)
    told = {"prompts": options.prompts, "tokens": options.tokens, "depth": options.depth}
    print(save("trees", found["rows"], times=found["times"], **told))
