"""Simulates the gateway and its pace at GPU cost ratios, without a GPU: `python -m bench simulate`.

The gateway's real code runs in virtual time, with a simulated target and draft whose steps take as long as a
cost table says (bench/simulated.py). The load is a closed loop: each stream asks for one answer after
another, with mixed tasks. The table compares plain decoding, fixed depths and the pace, in tokens per second
of all streams together, and the pace with draft-ahead, which is on by default. ``--hit-rate`` sets how often
the draft's second guess is correct if its first guess is wrong.

The target is a 70B on four H100, or a mixture on one H100, in which a token chooses 8 of 128 experts. Steps
take as long as `outrider plan` predicts (outrider/engine/planning/step_costs.py): before the engine's
optimization (before), now (today), or with planned optimizations (repaired; bench/costs.py). A draft beside
the target is in the target's process; before, it was a worker on the same device. A block draft guesses all
tokens of a Draft in one pass, and has five layers as wide as the target's. Prompts are already in the cache.
"""

import asyncio
import random
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from bench import virtual
from bench.costs import FEWER_HOPS_S, H100, HOPS_S, L4, before, costs_of, repaired
from bench.report import parser_of, save, table
from bench.simulated import Ahead, SimulatedDraft, SimulatedFleet, rank_at, simulated_fleet
from bench.simulated_runner import Cost
from bench.tables.reading import AHEAD
from gateway.loop.factory import LoopFactory
from gateway.loop.stats import Stats
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence
from gateway.settings import GatewaySettings, Speculation
from outrider.decoding.settings import Sampling
from outrider.engine.planning.accelerators import Accelerator
from outrider.engine.planning.step_costs import StepCosts
from outrider.pace.experts import NO_EXPERTS, ExpertsRead
from outrider.pace.settings import PaceSettings
from outrider.pace.step import StepSize

HOPS = 4  # messages of a round: to the draft and back, to the target and back
FAR_AHEAD_S = 1e6  # seconds to the deadline; small enough for a clock in nanoseconds
NO_AHEAD = Ahead()
BRANCHES = 12  # verdicts that a draft worker prepares for, as by default
COUNTED_S = 24.0  # virtual seconds, summed over all streams: fewer streams need more time for as many answers
SETTINGS = GatewaySettings(model="m", tokenizer="t", propose_deadline_ms=1e6, second_targets_share=0.0)


@dataclass(frozen=True)
class Pair:
    """Step costs of a target and of a draft."""

    target: Cost
    draft: Cost
    hop_s: float = HOPS_S / HOPS  # seconds of one message, the gateway's work included
    is_beside: bool = False  # whether the draft is a worker that shares the target's device
    in_target: str = ""  # drafter in the target's process, "colocated" or "dflash"; empty: a draft worker
    experts: ExpertsRead = NO_EXPERTS  # experts that the target's steps read


def on(accelerator: Accelerator, costs: StepCosts, *, waits: bool = False) -> Cost:
    """Returns a function for the seconds of steps on a device. Prompt tokens cost nothing.

    waits: whether each step waits for the host.
    """

    def seconds(size: StepSize, is_early: bool) -> float:
        if not size.tokens:
            return 0.0
        return costs.seconds(accelerator, replace(size, prompt_tokens=0.0), is_early=is_early and not waits)

    return seconds


def with_host_between_rounds(cost: Cost) -> Cost:
    """Returns the cost of a target whose drafter begins a Draft after the host has read the Verdict."""
    return lambda size, is_early: cost(size, is_early and size.tokens <= size.sequences)


def pairs(engine: str) -> dict[str, Pair]:
    """Returns the pairs by name. engine: a name of ENGINES."""
    target, draft, in_4_bit = costs_of("70B", 4), costs_of("1B draft"), costs_of("1B draft", 1, "int4")
    mixture, block = costs_of("mixture"), costs_of("block draft", 4)
    hop_s = HOPS_S / HOPS
    is_first = engine == "before"
    if engine == "repaired":
        hop_s = FEWER_HOPS_S / HOPS
        target, draft, in_4_bit, mixture, block = map(repaired, (target, draft, in_4_bit, mixture, block))
    if is_first:
        target, draft, in_4_bit, mixture, block = map(before, (target, draft, in_4_bit, mixture, block))
    of_target = on(H100, target)
    of_draft, on_l4, in_4_bit_on_l4 = (
        on(*each, waits=is_first) for each in ((H100, draft), (L4, draft), (L4, in_4_bit))
    )
    found = {
        "1B on an H100": Pair(of_target, of_draft, hop_s),
        "1B on an L4": Pair(of_target, on_l4, hop_s),
        "1B in 4 bit on an L4": Pair(of_target, in_4_bit_on_l4, hop_s),
        "1B beside the target": Pair(
            of_target, of_draft, hop_s, is_beside=is_first, in_target="" if is_first else "colocated"
        ),
        "block draft beside the target": Pair(
            with_host_between_rounds(of_target), on(H100, block, waits=True), hop_s, in_target="dflash"
        ),
        "1B for a mixture": Pair(on(H100, mixture), of_draft, hop_s, experts=mixture.experts),
    }
    if is_first:
        del found["block draft beside the target"]  # the engine could not read block drafts
    return found


ENGINES = ("before", "today", "repaired")
ACCEPTANCE = {"code": 0.8}  # acceptance rate per position
MODES = {
    "plain": Speculation(mode="off"),
    "fixed 2": Speculation(mode="fixed", depth=2),
    "fixed 4": Speculation(mode="fixed", depth=4),
    "fixed 8": Speculation(mode="fixed", depth=8),
    "pace": Speculation(),
}


@dataclass(frozen=True)
class SimulatedLoad:
    """Closed loop of streams. Lengths are means; each is drawn from half to one and a half times the mean."""

    streams: int
    prompt_tokens: int
    answer_tokens: int
    warm_s: float  # seconds before tokens are counted
    counted_s: float

    def of(self, streams: int) -> "SimulatedLoad":
        """Returns the load with another number of streams; few streams run for longer."""
        return replace(self, streams=streams, counted_s=max(self.counted_s, COUNTED_S / streams))


@dataclass
class Counter:
    """Counters of all streams."""

    commits: list[tuple[float, int]] = field(default_factory=list)  # time, tokens
    stats: Stats = field(default_factory=Stats)  # counts of finished answers

    def rate(self, load: SimulatedLoad) -> float:
        """Returns the tokens per second after the warm-up."""
        return sum(tokens for time, tokens in self.commits if time >= load.warm_s) / load.counted_s


class Streams:
    """Clients of one gateway; each asks for one answer after another."""

    def __init__(
        self,
        speculations: Mapping[str, Speculation],
        load: SimulatedLoad,
        settings: GatewaySettings = SETTINGS,
    ) -> None:
        """speculations: speculation by task."""
        self.counter = Counter()
        self._speculations = {
            task: speculation.resolved(settings.usual_drafter, PaceSettings())
            for task, speculation in speculations.items()
        }
        self._load = load
        self._settings = settings
        self._task_of: dict[int, str] = {}  # tasks by noise key

    def rank_of(
        self, acceptance: Mapping[str, float], hit_rate: float, noise_key: int, position: int
    ) -> int | None:
        """Returns the rank of the target's token among the draft's guesses; None if it is not a guess."""
        task = self._task_of.get(noise_key)  # None: the sequence belongs to the worker's survey at its start
        return None if task is None else rank_at(acceptance[task], hit_rate, noise_key, position)

    async def run(self, fleet: SimulatedFleet) -> None:
        """Runs all streams for as long as the load says."""
        factory = LoopFactory(fleet, Paces(PaceSettings(), fleet.workers), self._settings)
        clients = [asyncio.create_task(self._client(factory, number)) for number in range(self._load.streams)]
        done, _ = await asyncio.wait(clients, timeout=self._load.warm_s + self._load.counted_s)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        for client in done:
            client.result()  # a client ends by itself only with an error, which is raised here

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
    pair: Pair,
    acceptance: Mapping[str, float],
    speculation: Speculation,
    load: SimulatedLoad,
    ahead: Ahead = NO_AHEAD,
) -> Counter:
    settings, name = SETTINGS, pair.in_target
    if name:
        in_process = {"drafts": {}, "target_drafters": (name,), "drafters": (name,)}
        settings = SETTINGS.model_copy(update=in_process)
    streams = Streams(dict.fromkeys(acceptance, speculation), load, settings)
    rank_of = partial(streams.rank_of, acceptance, ahead.hit_rate)
    draft = SimulatedDraft(pair.draft, rank_of, ahead, pair.is_beside)
    drafts, in_target = ({}, (name, draft)) if name else ({"model": draft}, None)
    async with simulated_fleet(pair.target, drafts, pair.hop_s, in_target, pair.experts) as fleet:
        await streams.run(fleet)
    return streams.counter


def measure(pair: Pair, acceptance: Mapping[str, float], load: SimulatedLoad, ahead: Ahead) -> dict[str, Any]:
    """Returns a row: tokens per second by mode, and the choices of the pace without draft-ahead."""

    def answered(speculation: Speculation, prepared: Ahead = NO_AHEAD) -> Counter:
        return virtual.run(closed_loop(pair, acceptance, speculation, load, prepared))

    row: dict[str, Any] = {"streams": load.streams}
    for name, speculation in MODES.items():
        counter = answered(speculation)
        row[name] = counter.rate(load)
    stats = counter.stats
    row["pace / best"] = row["pace"] / max(row[name] for name in MODES if name != "pace")
    row["share of passes with a Draft"] = stats.rounds / max(stats.target_passes, 1)
    row["mean depth"] = stats.drafted / max(stats.rounds, 1)
    if not pair.is_beside and not pair.in_target:
        row[AHEAD] = answered(MODES["pace"], ahead).rate(load)
    row["to plain"] = row.get(AHEAD, row["pace"]) / row["plain"]
    return row


def acceptance_of(text: str) -> tuple[str, float]:
    """Parses TASK=RATE: a task and its acceptance rate per position."""
    task, _, rate = text.partition("=")
    return task, float(rate)


def main(arguments: list[str]) -> None:
    parser = parser_of("simulate", __doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[200, 4096, 32768], help="mean tokens")
    parser.add_argument("--engine", choices=ENGINES, default="today")
    parser.add_argument("--answer-tokens", type=int, default=256, help="mean tokens")
    parser.add_argument("--warm-s", type=float, default=2.0, help="virtual seconds before tokens count")
    parser.add_argument("--counted-s", type=float, default=2.0, help="virtual seconds, more of few streams")
    parser.add_argument("--hit-rate", type=float, default=0.5, help="rate of second guesses")
    parser.add_argument(
        "--acceptance", type=acceptance_of, nargs="+", metavar="TASK=RATE", default=[*ACCEPTANCE.items()]
    )
    options = parser.parse_args(arguments)
    acceptance, rows = dict(options.acceptance), []
    ahead = Ahead(BRANCHES, options.hit_rate)
    for context in options.contexts:
        load = SimulatedLoad(1, context, options.answer_tokens, options.warm_s, options.counted_s)
        for name, pair in pairs(options.engine).items():
            found = {"context": context, "draft": name}
            for streams in options.streams:
                rows.append({**found, **measure(pair, acceptance, load.of(streams), ahead)})
                print(table(rows[-1:]), flush=True)
    name = "simulate" if options.engine == "today" else f"simulate_{options.engine}"
    print(save(name, rows, acceptance=acceptance, ahead=asdict(ahead)))
