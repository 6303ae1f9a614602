"""What parallel drafts change at GPU cost ratios, without a GPU: `python -m bench parallel`.

The simulated service of `python -m bench simulate`, under the pace and with draft-ahead: a draft that needs a
pass for each token, and one of the same cost that guesses all positions in one pass. Masks do not see what
was drawn before them. So there are three of the latter: with each position they keep so much of the
acceptance that the former has.
"""

import argparse
from typing import Any

from bench import virtual
from bench.report import save, table
from bench.simulate import ACCEPTANCE, BRANCHES, MODES, PAIRS, Counter, Load, closed_loop, hardware_of
from bench.simulated import Ahead, Parallel
from bench.simulated_runner import Hardware

KEPT = (1.0, 0.9, 0.8)
STREAMS = (1, 8, 32)
COUNTED_S = 30.0  # of all streams together
AHEAD = Ahead(BRANCHES, runner_up_rate=0.5)


def measure(pair: tuple[Hardware, Hardware], load: Load) -> dict[str, Any]:
    """A row: tokens per second, and the mean depth that the pace chose."""

    def run(mode: str, parallel: Parallel | None = None) -> Counter:
        return virtual.run(closed_loop(pair, ACCEPTANCE, MODES[mode], load, AHEAD, parallel))

    row: dict[str, Any] = {"streams": load.streams, "plain": run("plain").rate(load)}
    for name, parallel in [("token by token", None), *((f"kept {kept:g}", Parallel(kept)) for kept in KEPT)]:
        counter = run("pace", parallel)
        row[name] = counter.rate(load)
        row[f"depth, {name}"] = counter.stats.drafted / max(counter.stats.rounds, 1)
    return row


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench parallel", description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--warm-s", type=float, default=5.0, help="virtual seconds before tokens count")
    parser.add_argument("--counted-s", type=float, default=8.0, help="virtual seconds, more for few streams")
    options = parser.parse_args(arguments)
    rows = []
    for name, pair in PAIRS.items():
        for streams in options.streams:
            counted_s = max(options.counted_s, COUNTED_S / streams)
            load = Load(streams, 512, 256, options.warm_s, counted_s)
            rows.append({"draft": name, **measure(pair, load)})
            print(table(rows[-1:]), flush=True)
    print(save("parallel", rows, hardware=hardware_of(PAIRS), acceptance=ACCEPTANCE))
