"""The gateway and its pace at GPU cost ratios, without a GPU: `python -m bench.simulate`.

A target and a draft whose steps take as long as a cost table says (bench/simulated.py) answer the real
gateway code, round by round, in virtual time. Closed loop: so many streams, each asks for one answer after
the other, tasks mixed. What is compared is plain decoding, fixed depths and the pace, in tokens per second
of all streams together.

The tables below are rooflines from data sheets, memory at 80 % and arithmetic at 50 % of the peak: an H100
SXM has 3.35 TB/s and 989 Tflop/s in bfloat16, an L4 300 GB/s and 121 Tflop/s.
"""

import asyncio
import random
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from bench import virtual
from bench.report import table
from bench.simulated import Hardware, SimulatedFleet, is_right_at, simulated_fleet
from decoding.pace.settings import PaceSettings
from decoding.settings import Sampling
from gateway.pace import Paces
from gateway.record import Record
from gateway.rounds import Rounds
from gateway.sequence import Sequence as Generated
from gateway.settings import GatewaySettings, Speculation

MEMORY, ARITHMETIC = 0.8, 0.5  # shares of the peak that are reached
H100_BYTES_PER_S, H100_FLOPS_PER_S = 3.35e12, 989e12
L4_BYTES_PER_S, L4_FLOPS_PER_S = 300e9, 121e12
HOP_S = 0.3e-3  # one way, from one machine to another with the gateway's own work
FAR_AHEAD_S = 1e9

TARGET_70B = Hardware(
    weight_bytes=141e9,
    bytes_per_s=4 * MEMORY * H100_BYTES_PER_S,
    flops_per_token=141e9,
    flops_per_s=4 * ARITHMETIC * H100_FLOPS_PER_S,
    cache_bytes_per_token=327_680,  # 80 layers, 8 heads of 128, keys and values
    constant_s=2e-3,  # two collectives per layer
)
DRAFT_1B = Hardware(
    weight_bytes=2.5e9,
    bytes_per_s=MEMORY * L4_BYTES_PER_S,
    flops_per_token=2.5e9,
    flops_per_s=ARITHMETIC * L4_FLOPS_PER_S,
    cache_bytes_per_token=32_768,  # 16 layers, 8 heads of 64
    constant_s=0.5e-3,
)
PAIRS: dict[str, tuple[Hardware, Hardware]] = {
    "70B on four H100, 1B on an L4": (TARGET_70B, DRAFT_1B),
    "70B on four H100, 1B in 4 bit on an L4": (TARGET_70B, replace(DRAFT_1B, weight_bytes=0.7e9)),
}
ACCEPTANCE = {"code": 0.8, "prose": 0.6, "extraction": 0.9, "creative": 0.3}  # per position
MODES = {
    "plain": Speculation(mode="off"),
    "fixed 2": Speculation(mode="fixed", depth=2),
    "fixed 4": Speculation(mode="fixed", depth=4),
    "fixed 8": Speculation(mode="fixed", depth=8),
    "pace": Speculation(mode="auto"),
}


@dataclass
class Load:
    """Closed loop."""

    streams: int
    prompt_tokens: int
    answer_tokens: int
    warm_s: float  # before tokens are counted
    counted_s: float


class Counter:
    """Tokens by the time at which they were committed."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, int]] = []
        self.record = Record()

    def between(self, begin: float, end: float) -> int:
        return sum(count for time, count in self.arrivals if begin <= time < end)


async def stream(
    fleet: SimulatedFleet,
    task_of: dict[int, str],
    paces: Paces,
    speculation: Speculation,
    load: Load,
    number: int,
    counter: Counter,
) -> None:
    """One client that asks for one answer after the other, until it is cancelled."""
    loop = asyncio.get_running_loop()
    settings = GatewaySettings(model="m", tokenizer="t", draft_deadline_ms=1e6)
    drawn = random.Random(number)
    tasks = sorted(ACCEPTANCE)
    while True:
        task = drawn.choice(tasks)
        prompt = (0,) * drawn.randint(load.prompt_tokens // 2, load.prompt_tokens * 3 // 2)
        answer = drawn.randint(load.answer_tokens // 2, load.answer_tokens * 3 // 2)
        sequence = Generated(prompt, Sampling(max_tokens=answer), drawn.getrandbits(60))
        task_of[sequence.noise_key] = task
        rounds = Rounds(sequence, fleet, speculation.resolved(settings), paces, settings, FAR_AHEAD_S, task)
        async with aclosing(rounds.steps()) as steps:
            async for step in steps:
                counter.arrivals.append((loop.time(), len(step.tokens)))
        counter.record.add(rounds.record)
        del task_of[sequence.noise_key]


async def closed_loop(pair: tuple[Hardware, Hardware], speculation: Speculation, load: Load) -> Counter:
    task_of: dict[int, str] = {}  # by noise key

    def is_right(sequence: Generated, position: int) -> bool:
        return is_right_at(ACCEPTANCE[task_of[sequence.noise_key]], sequence, position)

    counter = Counter()
    paces = Paces(PaceSettings())
    async with simulated_fleet(pair[0].seconds, pair[1].seconds, HOP_S, is_right) as fleet:
        clients = [
            asyncio.create_task(stream(fleet, task_of, paces, speculation, load, number, counter))
            for number in range(load.streams)
        ]
        await asyncio.sleep(load.warm_s + load.counted_s)
        for client in clients:
            if client.done():
                client.result()
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return counter


def main() -> None:
    for streams in (1, 4, 16, 64, 128, 256):
        row: dict[str, Any] = {"streams": streams}
        for name, speculation in MODES.items():
            load = Load(streams, 512, 256, 20.0, 40.0)
            counter = virtual.run(closed_loop(PAIRS["70B on four H100, 1B on an L4"], speculation, load))
            row[name] = counter.between(20.0, 60.0) / 40
            r = counter.record
            if name == "pace":
                row["share"] = r.rounds / max(r.target_passes, 1)
                row["depth"] = r.drafted / max(r.rounds, 1)
        print(table([row]), flush=True)


if __name__ == "__main__":
    main()
