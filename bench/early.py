"""Rounds that are launched early, at GPU cost ratios, without a GPU: `python -m bench early`.

The simulated service of `python -m bench simulate`, whose target has a host too: it builds and launches a
step, and processes its tokens, in the time that an H100's host took. While a step verifies the Drafts of some
sequences, those of others arrive. Their step is launched late, once the tokens of the one before are
processed, or early in one of three ways (bench.simulated_runner.Launching). One of them would take to know
beforehand when a step will end.
"""

import argparse
from dataclasses import replace
from typing import Any

from bench import virtual
from bench.report import save, table
from bench.simulate import (
    ACCEPTANCE,
    AHEAD_PAIRS,
    BRANCHES,
    DRAFT_1B,
    H100,
    TARGET_70B,
    Load,
    closed_loop,
    fixed,
    hardware_of,
)
from bench.simulated import Ahead
from bench.simulated_runner import Host, Launching
from gateway.settings import Speculation
from outrider.engine.planning.step_costs import ARITHMETIC, MEMORY

STREAMS = (8, 32)
HOST = Host(launch_s=0.8e-3, launch_sequence_s=0.05e-3, process_s=0.25e-3, process_sequence_s=0.022e-3)
AHEAD = Ahead(BRANCHES, runner_up_rate=0.5)
DRAFT_8B = replace(
    DRAFT_1B,
    weight_bytes=16.0e9,
    bytes_per_s=MEMORY * H100.bytes_per_s,
    flops_per_token=16.0e9,
    flops_per_s=ARITHMETIC * H100.flops_per_s,
    cache_bytes_per_token=131_072,  # 32 layers, 8 heads of 128
)
PAIRS = {
    "1B on an H100": AHEAD_PAIRS["1B on an H100"],
    "1B in 4 bit on an L4": AHEAD_PAIRS["1B in 4 bit on an L4"],
    "8B on an H100": (TARGET_70B, DRAFT_8B),
}
MODES = {"K = 4": fixed(4), "pace": Speculation()}


def measure(draft: str, mode: str, load: Load) -> dict[str, Any]:
    """A row: tokens per second by when steps are launched."""
    row: dict[str, Any] = {"draft": draft, "mode": mode, "streams": load.streams}
    for launching in Launching:
        host = replace(HOST, launching=launching)
        counter = virtual.run(closed_loop(PAIRS[draft], ACCEPTANCE, MODES[mode], load, AHEAD, host=host))
        row[launching.name] = counter.rate(load)
    return row


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench early", description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--warm-s", type=float, default=3.0, help="virtual seconds before tokens count")
    parser.add_argument("--counted-s", type=float, default=15.0, help="virtual seconds")
    options = parser.parse_args(arguments)
    rows = []
    for draft in PAIRS:
        for mode in MODES:
            for streams in options.streams:
                load = Load(streams, 512, 256, options.warm_s, options.counted_s)
                rows.append(measure(draft, mode, load))
                print(table(rows[-1:]), flush=True)
    print(save("early", rows, hardware=hardware_of(PAIRS), acceptance=ACCEPTANCE))
