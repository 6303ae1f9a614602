"""Tokens per pass of heads that draft trees: `python -m bench trees`.

Those that ship for the demo target, by kind of text, temperature, and nodes beside each chain, on held-out
prompts. Counts, not times.
"""

import argparse
from itertools import product

from bench.drafting import Pairs, asked_of
from bench.report import save, table
from outrider.demo.prompts import KINDS, prompts

HEADS = ("eagle3", "medusa")
TEXTS = ("code", "prose", "json", "arithmetic")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench trees", description=__doc__.partition("\n")[0])
    parser.add_argument("--drafters", nargs="+", default=list(HEADS), choices=HEADS)
    parser.add_argument("--kinds", nargs="+", default=list(TEXTS), choices=KINDS)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--leaves", type=int, nargs="+", default=[0, 2, 4, 8], help="nodes beside each chain")
    parser.add_argument("--prompts", type=int, default=32, help="of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer at most")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    rows, pairs = [], Pairs(None, options.threads)
    cells = product(options.drafters, options.kinds, options.temperatures, options.leaves)
    for name, kind, temperature, leaves in cells:
        asked = asked_of(prompts(kind, options.prompts), temperature, options.tokens)
        tally = pairs.of(name).tally(asked, options.depth, leaves=leaves)
        row = {"drafter": name, "kind": kind, "temperature": temperature, "leaves": leaves}
        rows.append({**row, "rounds": tally.rounds, "tokens per pass": tally.tokens_per_pass})
        print(table(rows[-1:]), flush=True)
    told = {"prompts": options.prompts, "tokens": options.tokens, "depth": options.depth}
    print(save("trees", rows, **told))
