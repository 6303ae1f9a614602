"""Measures gaps in streams while targets stall or are drained: `python -m bench stalls`.

Two targets and the gateway's own loop are connected by real gRPC. Streams send one request after another. The
engine of a target is stopped briefly at intervals, and once for longer. After that the targets are drained in
turn, with replacements ready. All is done without second targets and with them. The texts of equal requests
are compared. The targets' processor time per token shows the cost of second targets.
"""

import argparse
import asyncio
import os
import signal
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
from tokenizers import Tokenizer

from actors.engine_client import EngineClient
from bench.checkpoints import DEMO_PAIR, INFLATED, target_path
from bench.report import parser_of, save, table
from gateway.loop.factory import LoopFactory
from gateway.loop.stats import Stats
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence
from gateway.settings import GatewaySettings, Speculation
from gateway.workers.fleet import Fleet
from gateway.workers.streams import WorkerInfo
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import KINDS, prompts
from outrider.engine.settings import EngineSettings
from outrider.pace.settings import PaceSettings
from tests.support.process_worker import drainable_worker
from tests.support.trust import TRUST

OFF = Speculation(mode="off", drafter="ngram")
DEADLINE_S = 600.0
WARM_S = 3.0  # seconds before anything is counted
PIECE_S, BETWEEN_S = 1.0, 0.002  # seconds of a stop, and between two: an engine stopped for 2 s is killed
DRAIN_S = 10.0  # time limit for moving the sequences of a drained target


@dataclass
class SteadyStreams:
    """Streams of one gateway, with the texts and gaps that their clients see."""

    fleet: Fleet
    factory: LoopFactory
    tokenizer: Tokenizer
    tokens: int
    texts: dict[int, list[int]] = field(default_factory=dict)  # finished answers by request number
    gaps_s: list[float] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    _number: int = 0

    async def run(self, streams: int, meanwhile: Awaitable[object]) -> None:
        """Keeps a number of streams busy, and records the gaps between the tokens of each stream."""
        self.gaps_s, self.stats = [], Stats()
        tasks = [asyncio.create_task(self._stream()) for _ in range(streams)]
        await meanwhile
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self) -> None:
        while True:
            await self._answer()

    async def _answer(self) -> None:
        number, self._number = self._number, self._number + 1
        text = prompts(KINDS[number % len(KINDS)], 1 + number // len(KINDS) % 16)[-1]
        prompt = tuple(self.tokenizer.encode(text).ids)
        sampling = Sampling(max_tokens=self.tokens, ignore_eos=True, temperature=0.7)
        sequence = GatewaySequence(prompt, sampling, noise_key(number, 0, prompt))
        clock = asyncio.get_running_loop().time
        loop = self.factory.of(sequence, OFF, clock() + DEADLINE_S)
        before = None
        try:
            async for _ in loop.steps():
                now = clock()
                if before is not None:
                    self.gaps_s.append(now - before)
                before = now
            self.texts[number] = sequence.generated
        finally:
            self.stats.add(loop.stats)


async def stalled(worker: WorkerInfo, every_s: float, short_s: float, long_s: float) -> None:
    """Stops the engine of a worker briefly at intervals, and for longer at the third stop."""
    number = 0
    while True:
        await asyncio.sleep(every_s)
        number += 1
        left_s = long_s if number == 3 else short_s
        while left_s > 0:
            os.kill(worker.ranks[0], signal.SIGSTOP)
            try:
                await asyncio.sleep(min(left_s, PIECE_S))
            finally:
                os.kill(worker.ranks[0], signal.SIGCONT)
            left_s -= PIECE_S
            await asyncio.sleep(BETWEEN_S)


async def measured(
    options: argparse.Namespace, share: float
) -> tuple[list[dict[str, Any]], dict[int, list[int]]]:
    """Returns a row for stalls and a row for drained targets, and the texts."""
    path = target_path(options.target)
    settings = EngineSettings.model_validate(
        {"model": str(path), "dtype": "float32", "threads": 1, "cache_memory": 2**29}
    )
    started: list[tuple[AsyncExitStack, WorkerInfo, EngineClient]] = []

    async def start() -> None:
        stack = AsyncExitStack()
        worker, client = await stack.enter_async_context(drainable_worker("target", settings))
        started.append((stack, worker, client))

    async with AsyncExitStack() as last:
        last.push_async_callback(lambda: asyncio.gather(*(stack.aclose() for stack, _, _ in started)))
        await start()
        await start()
        fleet = Fleet(lambda: [worker for _, worker, _ in started], TRUST)
        last.push_async_callback(fleet.close)
        gateway = GatewaySettings(model="m", tokenizer="t", drafters=("ngram",), second_targets_share=share)
        factory = LoopFactory(fleet, Paces(PaceSettings()), gateway)
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        streams = SteadyStreams(fleet, factory, tokenizer, options.tokens)
        await streams.run(options.streams, asyncio.sleep(WARM_S))
        stalling = asyncio.create_task(
            stalled(started[0][1], options.every, options.stall / 1e3, options.long_stall)
        )
        before_s = sum(processor_s(worker) for _, worker, _ in started)
        await streams.run(options.streams, asyncio.sleep(options.seconds))
        stalling.cancel()
        spent_s = sum(processor_s(worker) for _, worker, _ in started) - before_s
        spent = {"targets' processor ms a token": 1e3 * spent_s / len(streams.gaps_s)}
        rows = [{**_row(f"stalls, share {share:g}", streams), **spent}]
        await start()  # replacements of the first two targets
        await start()
        drain_s = DRAIN_S if share else 0.0
        await streams.run(options.streams, _drained([client for _, _, client in started[:2]], drain_s))
        rows.append(_row(f"drained in turn, {'announced' if share else 'at once'}", streams))
    return rows, streams.texts


def processor_s(worker: WorkerInfo) -> float:
    """Returns the processor seconds of a worker's engine so far."""
    times = psutil.Process(worker.ranks[0]).cpu_times()
    return float(times.user + times.system)


async def _drained(clients: Sequence[EngineClient], drain_s: float) -> None:
    """Drains targets one after the other, with a pause before each and after the last."""
    for client in clients:
        await asyncio.sleep(WARM_S)
        await client.drain(drain_s)
    await asyncio.sleep(WARM_S)


def _row(name: str, streams: SteadyStreams) -> dict[str, Any]:
    gaps_ms = 1e3 * np.array(streams.gaps_s)
    percentiles = {f"p{percent:g} ms": float(np.percentile(gaps_ms, percent)) for percent in (50, 99, 99.9)}
    stats = streams.stats
    return {
        "what": name,
        "gaps": len(gaps_ms),
        **percentiles,
        "longest ms": float(gaps_ms.max()),
        "hedges": stats.hedges,
        "moves": stats.moves,
        "reopened": stats.lost_targets,
        "at two targets, s": stats.second_s,
    }


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("stalls", __doc__)
    parser.add_argument("--target", choices=[*INFLATED, DEMO_PAIR], default="190M")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--seconds", type=float, default=60.0, help="time with stalls")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two stalls")
    parser.add_argument("--stall", type=float, default=200.0, help="length of a stall, milliseconds")
    parser.add_argument("--long-stall", type=float, default=5.0, help="length of the third stall, seconds")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    texts = []
    for share in (0.0, GatewaySettings.model_fields["second_targets_share"].default):
        of_share, said = asyncio.run(measured(options, share))
        rows += of_share
        texts.append(said)
        print(table(rows), flush=True)
    both = texts[0].keys() & texts[1].keys()
    changed = sum(texts[0][number] != texts[1][number] for number in both)
    print(f"{changed} of {len(both)} texts changed")
    print(save("stalls", rows, texts=len(both), changed=changed))
