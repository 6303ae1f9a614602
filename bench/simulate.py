"""Simulates the gateway and its pace at GPU cost ratios, without a GPU: `python -m bench simulate`.

A target and a draft whose steps take as long as a cost table says (bench/simulated.py) answer the real
gateway code, round by round, in virtual time. The loop is closed: each stream asks for one answer after the
other, tasks mixed. The first table compares plain decoding, fixed depths and the pace, in tokens per second
of all streams together. The second table has the best fixed depth with draft-ahead and without. The rate at
which the draft's second guess is correct if its first is wrong is given (``--hit-rate``).

The tables below are rooflines from the data sheets that `outrider plan` reads too
(outrider/engine/planning/step_costs.py). ``--table`` takes others, and other acceptance, from a JSON file
of the shape of bench/results/simulate.json: {"hardware": {"a pair":
{"target": {...}, "draft": {...}}}, "acceptance": {"a task": 0.8}}.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import virtual
from bench.report import save, table
from bench.simulated import (
    Ahead,
    SimulatedDraft,
    SimulatedFleet,
    hit_rate_for,
    rank_at,
    simulated_fleet,
)
from bench.simulated_runner import Hardware
from gateway.loop.factory import LoopFactory
from gateway.loop.stats import Stats
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence
from gateway.settings import GatewaySettings, Speculation
from outrider.decoding.settings import Sampling
from outrider.engine.planning.step_costs import ACCELERATORS, ALL_REDUCE_S, ARITHMETIC, MEMORY, STEP_S
from outrider.pace.settings import PaceSettings

HOP_S = 0.3e-3  # seconds of one way, the gateway's work included
FAR_AHEAD_S = 1e6  # seconds; small enough for a clock with nanoseconds
NO_AHEAD = Ahead()
BRANCHES = 12
AHEAD_STREAMS = (1, 8)
AHEAD_DEPTHS = (1, 2, 3, 4, 6, 8)
COUNTED_S = 60.0  # seconds of all streams together: one stream needs longer to see as many answers
SETTINGS = GatewaySettings(model="m", tokenizer="t", propose_deadline_ms=1e6)

H100, L4 = ACCELERATORS["H100"], ACCELERATORS["L4"]
TARGET_70B = Hardware(
    weight_bytes=139.0e9,
    bytes_per_s=4 * MEMORY * H100.bytes_per_s,
    flops_per_token=139.0e9,
    flops_per_s=4 * ARITHMETIC * H100.flops_per_s,
    cache_bytes_per_token=327_680,  # 80 layers, 8 heads of 128, keys and values
    constant_s=STEP_S + 161 * ALL_REDUCE_S,  # two per layer and the embedding's
)
DRAFT_1B = Hardware(
    weight_bytes=2.47e9,
    bytes_per_s=MEMORY * L4.bytes_per_s,
    flops_per_token=2.47e9,
    flops_per_s=ARITHMETIC * L4.flops_per_s,
    cache_bytes_per_token=32_768,  # 16 layers, 8 heads of 64
    constant_s=STEP_S,
)
PAIRS = {
    "1B on an L4": (TARGET_70B, DRAFT_1B),
    "1B in 4 bit on an L4": (TARGET_70B, replace(DRAFT_1B, weight_bytes=0.7e9)),
}
AHEAD_PAIRS = PAIRS | {
    "1B on an H100": (
        TARGET_70B,
        replace(DRAFT_1B, bytes_per_s=MEMORY * H100.bytes_per_s, flops_per_s=ARITHMETIC * H100.flops_per_s),
    )
}
ACCEPTANCE = {"code": 0.8, "prose": 0.6, "extraction": 0.9, "creative": 0.3}  # per position
MODES = {
    "plain": Speculation(mode="off"),
    "fixed 2": Speculation(mode="fixed", depth=2),
    "fixed 4": Speculation(mode="fixed", depth=4),
    "fixed 8": Speculation(mode="fixed", depth=8),
    "pace": Speculation(),
}


def fixed(depth: int) -> Speculation:
    """Drafts of that depth; 0: plain decoding."""
    if depth == 0:
        return Speculation(mode="off", drafter="model")
    return Speculation(mode="fixed", depth=depth, drafter="model")


@dataclass(frozen=True)
class SimulatedLoad:
    """Closed loop; lengths are means, drawn from half to one and a half times as much."""

    streams: int
    prompt_tokens: int
    answer_tokens: int
    warm_s: float  # before tokens are counted
    counted_s: float

    def of(self, streams: int) -> "SimulatedLoad":
        """Returns the load with another number of streams, for longer if there are few."""
        return replace(self, streams=streams, counted_s=max(self.counted_s, COUNTED_S / streams))


@dataclass
class Counter:
    """Counters of all streams."""

    commits: list[tuple[float, int]] = field(default_factory=list)  # time, tokens
    stats: Stats = field(default_factory=Stats)  # counts of answers that were finished

    def rate(self, load: SimulatedLoad) -> float:
        """Tokens per second, the beginning left out."""
        return sum(tokens for time, tokens in self.commits if time >= load.warm_s) / load.counted_s


class Streams:
    """Clients of one gateway; each asks for one answer after the other."""

    def __init__(
        self,
        speculations: Mapping[str, Speculation],
        load: SimulatedLoad,
        settings: GatewaySettings = SETTINGS,
    ) -> None:
        """speculations: by task."""
        self.counter = Counter()
        self._paces = Paces(PaceSettings())
        self._speculations = {
            task: speculation.resolved(settings.usual_drafter, self._paces.settings)
            for task, speculation in speculations.items()
        }
        self._load = load
        self._settings = settings
        self._task_of: dict[int, str] = {}  # tasks by noise key

    def rank_of(
        self, acceptance: Mapping[str, float], hit_rate: float, noise_key: int, position: int
    ) -> int | None:
        """Rank of the target's token among a draft's guesses, if it has that acceptance by task."""
        return rank_at(acceptance[self._task_of[noise_key]], hit_rate, noise_key, position)

    async def run(self, fleet: SimulatedFleet) -> None:
        """Streams for as long as the load says."""
        factory = LoopFactory(fleet, self._paces, self._settings)
        clients = [asyncio.create_task(self._client(factory, number)) for number in range(self._load.streams)]
        done, _ = await asyncio.wait(clients, timeout=self._load.warm_s + self._load.counted_s)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        for client in done:
            client.result()  # none ends by itself but by a defect

    async def _client(self, factory: LoopFactory, number: int) -> None:
        drawn = random.Random(number)
        loop = asyncio.get_running_loop()
        while True:
            task = drawn.choice(sorted(self._speculations))
            prompt = tuple(drawn.randbytes(self._about(self._load.prompt_tokens, drawn)))
            sampling = Sampling(max_tokens=self._about(self._load.answer_tokens, drawn))
            sequence = GatewaySequence(prompt, sampling, noise_key=drawn.getrandbits(60))
            self._task_of[sequence.noise_key] = task
            rounds = factory.of(sequence, self._speculations[task], FAR_AHEAD_S, task)
            async with aclosing(rounds.steps()) as steps:
                async for step in steps:
                    self.counter.commits.append((loop.time(), len(step.tokens)))
            self.counter.stats.add(rounds.stats)

    @staticmethod
    def _about(mean: int, drawn: random.Random) -> int:
        return drawn.randint(mean // 2, mean * 3 // 2)


async def closed_loop(
    pair: tuple[Hardware, Hardware],
    acceptance: Mapping[str, float],
    speculation: Speculation,
    load: SimulatedLoad,
    ahead: Ahead = NO_AHEAD,
) -> Counter:
    streams = Streams(dict.fromkeys(acceptance, speculation), load, SETTINGS)
    target, draft = pair
    rank_of = partial(streams.rank_of, acceptance, ahead.hit_rate)
    drafts = {"model": SimulatedDraft(draft.seconds, rank_of, ahead)}
    async with simulated_fleet(target.seconds, drafts, HOP_S) as fleet:
        await streams.run(fleet)
    return streams.counter


def predicted(
    target_step_s: Callable[[float], float],
    draft_step_s: float,
    hop_s: float,
    acceptance: float,
    foreseen_rate: float,
    depth: int,
    ahead: bool,
    tokens: int = 3000,
) -> float:
    """Tokens per second of one stream from its first Verdict on.

    Args:
        target_step_s: by the tokens that a step feeds.
        hop_s: one way.
        acceptance: rate per position.
        foreseen_rate: share of verdicts, where there is draft-ahead.
        depth: of every Draft; 0 for plain decoding.
        ahead: whether there is draft-ahead.
        tokens: of the answer; more of them leave less to chance.
    """
    hit_rate = hit_rate_for(foreseen_rate, acceptance, depth)
    fleet = simulated_fleet(
        lambda size: target_step_s(size.tokens + size.prompt_tokens),
        {
            "model": SimulatedDraft(
                lambda size: draft_step_s,
                partial(rank_at, acceptance, hit_rate),
                Ahead(BRANCHES, hit_rate) if ahead else NO_AHEAD,
            )
        },
        hop_s,
    )
    return virtual.run(
        _rate_of_one(GatewaySequence((0,), Sampling(max_tokens=tokens), 0), fleet, fixed(depth))
    )


async def _rate_of_one(
    sequence: GatewaySequence,
    simulated: AbstractAsyncContextManager[SimulatedFleet],
    speculation: Speculation,
) -> float:
    loop = asyncio.get_running_loop()
    async with simulated as fleet:
        rounds = LoopFactory(fleet, Paces(PaceSettings()), SETTINGS).of(sequence, speculation, FAR_AHEAD_S)
        lengths = [(loop.time(), len(sequence)) async for _ in rounds.steps()]
    (started, first), (ended, last) = lengths[0], lengths[-1]
    return (last - first) / (ended - started)


def measure(
    pair: tuple[Hardware, Hardware], acceptance: Mapping[str, float], load: SimulatedLoad
) -> dict[str, Any]:
    """Returns a row: tokens per second by mode, and what the pace did."""
    row: dict[str, Any] = {"streams": load.streams}
    for name, speculation in MODES.items():
        counter = virtual.run(closed_loop(pair, acceptance, speculation, load))
        row[name] = counter.rate(load)
    stats = counter.stats
    row["pace / best"] = row["pace"] / max(row[name] for name in MODES if name != "pace")
    row["share of passes with a Draft"] = stats.rounds / max(stats.target_passes, 1)
    row["mean depth"] = stats.drafted / max(stats.rounds, 1)
    return row


def measure_ahead(
    pair: tuple[Hardware, Hardware], acceptance: Mapping[str, float], load: SimulatedLoad, ahead: Ahead
) -> dict[str, Any]:
    """A row: tokens per second with draft-ahead and without, each at its best depth."""

    def rate(depth: int, side: Ahead) -> float:
        return virtual.run(closed_loop(pair, acceptance, fixed(depth), load, side)).rate(load)

    def best(side: Ahead) -> tuple[float, int]:
        return max((rate(depth, side), depth) for depth in AHEAD_DEPTHS)

    plain = rate(0, NO_AHEAD)
    rate_without, depth_without = best(NO_AHEAD)
    rate_with, depth_with = best(ahead)
    return {
        "streams": load.streams,
        "plain": plain,
        "depth without": depth_without,
        "without": rate_without,
        "depth with": depth_with,
        "with": rate_with,
        "with / without": rate_with / rate_without,
    }


def read(path: Path) -> tuple[dict[str, tuple[Hardware, Hardware]], dict[str, float]]:
    """Pairs and acceptance by their names."""
    table = json.loads(path.read_text())
    pairs = {
        name: (Hardware(**pair["target"]), Hardware(**pair["draft"]))
        for name, pair in table["hardware"].items()
    }
    return pairs, table["acceptance"]


def hardware_of(pairs: Mapping[str, tuple[Hardware, Hardware]]) -> dict[str, Any]:
    """Returns the hardware that a table of costs describes."""
    return {
        name: {"target": asdict(target), "draft": asdict(draft)} for name, (target, draft) in pairs.items()
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench simulate", description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64, 128])
    parser.add_argument("--prompt-tokens", type=int, default=512, help="mean")
    parser.add_argument("--answer-tokens", type=int, default=256, help="mean")
    parser.add_argument("--warm-s", type=float, default=8.0, help="virtual seconds before tokens count")
    parser.add_argument(
        "--counted-s", type=float, default=15.0, help="virtual seconds, more where streams are few"
    )
    parser.add_argument("--hit-rate", type=float, default=0.5, help="of second guesses, draft-ahead")
    parser.add_argument("--table", type=Path, help="JSON with other costs")
    options = parser.parse_args(arguments)
    pairs, acceptance = (PAIRS, ACCEPTANCE) if options.table is None else read(options.table)
    ahead_pairs = AHEAD_PAIRS if options.table is None else pairs
    load = SimulatedLoad(1, options.prompt_tokens, options.answer_tokens, options.warm_s, options.counted_s)
    rows = []
    for name, pair in pairs.items():
        for streams in options.streams:
            rows.append({"draft": name, **measure(pair, acceptance, load.of(streams))})
            print(table(rows[-1:]), flush=True)
    ahead = Ahead(BRANCHES, options.hit_rate)
    inputs = {**asdict(ahead), "hop_s": HOP_S, "acceptance": acceptance}
    print("draft-ahead:", inputs)
    ahead_rows = []
    for name, pair in ahead_pairs.items():
        for streams in AHEAD_STREAMS:
            ahead_rows.append({"draft": name, **measure_ahead(pair, acceptance, load.of(streams), ahead)})
            print(table(ahead_rows[-1:]), flush=True)
    facts = {**inputs, "hardware": hardware_of(ahead_pairs), "rows": ahead_rows}
    print(save("simulate", rows, hardware=hardware_of(pairs), acceptance=acceptance, ahead=facts))
