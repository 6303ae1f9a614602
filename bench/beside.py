"""A head beside the target and parallel drafts at GPU cost ratios, without a GPU: `python -m bench beside`.

The simulated service of `python -m bench simulate`, under the pace: plain decoding, a 4 bit draft in a worker
of its own, token by token and in one pass, and an EAGLE-3 head in the target worker. By the registry's law a
head's Draft takes a pass for each token; its first pass takes in what the target has fed, and is there in
plain decoding too. The head has the layer of a 70B model and a vocabulary of 32,000, which the devices of the
target share; what joins three states is whole, and counted in each pass. It drafts chains. All guess equally
well.
"""

import argparse
from functools import partial
from typing import Any

from bench import virtual
from bench.report import save, table
from bench.simulate import (
    ACCEPTANCE,
    BRANCHES,
    H100,
    HOP_S,
    MODES,
    PAIRS,
    SETTINGS,
    TARGET_70B,
    Counter,
    Load,
    Streams,
    closed_loop,
    hardware_of,
)
from bench.simulated import Ahead, Parallel, simulated_fleet
from bench.simulated_head import SimulatedHead
from bench.simulated_runner import Hardware
from gateway.settings import Speculation
from outrider.engine.planning.step_costs import ALL_REDUCE_S, ARITHMETIC, MEMORY, STEP_S

STREAMS = (1, 8, 32)
COUNTED_S = 30.0  # of all streams together
AHEAD = Ahead(BRANCHES, runner_up_rate=0.5)
DRAFT = "1B in 4 bit on an L4"
KEPT = 0.9
SIZE, KEYS_VALUES, INTERMEDIATE, VOCABULARY = 8192, 1024, 28_672, 32_000
READ = 2 * SIZE  # the embedding and the state, by its attention
JOINING = 3 * SIZE * SIZE
SHARED = SIZE * (READ + SIZE + 3 * INTERMEDIATE + VOCABULARY) + 2 * READ * KEYS_VALUES
RANKS = 4
BROADCAST_S = 0.1e-3  # over gloo, of what a pass feeds
EXCHANGES = 5  # states, embedding, attention, MLP, logits
HEAD = Hardware(
    weight_bytes=2.0 * (JOINING + SHARED / RANKS),
    bytes_per_s=MEMORY * H100.bytes_per_s,
    flops_per_token=2.0 * (JOINING + SHARED / RANKS),
    flops_per_s=ARITHMETIC * H100.flops_per_s,
    cache_bytes_per_token=4096 / RANKS,  # one layer, 8 heads of 128, keys and values
    constant_s=STEP_S + BROADCAST_S + EXCHANGES * ALL_REDUCE_S,
)


async def with_head(speculation: Speculation, load: Load) -> Counter:
    beside = {"drafts": {}, "drafters": ("eagle3",), "beside_target": "eagle3"}
    streams = Streams(dict.fromkeys(ACCEPTANCE, speculation), load, SETTINGS.model_copy(update=beside))
    head = SimulatedHead(HEAD.seconds, partial(streams.rank_of, ACCEPTANCE, 0.0))
    async with simulated_fleet(TARGET_70B.seconds, {}, HOP_S, head) as fleet:
        await streams.run(fleet)
    return streams.counter


def measure(load: Load) -> dict[str, Any]:
    """A row: tokens per second, and the mean tokens of a Draft that the pace chose."""
    pair, pace = PAIRS[DRAFT], MODES["pace"]
    ways = {
        "token by token": closed_loop(pair, ACCEPTANCE, pace, load, AHEAD),
        "in one pass": closed_loop(pair, ACCEPTANCE, pace, load, AHEAD, Parallel(KEPT)),
        "EAGLE-3": with_head(pace, load),
    }
    plain = virtual.run(closed_loop(pair, ACCEPTANCE, MODES["plain"], load))
    row: dict[str, Any] = {"streams": load.streams, "plain": plain.rate(load)}
    for name, way in ways.items():
        counter = virtual.run(way)
        row[name] = counter.rate(load)
        row[f"depth, {name}"] = counter.stats.drafted / max(counter.stats.rounds, 1)
        row[f"drafted, {name}"] = counter.stats.rounds / max(counter.stats.target_passes, 1)
    return row


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench beside", description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--warm-s", type=float, default=5.0, help="virtual seconds before tokens count")
    parser.add_argument("--counted-s", type=float, default=8.0, help="virtual seconds, more for few streams")
    options = parser.parse_args(arguments)
    rows = []
    for streams in options.streams:
        counted_s = max(options.counted_s, COUNTED_S / streams)
        rows.append(measure(Load(streams, 512, 256, options.warm_s, counted_s)))
        print(table(rows[-1:]), flush=True)
    hardware = hardware_of({DRAFT: PAIRS[DRAFT], "EAGLE-3": (TARGET_70B, HEAD)})
    print(save("beside", rows, hardware=hardware, acceptance=ACCEPTANCE, kept=KEPT))
