"""Measures a running service under load, by concurrency and mode of speculation: `python -m bench load`.

`serve run cluster.app` in processes of its own, driven over gRPC: the demo target inflated to a realistic
cost, a smaller one where there are many streams, and the demo draft. The modes take turns within one running
service, a slice of a few seconds each, all with the same requests. Adaptive drafting is compared slice by
slice with a reference; the ratio is the median over the slices.

closed: tokens/s and latencies at each concurrency, every stream sending one request after another, of mixed
tasks; the reference is the mode with the best median. tasks: each task alone on one stream beside its best
fixed depth, and the creative task, on which no draft guesses well, beside plain decoding at each concurrency.
open: requests arrive at random, at shares of what plain decoding can answer. crossing: many streams come and
go, adaptive beside plain in every window of 5 seconds.
"""

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.checkpoints import DRAFT, INFLATED, inflated_target
from bench.load_rows import WINDOW_S, Row, against_best, crossing_rows, rates, summary
from bench.report import RESULTS, command, save, table
from bench.streams import (
    TASKS,
    LoadClient,
    Slice,
    arrivals,
    connected,
    rate_between,
    request_of,
    slice_of,
    speculation_of,
    window_starts,
)
from tests.support.running import serving

ROOM = 128 * 512  # tokens in the cache of a worker
BAR, TASK_BAR = 0.97, 0.95
STRIDE = 9  # requests from slice to slice: another task and another temperature come first
WARMUP_PER_STREAM_S = 0.016  # prompts that come at once are prefilled one after another
SECONDS_PER_STREAM = 0.012  # more of a slice: steps are longer if there are many
SECTIONS = {  # file of each section
    "closed": ("rows", "ratios"),
    "tasks": ("tasks",),
    "open": ("open",),
    "crossing": ("crossing",),
}
BEGUN = time.monotonic()


@dataclass(frozen=True)
class Bench:
    """Running service, and the settings of its measurement."""

    stub: Any
    target: str
    concurrencies: Sequence[int]  # numbers of streams that this target serves
    options: argparse.Namespace
    results: Mapping[str, list[Row]]  # results of the sections before

    async def closed(self) -> dict[str, list[Row]]:
        rows, ratios = [], []
        for streams in self.concurrencies:
            slices = await self.slices("closed", streams, self.options.modes, TASKS)
            point = {"target": self.target, "streams": streams}
            rows += (new := [{**point, "mode": mode, **summary(slices[mode])} for mode in slices])
            ratios += (compared := [{**point, **row} for row in against_best(rates(slices), BAR)])
            print(f"{table(new)}\n{table(compared)}", flush=True)
        return {"rows": rows, "ratios": ratios}

    async def tasks(self) -> dict[str, list[Row]]:
        fixed = self.options.alone_modes
        alone = [(task, 1, fixed, TASK_BAR) for task in self.options.tasks if task != "creative"]
        crowd = [("creative", streams, ["plain"], BAR) for streams in self.concurrencies]
        rows = []
        for task, streams, others, bar in [
            *(alone if 1 in self.concurrencies else []),
            *(crowd if "creative" in self.options.tasks else []),
        ]:
            slices = await self.slices(f"tasks, {task}", streams, [*others, "adaptive"], [task])
            row = {"target": self.target, "streams": streams, "task": task}
            rows += [{**row, **compared} for compared in against_best(rates(slices), bar)]
            print(table(rows[-1:]), flush=True)
        return {"tasks": rows}

    async def slices(
        self, title: str, streams: int, modes: Sequence[str], tasks: Sequence[str]
    ) -> dict[str, list[Slice]]:
        """Returns slices by mode. In one slice all modes get the same requests in the same order."""
        options = self.options
        measured: dict[str, list[Slice]] = {mode: [] for mode in modes}
        for number in range(options.slices):
            progress(f"{title}, {self.target}, {streams} streams, slice {number + 1} of {options.slices}")
            for mode in rotated(modes, number):
                client = LoadClient(
                    self.stub, partial(request_of, tasks, mode), options.tokens, number * STRIDE
                )
                warmup = options.warmup + streams * WARMUP_PER_STREAM_S
                seconds = options.seconds + streams * SECONDS_PER_STREAM
                start = warmup + await client.follow([(warmup + seconds, streams)])
                measured[mode].append(slice_of(client.answers, start, start + seconds))
        return measured

    async def open(self) -> dict[str, list[Row]]:
        """Shares of the capacity of plain decoding."""
        options = self.options
        capacity = await self.plain_rate(max(self.concurrencies))
        rows = []
        for number, share in enumerate(options.rates):
            requests_per_s = share * capacity / options.tokens
            times = arrivals(requests_per_s, options.open_seconds, seed=number)
            for mode in rotated(options.open_modes, number):
                progress(f"open, {self.target}, {share} of {capacity:.0f} tokens/s, {mode}")
                client = LoadClient(self.stub, partial(request_of, TASKS, mode), options.tokens, 0)
                started = await client.arrive(times)
                row = {"target": self.target, "share": share, "requests/s": requests_per_s, "mode": mode}
                measured = slice_of(client.answers, started, float("inf"))
                rate = rate_between(client.answers, started, started + options.open_seconds)
                rows.append({**row, **summary([replace(measured, rate=rate)])})
            print(table(rows[-len(options.open_modes) :]), flush=True)
        return {"open": rows}

    async def plain_rate(self, streams: int) -> float:
        """Tokens/s, as the section closed found, or measured now."""
        point = {"target": self.target, "streams": streams, "mode": "plain"}
        for row in self.results.get("rows", []):
            if row.items() >= point.items():
                return float(row["tokens/s"])
        slices = await self.slices("open, capacity", streams, ["plain"], TASKS)
        return statistics.median(part.rate for part in slices["plain"])

    async def crossing(self) -> dict[str, list[Row]]:
        """Rows by window: how many streams there were at its beginning, tokens/s, and the ratio."""
        options = self.options
        steps = list(zip(options.crossing_seconds, (1, options.crossing, 1), strict=True))
        pairs = []
        for number in range(options.pairs):
            pair = {}
            for mode in rotated(["plain", "adaptive"], number):
                progress(f"crossing, {self.target}, pair {number + 1} of {options.pairs}, {mode}")
                client = LoadClient(
                    self.stub, partial(request_of, TASKS, mode), options.tokens, number * STRIDE
                )
                started = await client.follow(steps)
                starts = window_starts(steps, WINDOW_S)
                pair[mode] = [
                    rate_between(client.answers, started + s, started + s + WINDOW_S) for s in starts
                ]
            pairs.append(pair)
        rows = crossing_rows(steps, pairs)
        print(table(rows))
        print(table([min(rows, key=lambda row: float(row["adaptive / plain"]))]), flush=True)
        return {"crossing": rows}


def progress(text: str) -> None:
    print(f"[{(time.monotonic() - BEGUN) / 60:.1f} min] {text}", flush=True)


def rotated(modes: Sequence[str], by: int) -> list[str]:
    """None always comes first."""
    by %= len(modes)
    return [*modes[by:], *modes[:by]]


def keep(results: Mapping[str, list[Row]], section: str, target_threads: int) -> None:
    """Writes load.json. Earlier results of other sections and targets stay, with their own command."""
    path = RESULTS / "load.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    names = [name for names in SECTIONS.values() for name in names]
    facts = {name: _merged(before.get(name, []), results.get(name)) for name in names}
    targets = sorted({row["target"] for row in results[SECTIONS[section][0]] if "target" in row})
    measured = [f"{section}, {target}" for target in targets] or [section]
    commands = {**before.get("commands", {}), **dict.fromkeys(measured, command())}
    threads = {"target": target_threads, "draft": 1}
    print(save("load", facts.pop("rows"), commands=commands, threads=threads, **facts), flush=True)


def _merged(before: list[Row], now: list[Row] | None) -> list[Row]:
    """Returns the new results, and earlier results of targets that were not measured now."""
    if now is None:
        return before
    measured = {row.get("target") for row in now}
    return [*(row for row in before if row.get("target") not in measured), *now]


def cache_bytes(target: str) -> int:
    """Returns the bytes of ROOM tokens of keys and values in float32."""
    size = INFLATED[target]
    return ROOM * size.layers * 2 * size.kv_heads * (size.hidden // size.heads) * 4


async def measure(
    address: str, target: str, options: argparse.Namespace, results: dict[str, list[Row]]
) -> None:
    """Adds this target's rows to the results, and writes them after each section."""
    concurrencies = [streams for streams in options.concurrency if target_of(streams, options) == target]
    async with connected(address) as stub:
        bench = Bench(stub, target, concurrencies, options, results)
        for section in sections_on(target, options):
            for name, rows in (await getattr(bench, section)()).items():
                results.setdefault(name, []).extend(rows)
            keep(results, section, options.target_threads)


def target_of(streams: int, options: argparse.Namespace) -> str:
    target: str = options.targets[streams >= options.many]
    return target


def sections_on(target: str, options: argparse.Namespace) -> list[str]:
    """Sections asked for that have something to measure on this target."""
    every = {target_of(streams, options) for streams in options.concurrency}
    measured = {
        "closed": every,
        "tasks": every,
        "open": {target_of(max(options.concurrency), options)},
        "crossing": {target_of(options.crossing, options)},
    }
    return [section for section in options.sections if target in measured[section]]


def mode(text: str) -> str:
    """Returns the name of a mode, if there is such a mode."""
    speculation_of(text)
    return text


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench load",
        description=__doc__.partition("\n")[0],
        epilog="With the defaults all sections take about 20 minutes on four cores.",
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; none: all")
    parser.add_argument("--targets", nargs=2, choices=INFLATED, default=["190M", "60M"])
    parser.add_argument(
        "--from", type=int, default=16, dest="many", help="streams, from which on the second target serves"
    )
    parser.add_argument("--target-threads", type=int, default=2, help="the draft has one")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--modes", type=mode, nargs="+", default=["plain", "fixed-4", "fixed-6", "adaptive"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, help="of the section tasks")
    parser.add_argument(
        "--alone-modes", type=mode, nargs="+", default=["fixed-4", "fixed-6"], help="for tasks alone"
    )
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--slices", type=int, default=7, help="of each mode at each point")
    parser.add_argument("--seconds", type=float, default=0.8, help="of a slice, and 12 ms more per stream")
    parser.add_argument("--warmup", type=float, default=0.3, help="seconds before, and 16 ms more per stream")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.3, 0.6, 0.9], help="shares, open loop")
    parser.add_argument("--open-modes", type=mode, nargs="+", default=["plain", "fixed-4", "adaptive"])
    parser.add_argument("--open-seconds", type=float, default=6.0, help="in which requests arrive")
    parser.add_argument("--crossing", type=int, default=64, help="streams at the height of the crossing")
    parser.add_argument("--crossing-seconds", type=float, nargs=3, default=[6.0, 10.0, 6.0])
    parser.add_argument("--pairs", type=int, default=3, help="runs of each mode through the crossing")
    options = parser.parse_args(arguments)
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}: there are {', '.join(SECTIONS)}")
    options.sections = options.sections or list(SECTIONS)
    return options


def main(arguments: Sequence[str]) -> None:
    options = parsed(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the service is ended then too
    results: dict[str, list[Row]] = {}
    for target in dict.fromkeys(options.targets):
        if not sections_on(target, options):
            continue
        progress(f"starting the service, {target}")
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(
                Path(folder),
                {
                    "target": inflated_target(target).absolute(),
                    "target.dtype": "float32",
                    "target.threads": options.target_threads,
                    "target.cache_memory": cache_bytes(target),
                    "draft": DRAFT,
                    "drafts.model.dtype": "float32",
                    "drafts.model.cache_memory": cache_bytes(target),
                },
            ) as service,
        ):
            asyncio.run(measure(service.grpc, target, options, results))
