"""Several drafts, the best for each task, at GPU cost ratios: `python -m bench routing`.

The simulated service of `python -m bench simulate`. Beside one target there are three drafts in workers of
their own: a general one, one that is fitted to code and one that is fitted to extraction. The streams mix
tasks.
What is compared is each draft alone, the best draft of each task as it is known afterwards, and the gateway's
routing, which begins without knowing anything. Tokens count from the first one, so what learning costs is in
it.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from bench import virtual
from bench.report import save, table
from bench.simulate import (
    DRAFT_1B,
    HOP_S,
    SETTINGS,
    TARGET_70B,
    Counter,
    Load,
    Streams,
)
from bench.simulated import SimulatedDraft, simulated_fleet
from gateway.settings import Speculation

STREAMS = (1, 8)
RUNNER_UP_RATE = 0.5
# By draft: what it costs, and its acceptance per position by task.
SMALL = replace(DRAFT_1B, weight_bytes=0.7e9)
SMALLER = replace(DRAFT_1B, weight_bytes=0.35e9, flops_per_token=1.2e9, cache_bytes_per_token=16_384)
DRAFTS = {
    "general": (SMALL, {"chat": 0.7, "code": 0.65, "extraction": 0.75, "prose": 0.65}),
    "code": (SMALL, {"chat": 0.45, "code": 0.85, "extraction": 0.6, "prose": 0.4}),
    "extraction": (SMALLER, {"chat": 0.4, "code": 0.4, "extraction": 0.9, "prose": 0.35}),
}
TASKS = tuple(DRAFTS["general"][1])
GATEWAY = SETTINGS.model_copy(update={"drafters": tuple(DRAFTS), "drafts": dict.fromkeys(DRAFTS, "model")})


async def answered(speculations: Mapping[str, Speculation], load: Load) -> Counter:
    """speculations: by task."""
    streams = Streams(speculations, load, GATEWAY)
    drafts = {
        name: SimulatedDraft(cost.seconds, partial(streams.rank_of, acceptance, RUNNER_UP_RATE))
        for name, (cost, acceptance) in DRAFTS.items()
    }
    async with simulated_fleet(TARGET_70B.seconds, drafts, HOP_S) as fleet:
        await streams.run(fleet)
    return streams.counter


def measure(load: Load) -> dict[str, Any]:
    """A row: tokens per second, and by how much routing misses the best."""

    def rate(names: Mapping[str, str]) -> float:
        """names: of drafters by task."""
        speculations = {task: Speculation(drafter=names[task]) for task in TASKS}
        return virtual.run(answered(speculations, load)).rate(load)

    alone = {name: rate(dict.fromkeys(TASKS, name)) for name in DRAFTS}
    likeliest = {task: max(DRAFTS, key=lambda name: DRAFTS[name][1][task]) for task in TASKS}
    hindsight = max(rate(likeliest), *alone.values())
    counter = virtual.run(answered(dict.fromkeys(TASKS, Speculation()), load))
    routed = counter.rate(load)
    return {
        "streams": load.streams,
        **alone,
        "best in hindsight": hindsight,
        "routed": routed,
        "regret": 1.0 - routed / hindsight,
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench routing", description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--counted-s", type=float, default=15.0, help="virtual seconds, more for few streams")
    options = parser.parse_args(arguments)
    rows = []
    for streams in options.streams:
        rows.append(measure(Load(streams, 512, 256, 0.0, options.counted_s).of(streams)))
        print(table(rows[-1:]), flush=True)
    acceptance = {name: acceptance for name, (_, acceptance) in DRAFTS.items()}
    print(save("routing", rows, acceptance=acceptance))
