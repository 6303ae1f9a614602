"""Simulates when speculation pays for a mixture of experts, by number of streams: `python -m bench mixture`.

The target has the shapes of Qwen3-30B-A3B on one H100: a token chooses 8 of 128 experts in each of 48 layers.
It is compared with a dense model whose layers are as wide as eight experts, with as many active weights per
token. A draft of one layer is in the target's process. Everything else is as in bench/simulate.py: the
gateway's own code runs in virtual time, and steps take as long as `outrider plan` predicts.

A step of the mixture reads all distinct experts of its tokens. In one part of the table, tokens choose
experts independently. In the other part, a further token of a sequence adds fewer experts (``--alike``),
because neighbouring tokens of a text choose similar experts. The pace is not told which case it is: it learns
from the experts that steps count.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bench.costs import H100, costs_of
from bench.report import parser_of, save, table
from bench.simulate import NO_AHEAD, Pair, SimulatedLoad, measure, on
from outrider.pace.experts import ExpertsRead

STREAMS = (1, 2, 4, 8, 16, 64)
CONTEXT, ANSWER = 200, 256  # mean tokens
WARM_S = 1.0  # virtual seconds before tokens are counted
COUNTED_S = 6.0  # virtual seconds, summed over all streams
EXPERTS = 128  # experts of a layer
DRAFTED = 4  # tokens of the Drafts for which the table shows the number of experts


def alike(independent: ExpertsRead, share: float) -> ExpertsRead:
    """Returns the experts that steps read. share: weight of each further token of a sequence."""
    of_token = share * independent.of_token
    return ExpertsRead(of_sequence=independent.of_token - of_token, of_token=of_token)


def pairs(share: float) -> dict[str, Pair]:
    """Returns the targets by name, each with a draft in its process. share: argument of ``alike``."""
    mixture, draft = costs_of("mixture"), on(H100, costs_of("its draft"))
    near = replace(mixture, experts=alike(mixture.experts, share))
    targets = {"dense": costs_of("its dense twin"), "8 of 128, independent": mixture, "8 of 128, alike": near}
    return {
        name: Pair(on(H100, costs), draft, in_target="colocated", experts=costs.experts)
        for name, costs in targets.items()
    }


def measured(pair: Pair, acceptance: float, streams: int) -> dict[str, Any]:
    """Returns a row of ``measure`` with the experts that a layer reads in a plain step and with Drafts."""
    load = SimulatedLoad(streams, CONTEXT, ANSWER, WARM_S, max(COUNTED_S / streams, 0.5))
    row: Mapping[str, Any] = measure(pair, {"text": acceptance}, load, NO_AHEAD)
    read = [pair.experts.share(streams, streams * tokens) for tokens in (1, 1 + DRAFTED)]
    plain, drafted = (EXPERTS * float(share) or None for share in read)
    return {
        "streams": streams,
        "experts, plain": plain,
        f"experts, K = {DRAFTED}": drafted,
        **{name: value for name, value in row.items() if name != "streams"},
        "pace / plain": row["pace"] / row["plain"],
    }


def main(arguments: list[str]) -> None:
    parser = parser_of("mixture", __doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.8], help="per position")
    parser.add_argument(
        "--alike", type=float, default=0.6, help="what a further token of a sequence counts for"
    )
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for acceptance in options.acceptance:
        for name, pair in pairs(options.alike).items():
            for streams in options.streams:
                found = measured(pair, acceptance, streams)
                rows.append({"acceptance": acceptance, "target": name, **found})
                print(table(rows[-1:]), flush=True)
    print(save("mixture", rows, alike=options.alike))
